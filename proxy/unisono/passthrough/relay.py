"""An answer on its way through: handed on as it came but for the model's name, and read for what it took.

Pure. An answer whose usage the backend does not tell is taken for what was seen of it: it must not be free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from unisono.core.conversation import Json
from unisono.core.events import Passed
from unisono.core.generation import FinishReason, Usage
from unisono.core.passthrough_request import Api, PassthroughRequest

LETTERS_PER_TOKEN: Final = 4
MOST_TOKENS: Final = 10**9
"""That anybody is believed to have taken for one answer: sums of it stay within what stores can count."""
LENGTH: Final = frozenset({"length", "incomplete"})
"""How backends say that there was no room for more."""
FAILED: Final = "failed"
ENDS: Final = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": FAILED}
"""The last event of a stream of the Responses API, and the status it tells."""


class Relay(ABC):
    """One answer to a passage."""

    def __init__(self, passage: PassthroughRequest) -> None:
        self._passage = passage
        self.said: list[str] = []
        """The visible text, as it came."""
        self.letters = 0
        """How much was generated, thoughts and calls too."""
        self.came = 0
        """How often something was."""
        self.finish = ""
        """What the backend says it ended with; empty while it goes on."""
        self._told: tuple[Mapping[str, Json], str, str] | None = None
        """The usage that the backend tells, and its names of what is sent and what is generated."""

    def feed(self, bodies: Sequence[Mapping[str, Json]]) -> list[Passed]:
        """What is handed on of some that came together."""
        return [Passed(passed) for body in bodies if (passed := self._read(body)) is not None]

    @property
    def over(self) -> bool:
        """Whether it may be whole: the backend said how it, or a choice of it, ended."""
        return bool(self.finish)

    @property
    def ending(self) -> bool:
        """Whether there is nothing to come but what it took."""
        return self.over

    @property
    def failed(self) -> bool:
        """Whether the backend says that it failed."""
        return self.finish == FAILED

    @property
    def reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.finish in LENGTH else FinishReason.STOP

    @property
    def usage(self) -> Usage:
        """As the backend counts it, else as it is guessed."""
        guessed = Usage(self._passage.tokens, max(self.came, self.letters // LETTERS_PER_TOKEN))
        return guessed if self._told is None else usage_of(*self._told, guessed)

    def _generated(self, text: Json, *, shown: bool = False) -> None:
        if isinstance(text, str) and text:
            self.letters += len(text)
            self.came += 1
            if shown:
                self.said.append(text)

    @abstractmethod
    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        """A body or an event as it is handed on; None for one that is not."""


class ChatRelay(Relay):
    """Of Chat Completions: one body, or chunks of one."""

    def __init__(self, passage: PassthroughRequest) -> None:
        super().__init__(passage)
        self._finished: set[int] = set()
        """Numbers of choices that have ended."""

    @property
    def ending(self) -> bool:
        return len(self._finished) >= self._passage.choices

    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        passed = {**body, "model": self._passage.model}
        usage = body.get("usage")
        if isinstance(usage, Mapping):
            self._told = usage, "prompt_tokens", "completion_tokens"
        choices = body.get("choices")
        for choice in _objects(choices):
            self._choice(choice)
        if self._passage.stream and not self._passage.wants_usage and "usage" in passed:
            # It was asked for here, and by nobody else.
            del passed["usage"]
            if not choices:
                return None
        return passed

    def _choice(self, choice: Mapping[str, Json]) -> None:
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish:
            self.finish = finish
            number = choice.get("index")
            self._finished.add(number if isinstance(number, int) else 0)
        part = choice.get("delta" if self._passage.stream else "message")
        if not isinstance(part, Mapping):
            return
        self._generated(part.get("content"), shown=True)
        self._generated(part.get("reasoning_content") or part.get("reasoning"))
        for call in _objects(part.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, Mapping):
                self._generated(function.get("arguments"))


class ResponsesRelay(Relay):
    """Of the Responses API: one response, or the events of one."""

    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        if not self._passage.stream:
            return self._response(body)
        kind = body.get("type")
        if isinstance(kind, str) and kind.endswith(".delta"):
            self._generated(body.get("delta"), shown=kind == "response.output_text.delta")
        response = body.get("response")
        if not isinstance(response, Mapping):
            if kind == "error":
                self.finish = FAILED
            return body
        if kind in ENDS:
            return {**body, "response": self._response(response)}
        return {**body, "response": self._named(response)}

    def _response(self, response: Mapping[str, Json]) -> dict[str, Json]:
        """A whole one."""
        status, usage = response.get("status"), response.get("usage")
        self.finish = status if isinstance(status, str) and status else "completed"
        if isinstance(usage, Mapping):
            self._told = usage, "input_tokens", "output_tokens"
        if not self._passage.stream:
            for item in _objects(response.get("output")):
                self._generated(item.get("arguments"))
                for part in _objects(item.get("content")):
                    self._generated(part.get("text"), shown=item.get("type") == "message")
        return self._named(response)

    def _named(self, response: Mapping[str, Json]) -> dict[str, Json]:
        return {**response, "model": self._passage.model}


KINDS: Final[Mapping[Api, type[Relay]]] = {Api.CHAT: ChatRelay, Api.RESPONSES: ResponsesRelay}


def relaying_of(passage: PassthroughRequest) -> Relay:
    return KINDS[passage.api](passage)


def usage_of(told: Mapping[str, Json], sent: str, made: str, guessed: Usage) -> Usage:
    """OpenAI's usage, of which `sent` and `made` are the names of what is sent and what is generated. What is no count
    is as `guessed`; no part is more than the whole."""

    def count(of: object, name: str, otherwise: int) -> int:
        number = of.get(name) if isinstance(of, Mapping) else None
        return number if type(number) is int and 0 <= number <= MOST_TOKENS else otherwise

    prompt, completion = count(told, sent, guessed.prompt_tokens), count(told, made, guessed.completion_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        reasoning_tokens=min(count(told.get(f"{made}_details"), "reasoning_tokens", 0), completion),
        cached_tokens=min(count(told.get(f"{sent}_details"), "cached_tokens", 0), prompt),
    )


def _objects(value: Json) -> Iterator[Mapping[str, Json]]:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, Mapping):
            yield one
