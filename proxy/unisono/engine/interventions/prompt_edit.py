"""Prompt edits, after which the generation continues, and rejected attempts at a message.

The sampling of a retry is derived from the rejected text. Equal requests therefore lead to equal retries, even if
another replica continues the answer from a journal. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Final

from unisono.core.conversation import Tokens
from unisono.core.error_texts import close_matches
from unisono.core.frozen import dataclass
from unisono.core.generation import (
    ALL_STOP_TOKENS,
    CALL,
    END,
    FIRST_SPECIAL,
    RETURN,
    Constraint,
    FinishReason,
    OneOf,
    Sampling,
)
from unisono.harmony.builtin_tools import is_builtin
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import Stopped
from unisono.harmony.header import COMMENTARY, FINAL, Header
from unisono.harmony.recipients import FUNCTIONS, Recipient, RecipientKind, read_recipient

# The model's choice among several tools: the prompt ends with the beginning of the recipient, and the model generates
# the rest of the name. The beginning must end at a token boundary for every tool. It is therefore ` to=functions`
# without the dot, because `.get` is one token.

MAX_NAME_TOKENS: Final = 48
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class ToolNaming:
    """Reader of the tool name that the model chooses among several tools.

    `recipients` are the possible tools, with their names in headers, such as `functions.NAME`.
    """

    def __init__(self, encoding: Encoding, recipients: Sequence[str]) -> None:
        self._encoding = encoding
        self._recipients = tuple(recipients)
        functions = all(recipient.startswith(FUNCTIONS) for recipient in recipients)
        self._stem = " to=functions" if functions else " to="
        self._tails = {f" to={recipient}".removeprefix(self._stem): recipient for recipient in recipients}
        self._tokens: list[int] = []

    @property
    def header(self) -> Tokens:
        """Return the unfinished header at the end of the prompt, after `<|start|>assistant`."""
        return tuple(self._encoding.encode_marked(f"<|channel|>{COMMENTARY}{self._stem}"))

    @property
    def choices(self) -> OneOf:
        """Return the constraint for the rest of the name, which follows `header`."""
        return OneOf(tuple(self._tails))

    @property
    def text(self) -> str:
        """Return the text that the model generated for the name so far."""
        return self._encoding.decode(self._tokens)

    def reset(self) -> None:
        self._tokens.clear()

    def read(self, token: int) -> tuple[str | None, bool]:
        """Read a token; return the recipient, or None, and whether the choice is complete.

        If the choice is complete and the recipient is None, the model named no possible tool.
        """
        if token < FIRST_SPECIAL:
            self._tokens.append(token)
        return self.found(is_complete=token >= FIRST_SPECIAL or len(self._tokens) >= MAX_NAME_TOKENS)

    def found(self, *, is_complete: bool) -> tuple[str | None, bool]:
        """Return the result of `read` for the tokens so far. `is_complete`: the name has ended."""
        text = self.text
        name = (_NAME.match(text) or [""])[0]
        begun = [recipient for tail, recipient in self._tails.items() if tail.startswith(name)]
        only = begun[0] if len(begun) == 1 and name.strip(".") else None
        # A character that no tool name contains ends the name too.
        if is_complete or len(name) < len(text):
            return self._tails.get(name) or only or self._repaired(name), True
        return only, only is not None

    def _repaired(self, name: str) -> str | None:
        declared = frozenset(each.removeprefix(FUNCTIONS) for each in self._recipients if each.startswith(FUNCTIONS))
        # The name is read like a name in a header that the model wrote, with the same spelling repairs.
        word = f"{self._stem}{name}".removeprefix(" to=")
        meant = f"{FUNCTIONS}{read_recipient(word, declared).name}"
        return meant if meant in self._recipients else None


def header_for(recipient: str, *, is_text: bool = False) -> Header:
    """Return the header of a call to `recipient`; `is_text`: the tool takes free text, not JSON."""
    if is_builtin(recipient):
        return Header("analysis", Recipient(RecipientKind.HOSTED, recipient))
    return Header(
        COMMENTARY, Recipient(RecipientKind.FUNCTION, recipient.removeprefix(FUNCTIONS)), None if is_text else "json"
    )


MIN_REDRAW_TEMPERATURE: Final = 0.6  # lowest temperature of an attempt after a rejected attempt with equal conditions
SEED_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class RejectedAttempts:
    """Rejected attempts at one message.

    `count` is the number of attempts, and `constrained` the number of attempts under a constraint. `first` is the first
    attempt; None if the rejected texts are tool names. `last_text` is the text of the last attempt.
    """

    count: int = 0
    constrained: int = 0
    first: Stopped | None = None
    last_text: str = ""

    def reject(self, text: str, *, constrained: bool, at: Stopped | None = None) -> RejectedAttempts:
        """Return these attempts and one more, whose text is `text`."""
        return RejectedAttempts(self.count + 1, self.constrained + constrained, self.first or at, text)

    def is_first(self, header: Header, text: str) -> bool:
        """Return whether a message equals the first attempt."""
        return self.first is not None and (self.first.header, self.first.text) == (header, text)

    def sampling(self, sampling: Sampling, *, constrained: bool) -> Sampling:
        """Return the sampling parameters of the next attempt.

        `sampling` contains the parameters that the client requested. `constrained`: the next attempt runs under a
        constraint.
        """
        # If only the new attempt, or only the rejected attempts, ran under a constraint, the text will differ anyway.
        # Under equal conditions, the same sampling may repeat the rejected text. At temperature 0 it always does.
        repeated = self.constrained if constrained else self.count - self.constrained
        if not repeated:
            return sampling
        temperature = max(sampling.temperature, MIN_REDRAW_TEMPERATURE)
        return replace(sampling, seed=self._seed(sampling.seed), temperature=temperature)

    def _seed(self, wanted: int | None) -> int:
        source = f"{wanted}\0{self.count}\0{self.last_text}".encode("utf-8", "surrogatepass")
        # Some backends accept seeds of at most 31 bits.
        return int.from_bytes(sha256(source, usedforsecurity=False).digest()[:SEED_BYTES]) >> 1


NONE_REJECTED: Final = RejectedAttempts()


@dataclass(frozen=True, slots=True)
class PromptEdit:
    """An edit of the tokens at the end of a step's prompt.

    Steps of an edit: cut the tail after its first `position` tokens, insert the complete messages `between`, open a
    message with `header`, and continue the generation. `header` follows `<|start|>assistant`; it is empty if the model
    chooses the header. `closes`: an unfinished message at `position` is closed and stays in the prompt. `naming`: the
    next generation is the name of a tool.
    """

    position: int = 0
    header: Tokens = ()
    between: Tokens = ()
    closes: bool = False
    constraint: Constraint | None = None
    naming: bool = False
    attempts: RejectedAttempts = NONE_REJECTED  # rejected attempts at the message that follows
    body: Tokens = ()  # whole body of the opened message, with its terminator; empty if the model generates the body
    # The body of the unfinished message is replaced with `body`; `position` is the position after its header.
    trims: bool = False
    ends: bool = False  # the answer ends after this edit
    # finish reason of the generation before the edit; None if the gateway stopped that generation
    ended: FinishReason | None = None
    rule: str = ""  # name of the recovery rule to report; empty if no rule is reported

    @property
    def split_body(self) -> tuple[Tokens, Tokens]:
        """Return the body without its terminator, and the terminator."""
        end = len(self.body) - (len(self.body) > 0 and self.body[-1] in ALL_STOP_TOKENS)
        return self.body[:end], self.body[end:]

    def applied_to(self, tail: Sequence[int], start: Tokens, *, has_call: bool) -> list[int]:
        """Return the first `position` tokens of `tail`, their last message closed, and `between`.

        `tail` contains the tokens after the rendered prompt. The prompt itself ends with `start`, so the first message
        of the tail has no `start` of its own. `has_call`: the step has a complete call. A call at the end of the
        remaining tokens then keeps its terminator.
        """
        remaining = [*tail[: self.position]]
        if self.closes:
            remaining.append(END)
        elif remaining and remaining[-1] in ALL_STOP_TOKENS:
            # A complete call keeps its own terminator, even if messages follow; every other message ends with END.
            remaining[-1] = CALL if remaining[-1] == CALL and has_call else END
        elif remaining and remaining[-1] != END:
            remaining.append(END)
        if self.between:
            # If nothing remains of the tail, the start of the first inserted message is already in the prompt.
            remaining += self.between if remaining else self.between[len(start) :]
        return remaining


NO_EDIT: Final = PromptEdit()

NOT_AVAILABLE: Final = "This tool is not available now. Use another one, or answer without."
MAX_LISTED_TOOLS: Final = 30  # number of tools listed in the error result for a call to an undeclared tool


def no_such_tool(recipient: str, available: Iterable[str]) -> str:
    """Return the error result for a call to an undeclared tool.

    The text lists the `available` recipients, the most similar names first.
    """
    name = recipient.removeprefix(FUNCTIONS)
    names = [tool.removeprefix(FUNCTIONS) for tool in dict.fromkeys(available)]
    close = close_matches(name, names, min_similarity=0.5)
    listed = [*close, *(other for other in names if other not in close)][:MAX_LISTED_TOOLS]
    if not listed:
        return f"There is no tool '{name}', and there are no other tools. Answer without tools."
    return f"There is no tool '{name}'. Call one of these instead, or answer without: {', '.join(listed)}."


@dataclass(slots=True)
class StepInterventions:
    """Interventions in one step of an answer."""

    edits: int = 0
    edits_before: int = 0  # number of edits in the previous step
    regenerations_at_end: int = 0  # number of times that a required call was opened after a generation ended
    trims: int = 0  # number of trims in the current attempt at a message
    attempts: RejectedAttempts = NONE_REJECTED  # rejected attempts at the current message
    has_skipped: bool = False  # reasoning beyond the budget was closed at once, and no other message followed
    is_answering: bool = False  # the gateway opened an answer
    has_call: bool = False  # the step contains a complete call
    pending: PromptEdit | None = None  # edit that must be applied before anything else is generated
    last: PromptEdit = NO_EDIT  # the last applied edit that was not a trim
    header_end: int = -1  # position in the tail after the last inserted header; -1 if no header was inserted
    refusals: frozenset[str] = frozenset()  # rules of the refusals in the prompt of this step

    def record_message(self, *, is_preamble: bool, is_call: bool) -> None:
        """Record that a complete message was accepted."""
        self.trims = 0
        # In each attempt at a rejected message, the model may write a preamble first. A preamble does not end the
        # attempts.
        if not is_preamble:
            self.attempts = NONE_REJECTED
        self.has_call = self.has_call or is_call

    def record_end(self, reason: FinishReason) -> None:
        """Record in the pending edit, if any, why the generation before the edit ended."""
        if self.pending is not None:
            self.pending = replace(self.pending, ended=reason)


class HeaderSpelling:
    """Encoder of messages and headers.

    Encoded headers do not include `<|start|>assistant`; whole messages begin with these tokens.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._start = encoding.assistant_start

    @property
    def answer(self) -> Tokens:
        """Return the header of an answer."""
        return self.header(Header(FINAL))

    def header(self, header: Header) -> Tokens:
        return tuple(self._encoding.encode_marked(header.spelled()))

    def written(self, at: Stopped) -> Tokens:
        """Return the header of the stopped message as the model wrote it."""
        # If the tokens were derived from text, they depend on how the network split that text. Therefore, encode the
        # header again. A well-formed header contains no control token that is spelled with ordinary tokens.
        return tuple(self._encoding.encode_marked(self._encoding.decode(at.tokens)))[len(self._start) :]

    def body(self, at: Stopped) -> Tokens:
        """Return the body of the stopped message, with its terminator."""
        # A call is complete only if it ends with `<|call|>`.
        stop = CALL if at.header.is_call else RETURN
        return (*self._encoding.encode_generated(at.text or ""), stop)

    def empty(self, at: Stopped) -> Tokens:
        """Return the stopped message with an empty body."""
        return (*self._start, *self.written(at), END)

    def refused(self, at: Stopped, reason: str) -> Tokens:
        """Return the call as the model wrote it, followed by `reason` as its result."""
        header = f"<|start|>{at.header.recipient.full_name} to=assistant<|channel|>{at.header.channel}<|message|>"
        body = self._encoding.encode_generated(at.text or "")
        result = (*self._encoding.encode_marked(header), *self._encoding.encode_text(reason), END)
        return (*self._start, *self.written(at), *body, CALL, *result)

    def answer_with(self, text: str, place: int) -> PromptEdit:
        """Return the edit that inserts an answer with the text `text` at the position `place`."""
        return PromptEdit(place, self.answer, body=(*self._encoding.encode_generated(text), RETURN))

    def first_of(self, attempts: RejectedAttempts, place: int) -> PromptEdit:
        """Return the edit that inserts the first of the rejected attempts at the position `place`."""
        first = attempts.first
        assert first is not None
        return PromptEdit(place, self.written(first), body=self.body(first), attempts=attempts)

    def call_as_text(self, at: Stopped) -> Tokens:
        """Return the body of an answer that contains the call as text, with its terminator."""
        text = f"{at.header.recipient.full_name.removeprefix(FUNCTIONS)}({at.text or ''})"
        return (*self._encoding.encode_generated(text), RETURN)
