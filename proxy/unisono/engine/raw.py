"""Raw completion: sends a prompt unchanged, and emits the generated text without parsing it.

Slots and failover work as for Harmony generations. If a deployment fails, the next deployment continues after the same
tokens. A deployment that does not accept token ids continues after the text of these tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from unisono.core.error_texts import OPENAI_PROMPT_TOO_LONG
from unisono.core.events import Event
from unisono.core.generation import (
    DEFAULT_CONTEXT,
    Capabilities,
    CompletionJob,
    FinishReason,
    OutputForm,
    Prompt,
    Usage,
)
from unisono.core.route_protocol import DeploymentPool, RouteRequirements, Slot, blocks_of
from unisono.engine.abilities import (
    check_abilities,
    check_prompt_logprobs,
    logprob_recorder,
    prompt_recorder,
    required_abilities,
)
from unisono.engine.attempt import (
    LONG_CHUNK_CHARS,
    PORTION_TOKENS,
    AttemptTelemetry,
    ChunkReader,
    SlotSession,
    portions,
)
from unisono.engine.failover_policy import ENDS_EARLY, MAX_REGENERATIONS, Action, AttemptError, Progress
from unisono.engine.raw_text import RawText
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest, RawPrompt
from unisono.errors import (
    BackendError,
    BackendProtocolError,
    CannotGoOn,
    ContextTooLong,
    InvalidRequest,
    UnsupportedValue,
)
from unisono.harmony.encoding import Encoding
from unisono.harmony.max_tokens import TokenCap
from unisono.harmony.raw_codec import plain_decoder, retokenized

LONG_OUTPUT_TOKENS = 2_000  # generated tokens that take a few milliseconds to encode again

NOT_ENCODABLE = (
    "The backend of this model accepts only text, and no text is encoded as exactly these ids; send the prompt as text."
)
NO_SPECIAL_TOKENS = "The output of this model's backend contains no special tokens."


async def to_prompt(encoding: Encoding, raw: RawPrompt, param: str | None) -> list[int]:
    """Return the token ids of a prompt; text is encoded as a model server would encode it.

    Raises InvalidRequest, which names the field `param`, if the text cannot be tokenized.
    """
    if raw.text is None:
        return list(raw.tokens)
    try:
        if len(raw.text) > LONG_CHUNK_CHARS:
            return await asyncio.to_thread(encoding.encode_as_server, raw.text)
        return encoding.encode_as_server(raw.text)
    except ValueError as error:
        raise InvalidRequest(
            "The prompt contains text that cannot be tokenized, such as a long run of one character.", param=param
        ) from error


class EncodedPrompt:
    """Prompt of a raw completion, in the form that each backend accepts.

    `tokens` is empty until `encode` has run.
    """

    def __init__(self, encoding: Encoding, raw: RawPrompt) -> None:
        self._encoding = encoding
        self.raw = raw
        self.tokens: list[int] = []

    async def encode(self, param: str | None) -> None:
        """Set `tokens`; raises InvalidRequest for field `param` if the text cannot be tokenized."""
        self.tokens = await to_prompt(self._encoding, self.raw, param)

    async def form_for(self, able: Capabilities, full: list[int], generated: list[int]) -> Prompt:
        """Return the prompt for a backend with the capabilities `able`.

        `generated` are the tokens of the answer so far. `full` are the tokens of the prompt followed by `generated`.

        Raises CannotGoOn if the backend accepts only text, and would encode that text to different tokens.
        """
        # A backend uses token ids unchanged, so only text has to be checked.
        if able.prompt is not OutputForm.TEXT:
            return Prompt(full)
        return Prompt(full, await asyncio.to_thread(self._text_of, full, generated))

    def _text_of(self, full: list[int], generated: list[int]) -> str:
        encoding, raw = self._encoding, self.raw
        if raw.text is not None and not generated:
            return raw.text
        try:
            text = encoding.decode(self.tokens) if raw.text is None else raw.text
            if raw.text is None and encoding.encode_as_server(text) != self.tokens:
                raise CannotGoOn(NOT_ENCODABLE)
            text += encoding.decode(generated)
            same = Encoding.special_ids(encoding.encode_as_server(text)) == Encoding.special_ids(full)
        except ValueError:
            same = False
        if not same:
            raise CannotGoOn(
                "The answer so far contains the spelling of a special token as text; only a backend that accepts token "
                "ids can continue the answer."
            )
        return text


class RawGeneration(BatchStream):
    """A raw completion in progress."""

    def __init__(self, encoding: Encoding, pool: DeploymentPool, request: GenerationRequest, raw: RawPrompt) -> None:
        self.report = GenerationReport()
        self._encoding = encoding
        self._pool = pool
        self._request = request
        self._prompt = EncodedPrompt(encoding, raw)
        self._output = RawText(encoding, raw, request.answer.stop)
        self._is_guessed = False  # some token ids of the answer were derived from a backend's text
        self._has_output = False
        self._buffered: list[Event] = []  # events that were not emitted yet
        self._lost_tokens = 0  # generated tokens that are not part of the answer
        self._cached = 0
        self._regenerations = 0  # number of regenerations because no backend could continue the text

    async def _each(self) -> AsyncGenerator[list[Event]]:
        session = SlotSession(self._pool, self._request, self.report)
        await self._prompt.encode(self._request.prompt.fields.conversation)
        check_prompt_logprobs(self._request, len(self._prompt.tokens))
        try:
            while self._output.ended is None:
                try:
                    async with aclosing(self._generated(session)) as batches:
                        async for batch in batches:
                            if events := self._to_emit(batch):
                                yield events
                except (BackendError, ContextTooLong) as error:
                    await self._recover(error, session)
            session.pause()
        finally:
            session.release()
        self._publish()
        rest = self._output.end(FinishReason.STOP)
        yield [*self._buffered, *rest, *self._output.finished(await self._usage())]

    def _to_emit(self, batch: list[Event]) -> list[Event]:
        """Return the events to emit after `batch` was read: buffered events and the batch, or none."""
        self._buffered += batch
        if self._request.answer.whole or not batch:
            return []
        self._has_output = True
        self._publish()
        events, self._buffered = self._buffered, []
        return events

    def _publish(self) -> None:
        """Copy new tokens to the report's journal; call this before yielding their events."""
        self.report.journal += self._output.tokens[len(self.report.journal) :]

    async def _usage(self) -> Usage:
        tokens = self._output.tokens
        made = len(await asyncio.to_thread(retokenized, self._encoding, tokens)) if self._is_guessed else len(tokens)
        prompt_tokens = len(self._prompt.tokens)
        cached = min(self._cached, prompt_tokens)
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=made + self._lost_tokens, cached_tokens=cached)

    async def _recover(self, error: AttemptError, session: SlotSession) -> None:
        """Carry out the failover policy's action after `error`.

        Raises `error` if the policy ends the request.
        """
        output = self._output
        # Nothing was generated, and no other deployment exists: the prompt itself cannot be sent.
        if isinstance(error, CannotGoOn) and not output.tokens and not session.has_alternative:
            session.fail(error)
            raise UnsupportedValue(NOT_ENCODABLE, param=self._request.prompt.fields.conversation) from error
        action = await session.recover(
            error,
            self._progress(),
            resumable=self._request.routing.failover,
            regenerable=self._regenerations < MAX_REGENERATIONS and not self._has_output,
        )
        match action:
            case Action.STOP if output.ended is None:
                self._buffered += output.end(FinishReason.LENGTH)
                self.report.notes.append(ENDS_EARLY)
            case Action.RESUME:
                # These tokens are generated again. As in Chat Completions, they count once.
                output.forget_unfinished()
                self._forget_logprobs(len(output.tokens))
            case Action.RESTART | Action.RETRY:
                self._regenerations += session.has_slot
                session.release()
                self._restart()

    def _progress(self) -> Progress:
        if self._output.ended is not None:
            return Progress.COMPLETE
        if self._has_output:
            return Progress.SEEN
        return Progress.UNSEEN if self._output.has_begun else Progress.NOTHING

    def _restart(self) -> None:
        """Start the answer over, and count the failed attempt's unemitted tokens as lost."""
        self._lost_tokens += len(self._output.tokens) + self._output.forget_unfinished()
        self._buffered, self._is_guessed = [], False
        self._output = RawText(self._encoding, self._prompt.raw, self._request.answer.stop)
        self._forget_logprobs(0)

    def _forget_logprobs(self, size: int) -> None:
        """Keep only the log probabilities of the first `size` tokens of the answer.

        If `size` is 0, log probabilities of the prompt are discarded too.
        """
        if (log := self.report.facts.logprobs) is not None:
            log.truncate(size)
            log.prompt = log.prompt if size else ()

    def _needs_prompt_logprobs(self) -> bool:
        log = self.report.facts.logprobs
        return self._prompt.raw.has_prompt_logprobs and not (log is not None and log.prompt)

    # -- one generation

    async def _generated(self, session: SlotSession) -> AsyncGenerator[list[Event]]:
        request = self._request
        tokens = await self._exact()
        full = [*self._prompt.tokens, *tokens]
        limit = DEFAULT_CONTEXT if request.answer.max_tokens is None else request.answer.max_tokens
        left = limit - len(tokens)
        scores_prompt = self._needs_prompt_logprobs()
        if left < 1 and not scores_prompt:
            yield self._output.end(FinishReason.LENGTH)
            return
        wants = required_abilities(request, prompt_logprobs=scores_prompt)
        blocks = blocks_of(full, request.routing.cache_salt)
        slot = await session.acquire(RouteRequirements(len(full), blocks, max(left, 1), wants, bool(tokens)))
        able = slot.capabilities
        check_abilities(request, able, prompt_logprobs=scores_prompt)
        room = (able.context or DEFAULT_CONTEXT) - len(full)
        if room < 1:
            limit = able.context or DEFAULT_CONTEXT
            message = OPENAI_PROMPT_TOO_LONG.template.format(
                limit=limit, subject="the prompt", tokens=len(full), length="its length"
            )
            raise ContextTooLong(message, param=request.prompt.fields.conversation, tokens=len(full), limit=limit)
        self.report.unmet = (
            NO_SPECIAL_TOKENS if able.output is OutputForm.MARKERLESS and not self._prompt.raw.hides_special else ""
        )
        prompt = await self._prompt.form_for(able, full, tokens)
        job = CompletionJob(
            prompt=prompt,
            # A backend reports the prompt's log probabilities with the first generated token. Therefore, one token is
            # requested even if the answer must not contain a token.
            max_tokens=max(min(left, room), 1),
            sampling=request.answer.sampling.for_backends(),
            timeouts=session.start_attempt(slot),
            request_id=request.origin.request_id,
            cache_salt=request.routing.cache_salt,
            logprobs=request.logprobs,
            prompt_logprobs=scores_prompt,
            trace=session.trace_span(0),
        )
        async with aclosing(self._read(session, slot, job, left)) as batches:
            async for batch in batches:
                yield batch

    async def _exact(self) -> list[int]:
        """Return the answer's tokens so far; tokens derived from text are tokenized again.

        The model's own tokenizer is used, so the result does not depend on how the network split the text.
        """
        tokens = self._output.tokens
        if not self._is_guessed:
            return list(tokens)
        if len(tokens) > LONG_OUTPUT_TOKENS:
            return await asyncio.to_thread(retokenized, self._encoding, tokens)
        return retokenized(self._encoding, tokens)

    async def _read(
        self, session: SlotSession, slot: Slot, job: CompletionJob, left: int
    ) -> AsyncGenerator[list[Event]]:
        """Run `job` and yield the events to emit; `left` limits the generated tokens."""
        output, able = self._output, slot.capabilities
        decoder = plain_decoder(able.output, self._encoding)
        is_text = able.output is not OutputForm.IDS
        self._is_guessed = self._is_guessed or is_text
        cap = TokenCap(self._encoding, min(left, job.max_tokens), guessed=is_text)
        stream = slot.deployment.backend.complete(job)
        telemetry = AttemptTelemetry(self.report, self._request, slot, job, 0, stream)
        add_logprobs = logprob_recorder(self._request, self.report, self._encoding)
        record_first = partial(session.record_first_token, slot)
        chunks = ChunkReader(telemetry, cap, decoder if is_text else None, record_first, add_logprobs)
        add_prompt_logprobs = prompt_recorder(job, self.report)
        unpaused = 0
        async with telemetry, slot.first_token_limit():
            async for chunk in stream:
                if chunk.cached_tokens is not None:
                    self._cached = self._cached or chunk.cached_tokens
                add_prompt_logprobs(chunk)
                tokens, finish = await chunks.read(chunk)
                events: list[Event] = []
                for portion in portions(tokens):
                    if events:
                        yield events
                    unpaused += len(portion)
                    if unpaused > PORTION_TOKENS:
                        await asyncio.sleep(0)
                        unpaused = len(portion)
                    events = output.feed(portion)
                yield events if finish is None else [*events, *output.end(finish)]
                # A stop token alone does not end the loop, because the backend still sends its token counts afterwards.
                if finish is not None or output.broken_off:
                    return
            raise BackendProtocolError("the backend ended its stream without a finish reason")
