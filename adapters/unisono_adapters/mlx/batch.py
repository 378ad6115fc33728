"""Generation thread of the engine process: it runs one model on a batch of requests.

Only this module uses the model, and only in this thread. Commands arrive in a thread-safe queue and are executed
between two steps of the model. So a cancelled request leaves the batch after at most one step, even while its prompt
is being read. The output of each step is passed to `tell` as one list of messages.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from unisono.core.generation import CALL, ENDOFTEXT, RETURN, START, VOCABULARY
from unisono_adapters.mlx.guides import Guide
from unisono_adapters.mlx.prefix import Layers, Prefixes
from unisono_adapters.mlx.sampling import Processor, Sampler, check_sampling, make_processors, make_sampler
from unisono_adapters.mlx.wire import (
    EVERYONE,
    Addressed,
    BatchLimits,
    Command,
    GenerateCommand,
    Logprob,
    PromptLogprobs,
    Pulse,
    Reason,
    RequestRefused,
    Submit,
    TokenOutput,
    Withdraw,
)

# Maximum number of tokens per pass of the model. The result has 201,088 numbers for each token: 100 MB per pass.
SCORED_TOKENS: Final = 128


class PromptScorer:
    """Scorer of one prompt, in parts of at most `SCORED_TOKENS` tokens.

    `top` is the number of alternatives to return for each token. When the scorer is done, the attention caches in
    `layers` cover the whole prompt except its last token.
    """

    def __init__(self, model: object, prompt: Sequence[int], top: int) -> None:
        self._model = cast("Callable[..., mx.array]", model)
        self._prompt = list(prompt)
        self._top = top
        self._done = 0
        self.layers: Layers = make_prompt_cache(model)

    @property
    def is_done(self) -> bool:
        return self._done == len(self._prompt) - 1

    def next_part(self) -> list[Logprob]:
        """Score the next part of the prompt.

        The first part begins with the second token of the prompt.
        """
        begin, end = self._done, min(self._done + SCORED_TOKENS, len(self._prompt) - 1)
        rows = self._model(mx.array([self._prompt[begin:end]]), cache=self.layers)[0]
        self._done = end
        following = self._prompt[begin + 1 : end + 1]
        scored = [logprob_of(row, token, self._top) for row, token in zip(rows, following, strict=True)]
        mx.eval([layer.state for layer in self.layers])  # otherwise the lazy state would keep `rows` in memory
        return scored


def logprob_of(values: mx.array, token: int, top: int) -> Logprob:
    """Return the log probability of `token`, with the `top` most likely tokens as alternatives.

    `values` is a row of logits: one number for each token of the vocabulary.
    """
    values = values.astype(mx.float32)
    # Normalise again, because biases and penalties may have changed the sum of the probabilities.
    values = values - mx.logsumexp(values)
    own = cast("float", values[token].item())
    if not top:
        return own, []
    ids = cast("list[int]", mx.argpartition(-values, kth=top - 1)[:top].tolist())
    ranked = [(each, cast("float", values[each].item())) for each in ids]
    return own, sorted(ranked, key=lambda one: -one[1])


# Origin of a request: the number of its connection, and the id that the gateway gave it on that connection.
Route: TypeAlias = tuple[int, int]


class _Progress(Protocol):
    """Progress of reading a prompt.

    `progress` is a pair: the number of tokens read so far, and the number of tokens in the prompt.
    """

    uid: int
    progress: tuple[int, int]


class _Response(Protocol):
    """Generated token of one request.

    `finish_reason`, `all_tokens` and `prompt_cache` are None except in the response with the last token.
    """

    uid: int
    token: int
    logprobs: mx.array
    finish_reason: str | None
    all_tokens: Sequence[int]
    prompt_cache: Layers


class _Generator(Protocol):
    """Part of the interface of mlx_lm's BatchGenerator that this module uses."""

    def insert(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        caches: list[Layers | None] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: list[Sampler | None] | None = None,
        logits_processors: list[list[Processor]] | None = None,
    ) -> list[int]: ...

    def next(self) -> tuple[list[_Progress], list[_Response]]: ...

    def remove(self, uids: list[int]) -> object: ...

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[Layers, Sequence[int]]]: ...

    def close(self) -> None: ...


STOPS = (RETURN, CALL, ENDOFTEXT)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    route: Route
    salt: str
    prompt: list[int]
    cached: int
    guide: Guide | None = None
    # Number of alternatives to report for each token; None if the request needs no log probabilities.
    logprobs: int | None = None
    has_started: bool = False
    generated: int = 0


@dataclass(slots=True)
class _Scoring:
    """Request that joins the batch only after all tokens of its prompt have been scored."""

    submit: Submit
    scorer: PromptScorer


class Batch:
    """Batch of requests on `model`.

    `context` is the context window of the model in tokens, or None if unknown. `tell` receives the messages to send,
    once per step. `submit` and `load` are thread-safe; everything else belongs to the thread that calls `run`.
    """

    def __init__(
        self, model: object, context: int | None, tell: Callable[[list[Addressed]], None], limits: BatchLimits
    ) -> None:
        self._model = model
        self._context = context
        self._send = tell
        self._limits = limits
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._running: dict[int, _Running] = {}
        self._scoring: deque[_Scoring] = deque()
        self._prefixes = Prefixes(limits.prefix_cache_entries, limits.prefix_cache_bytes)
        self._generator = self._new_generator()
        self._pulsed_at = 0.0

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def load(self) -> tuple[int, int, int]:
        """Return the numbers of running requests, waiting requests, and tokens being processed.

        The tokens are those of the running requests.
        """
        # The generator runs requests in their order of arrival, so the first ones are running. Copying the values
        # is atomic, which matters because another thread may call this.
        rows = list(self._running.values())
        running = rows[: self._limits.batch]
        tokens = sum(len(request.prompt) + request.generated for request in running)
        waiting = len(rows) - len(running) + len(self._scoring) + self._commands.qsize()
        return len(running), waiting, tokens

    def warm_up(self) -> None:
        """Generate one token, which proves that the model works. mlx may raise any exception."""
        self._generator.insert([[START]], max_tokens=[1])
        while not self._generator.next()[1]:
            pass

    def run(self) -> None:
        """Execute commands and generate, forever."""
        while True:
            self._read_commands(wait=not self._running and not self._scoring)
            try:
                events = [*self._score(), *self._step()]
            except Exception as error:  # mlx may raise anything, which leaves the whole batch unreliable
                _log.exception("a generation step failed")
                events = self._abandon(f"the engine failed in a generation step: {error}")
            self._send(events)

    def _read_commands(self, *, wait: bool) -> None:
        events: list[Addressed] = []
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            match command:
                case Submit():
                    events += self._admit(command)
                case Withdraw(connection, request):
                    self._remove(connection, request)
        if events:
            self._send(events)

    def _admit(self, submit: Submit) -> list[Addressed]:
        command = submit.command
        refusal = self._refusal(command)
        if refusal is not None:
            reason, message = refusal
            return [(submit.connection, RequestRefused(command.id, reason, message))]
        if command.prompt_logprobs and len(command.prompt) > 1:
            scorer = PromptScorer(self._model, command.prompt, command.logprobs or 0)
            self._scoring.append(_Scoring(submit, scorer))
            return []
        known, layers = self._prefixes.longest_prefix(command.salt, command.prompt)
        self._insert(submit, known, layers)
        return []

    def _insert(self, submit: Submit, known: int, layers: Layers | None) -> None:
        """Add a request to the batch.

        `layers` are the attention caches of the first `known` prompt tokens.
        """
        command, guide = submit.command, submit.guide
        prompt = list(command.prompt)
        room = command.max_tokens if self._context is None else min(command.max_tokens, self._context - len(prompt))
        processors = make_processors(command.sampling, len(prompt))
        if guide is not None:
            processors.append(guide)  # last, so that no bias can allow a token that the guide forbids
        uids = self._generator.insert(
            [prompt[known:]],
            max_tokens=[room],
            caches=[layers],
            all_tokens=[prompt[:known]],
            samplers=[make_sampler(command.sampling)],
            logits_processors=[processors],
        )
        cached = 0 if command.prompt_logprobs else known
        self._running[uids[0]] = _Running(
            (submit.connection, command.id), command.salt, prompt, cached, guide, command.logprobs
        )

    def _score(self) -> list[Addressed]:
        """Score the next tokens of the first prompt in the queue for scoring.

        When the prompt is scored completely, add its request to the batch.
        """
        if not self._scoring:
            return []
        waiting = self._scoring[0]
        logprobs = waiting.scorer.next_part()
        if waiting.scorer.is_done:
            self._scoring.popleft()
            self._insert(waiting.submit, len(waiting.submit.command.prompt) - 1, waiting.scorer.layers)
        return [(waiting.submit.connection, PromptLogprobs(waiting.submit.command.id, logprobs))]

    def _refusal(self, command: GenerateCommand) -> tuple[Reason, str] | None:
        requests = len(self._running) + len(self._scoring)
        if requests >= self._limits.batch + self._limits.waiting:
            return "overloaded", f"{requests} requests are running or waiting, which is the limit"
        if not command.prompt or command.max_tokens < 1:
            return "rejected", "the prompt must not be empty, and the token limit must be at least 1"
        if min(command.prompt) < 0 or max(command.prompt) >= VOCABULARY:
            return "rejected", "the prompt contains a token id outside the vocabulary"
        if self._context is not None and len(command.prompt) >= self._context:
            return "context", f"the prompt has {len(command.prompt)} tokens; the model's context has {self._context}"
        try:
            check_sampling(command.sampling)
        except ValueError as error:
            return "rejected", str(error)
        return None

    def _step(self) -> list[Addressed]:
        if not self._running:
            return []
        prefilled, generated = self._generator.next()
        events: list[Addressed] = []
        now = time.monotonic()
        if now - self._pulsed_at >= 1.0:
            self._pulsed_at = now
            events.append((EVERYONE, Pulse()))
        for progress in prefilled:
            done, total = progress.progress
            if done == total - 1:  # the last token of the prompt is read in the first step of generation
                self._cache_prompt_of(progress.uid)
        for response in generated:
            request = self._running[response.uid]
            cached = None if request.has_started else request.cached
            request.has_started = True
            request.generated += 1
            events.append((request.route[0], _to_message(request, response, cached)))
            if response.finish_reason is not None:
                del self._running[response.uid]
                self._cache_prompt(request, response.token, response.all_tokens, response.prompt_cache)
        return events

    def _cache_prompt_of(self, uid: int) -> None:
        request = self._running[uid]
        if len(request.prompt) - 1 > request.cached:
            layers, tokens = self._generator.extract_cache([uid])[uid]
            self._cache_layers(request.salt, tokens, layers)

    def _cache_prompt(self, request: _Running, last: int, tokens: Sequence[int], layers: Layers) -> None:
        """Cache the prompt together with its finished answer if the answer ends in a tool call.

        After a tool call, the next prompt begins with exactly these tokens. After `<|return|>`, the next prompt begins
        with other tokens, because the history contains the message with `<|end|>` as its end. Then only the prompt,
        which is already cached, is a prefix of the next prompt.
        """
        if last == CALL:
            self._cache_layers(request.salt, tokens, layers)

    def _cache_layers(self, salt: str, tokens: Sequence[int], layers: Layers) -> None:
        mx.eval([layer.state for layer in layers])  # otherwise the lazy state would keep the whole batch in memory
        self._prefixes.keep(salt, tokens, layers)

    def _remove(self, connection: int, request: int | None) -> None:
        self._scoring = deque(
            waiting
            for waiting in self._scoring
            if waiting.submit.connection != connection or request not in (None, waiting.submit.command.id)
        )
        removed = [
            uid
            for uid, running in self._running.items()
            if running.route[0] == connection and request in (None, running.route[1])
        ]
        if removed:
            self._generator.remove(removed)
            for uid in removed:
                del self._running[uid]

    def _abandon(self, message: str) -> list[Addressed]:
        events: list[Addressed] = [
            (running.route[0], RequestRefused(running.route[1], "failed", message))
            for running in self._running.values()
        ]
        events += (
            (waiting.submit.connection, RequestRefused(waiting.submit.command.id, "failed", message))
            for waiting in self._scoring
        )
        self._running.clear()
        self._scoring.clear()
        self._prefixes.clear()
        self._generator.close()
        self._generator = self._new_generator()
        mx.clear_cache()
        return events

    def _new_generator(self) -> _Generator:
        generator = BatchGenerator(
            self._model,
            stop_tokens=[[token] for token in STOPS],
            completion_batch_size=self._limits.batch,
            prefill_batch_size=min(8, self._limits.batch),
            prefill_step_size=self._limits.prefill_chunk,
        )
        return cast("_Generator", generator)


def _to_message(request: _Running, response: _Response, cached: int | None) -> TokenOutput | RequestRefused:
    """Return the message to the gateway for one token."""
    if response.finish_reason is not None and request.guide is not None and request.guide.failed:
        return RequestRefused(request.route[1], "failed", f"the constraint cannot be enforced: {request.guide.failed}")
    logprobs = None if request.logprobs is None else (logprob_of(response.logprobs, response.token, request.logprobs),)
    return TokenOutput(request.route[1], (response.token,), response.finish_reason, cached, logprobs)
