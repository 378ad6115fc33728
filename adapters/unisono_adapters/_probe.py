"""Probe of a backend: checks that it runs gpt-oss, and determines its capabilities.

A model list proves nothing, so the probe generates a few tokens of an answer, then answers that end in each stop token.
If the backend accepts biases, a bias forces the stop tokens. The probe compares tokens and reported token counts with
the gateway's own encoding. Its few requests are short and sequential, have a time limit, and have `REQUEST_ID` as
their id in the backend's log. No request keeps running when the probe is cancelled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field, replace
from time import monotonic
from typing import TypeVar

from unisono.core.frozen import dataclass
from unisono.core.generation import (
    CALL,
    CHANNEL,
    STOP_TOKENS,
    TEXT_KINDS,
    Capabilities,
    Chunk,
    CompletionJob,
    Constraint,
    FinishReason,
    OutputForm,
    Prompt,
    Sampling,
    Timeouts,
)
from unisono.core.probe import SMALLEST_CONTEXT, Check, Finding, Probe, Severity
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    ContextTooLong,
    UnisonoError,
)
from unisono.harmony.encoding import Encoding, load_encoding
from unisono_adapters._failures import IdsMissing
from unisono_adapters._probe_prompts import BODIES, ENDINGS, FORCE, MARKED, OPENED, QUESTION, TRIALS, TYPED, Trial

T = TypeVar("T")
REQUEST_ID = "unisono-probe"
FIRST_TOKEN_S = 30.0
CONNECT_S = 5.0
# Time limit for a call of the backend's tokenizer, in seconds.
ANSWER_S = 10.0

_BARE_CHANNEL = re.compile(r"\s*(?:analysis|commentary|final)")


@dataclass(frozen=True, slots=True)
class Subject:
    """Backend to probe.

    `claims` are the capabilities to check: those of its kind, and those that the backend reports. `remedies` are advice
    to the operator for failed checks. `encode` and `decode` call the backend's own tokenizer, which parses special
    tokens. They return None or raise a BackendError if the tokenizer does not answer. `long_prompt` is for backends
    known to truncate prompts: the length in tokens of a prompt that the backend must read completely. With 0, no such
    prompt is sent. `trusted` are kinds of constraints that need no trial, because this package enforces them.
    `first_token_s` replaces FIRST_TOKEN_S for backends that load their model on the first request."""

    complete: Callable[[CompletionJob], AsyncIterator[Chunk]]
    claims: Capabilities
    remedies: Mapping[Check, str] = field(default_factory=dict)
    encode: Callable[[str], Awaitable[Sequence[int] | None]] | None = None
    decode: Callable[[Sequence[int]], Awaitable[str | None]] | None = None
    long_prompt: int = 0
    first_token_s: float | None = None
    trusted: frozenset[str] = frozenset()
    # Function that scores given tokens; None if the backend cannot do that.
    score: Callable[[ScoreJob], Awaitable[Sequence[TokenScore | None]]] | None = None


async def examine(subject: Subject) -> Probe:
    """Probe a backend and return the findings.

    Raises BackendUnavailable or BackendOverloaded if the backend cannot be reached or is busy, since that says nothing
    about its fitness. Raises BackendTimeout if the backend stalls after it has answered the first request."""
    # In a thread, since loading the encoding for the first time takes half a second.
    exam = _Probing(subject, await asyncio.to_thread(load_encoding))
    try:
        heard = await exam.generate(exam.prompt_with(), 3)
    except (BackendError, ContextTooLong) as error:
        exam.failed_to_generate(error)
        return exam.result()
    exam.generated(heard)
    if heard.tokens or heard.text:
        await exam.tokenizer(heard)
        exam.markers(heard)
        await exam.stops()
        await exam.check_long_prompts()
        await exam.constraints()
        await exam.scores()
    exam.context()
    return exam.result()


@dataclass(slots=True)
class _ProbeAnswer:
    """Result of one complete generation."""

    sent: int  # number of prompt tokens that were sent
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    stop_token: int | None = None
    claimed: int | None = None  # number of prompt tokens that the backend reports
    first_s: float | None = None


class _Probing:
    def __init__(self, subject: Subject, encoding: Encoding) -> None:
        self._subject = subject
        self._encoding = encoding
        self._capabilities = subject.claims
        self._findings: dict[Check, Finding] = {}
        self._first_s: float | None = None
        self._first_token_s = FIRST_TOKEN_S if subject.first_token_s is None else subject.first_token_s
        patience = self._first_token_s
        self._timeouts = Timeouts(CONNECT_S, first_token_s=patience, silence_s=patience, total_s=2 * patience)
        self._accepts_ids = subject.claims.prompt is OutputForm.IDS
        self._gives_ids = subject.claims.output is OutputForm.IDS

    # Requests

    def prompt_with(self, ending: str = "") -> Prompt:
        """Return the prompt of the probe, followed by `ending`, the beginning of an answer."""
        start, end = QUESTION
        encode = self._encoding.encode_marked
        if not self._accepts_ids:
            return self._text_prompt(start + end + ending)
        return Prompt([*encode(start), *self._encoding.encode_text(TYPED), *encode(end + ending)])

    def _text_prompt(self, text: str) -> Prompt:
        return Prompt(self._encoding.encode_marked(text), None if self._accepts_ids else text)

    async def generate(
        self, prompt: Prompt, max_tokens: int, force: int | None = None, constraint: Constraint | None = None
    ) -> _ProbeAnswer:
        job = CompletionJob(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0.0, logit_bias={} if force is None else {force: FORCE}),
            timeouts=self._timeouts,
            request_id=REQUEST_ID,
            constraint=constraint,
        )
        heard = _ProbeAnswer(len(prompt.tokens))
        started = monotonic()
        # The protocol promises an iterator only, but every adapter returns a generator, which must be closed.
        async with aclosing(self._subject.complete(job)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if heard.first_s is None and (chunk.tokens or chunk.text):
                    heard.first_s = monotonic() - started
                heard.tokens += chunk.tokens
                heard.text += chunk.text
                heard.finish = chunk.finish or heard.finish
                heard.stop_token = chunk.stop_token if chunk.stop_token is not None else heard.stop_token
                heard.claimed = chunk.prompt_tokens if chunk.prompt_tokens is not None else heard.claimed
        return heard

    async def _generate(
        self, prompt: Prompt, max_tokens: int, force: int | None = None, constraint: Constraint | None = None
    ) -> _ProbeAnswer | None:
        """Generate; return None if the backend fails. Raises if it is busy, unreachable or too slow."""
        try:
            return await self.generate(prompt, max_tokens, force, constraint)
        except (BackendUnavailable, BackendOverloaded, BackendTimeout):
            raise
        except BackendError:
            return None

    # Findings

    def _find(self, check: Check, ok: bool, detail: str = "", severity: Severity | None = None, text: str = "") -> None:
        """Record a finding, unless the same check has failed before."""
        if check not in self._findings or self._findings[check].ok:
            remedy = "" if ok else self._subject.remedies.get(check, "")
            self._findings[check] = Finding(check, ok, detail, remedy, severity, text)

    def result(self) -> Probe:
        order = list(Check)
        findings = sorted(self._findings.values(), key=lambda finding: order.index(finding.check))
        return Probe(self._capabilities, tuple(findings), self._first_s)

    def failed_to_generate(self, error: BackendError | ContextTooLong) -> None:
        if isinstance(error, BackendUnavailable | BackendOverloaded):
            raise error
        message = _message_of(error)
        if isinstance(error, IdsMissing):
            self._find(Check.IDS_OUT, False, "It returns text only, although token ids were requested.", text=message)
        elif isinstance(error, BackendTimeout):
            summary = f"It responds, but sent no token within {self._first_token_s:g} s."
            self._find(Check.GENERATION, False, summary)
        else:
            self._find(Check.GENERATION, False, f"It failed to generate: {error.message}.", text=message)

    def generated(self, heard: _ProbeAnswer) -> None:
        self._first_s = heard.first_s
        if not heard.tokens and not heard.text:
            self._find(Check.GENERATION, False, "Its answer contains no token.")
            return
        self._find(Check.GENERATION, True)
        if self._gives_ids:
            self._find(Check.IDS_OUT, True)
        if self._accepts_ids:
            self._read_exactly(heard)

    def _read_exactly(self, heard: _ProbeAnswer) -> None:
        """Compare the reported number of prompt tokens with the number of ids sent.

        A missing or implausibly large number is ignored, so that only the generated answer is checked."""
        if not heard.claimed or heard.claimed > 4 * heard.sent:
            return
        if heard.claimed == heard.sent:
            self._find(Check.IDS_IN, True)
            self._find(Check.PROMPT_WHOLE, True)
            return
        message = f"It received {heard.sent} token ids and reports {heard.claimed} prompt tokens."
        spelled = self._encoding.decode(self.prompt_with().tokens)
        if heard.claimed < heard.sent and heard.claimed != len(self._encoding.encode_as_server(spelled)):
            self._find(Check.PROMPT_WHOLE, False, message)
        else:
            self._find(Check.IDS_IN, False, message)

    async def tokenizer(self, heard: _ProbeAnswer) -> None:
        """Check the tokenizer with the backend's tokenizer endpoint, if there is such an endpoint.

        Otherwise check the token counts of a backend that reads text, or the answer of a backend that reads ids."""
        if await self._compare_tokenizer():
            return
        if not self._accepts_ids:
            await self._counted()
        elif self._gives_ids:
            harmony = heard.tokens[0] == CHANNEL and _BARE_CHANNEL.match(self._encoding.decode(heard.tokens[1:]))
            detail = "" if harmony else "It does not continue a Harmony prompt the way gpt-oss does."
            self._find(Check.TOKENIZER, bool(harmony), detail)

    async def _compare_tokenizer(self) -> bool:
        """Compare the backend's tokenizer with the gateway's; return False if no endpoint answers."""
        is_compared, encode, decode = False, self._subject.encode, self._subject.decode
        for text in (MARKED, *BODIES):
            ours = self._encoding.encode_marked(text)
            ids = await _answer(encode(text) if encode else None)
            if ids is not None:
                is_compared = True
                same = list(ids) == ours
                detail = "" if same else f"It encodes {text!r} as {_first(ids)} instead of {_first(ours)}."
                self._find(Check.TOKENIZER, same, detail)
            spelled = await _answer(decode(ours) if decode else None)
            if spelled is not None and spelled != text:
                self._find(
                    Check.TOKENIZER, False, f"It decodes {_first(ours)} as {spelled[:40]!r} instead of {text[:40]!r}."
                )
        return is_compared

    async def _counted(self) -> None:
        """Check that a text backend counts as many tokens as the gateway: one for each marker."""
        for text in (MARKED, "\n".join(BODIES)):
            prompt = self._text_prompt(text)
            heard = await self._generate(prompt, 1)
            claimed = None if heard is None else heard.claimed
            if claimed is None:
                detail = "It does not report the number of prompt tokens."
                self._find(Check.TOKENIZER, False, detail, Severity.WARNING)
                continue
            same = claimed == len(prompt.tokens)
            what = "the seven markers" if text is MARKED else "a mixed text"
            detail = "" if same else f"It counts {claimed} tokens in {what} instead of {len(prompt.tokens)}."
            self._find(Check.TOKENIZER, same, detail)
            if text is MARKED and same:
                self._find(Check.TYPED_MARKERS, False)

    def markers(self, heard: _ProbeAnswer) -> None:
        if self._gives_ids:
            if CHANNEL in heard.tokens:
                self._find(Check.MARKERS, True)
            return
        if heard.text.lstrip().startswith("<|"):
            self._find(Check.MARKERS, True)
        elif _BARE_CHANNEL.match(heard.text):
            lived_with = Severity.WARNING if self._capabilities.output is OutputForm.MARKERLESS else None
            self._find(Check.MARKERS, False, f"Its answer begins with {heard.text[:20]!r}.", lived_with)
        else:
            detail = f"Its answer begins with {heard.text[:20]!r}; gpt-oss begins with a marker."
            self._find(Check.MARKERS, False, detail)

    async def stops(self) -> None:
        """Check that the backend stops at each stop token, which the probe forces with a bias.

        Without biases, only `<|return|>` is checked: the model generates it by itself after a short answer."""
        seen: list[bool] = []
        for token, ending in ENDINGS.items():
            forced = self._capabilities.logit_bias
            if not forced and token == CALL:
                break
            heard = await self._generate(self.prompt_with(ending), 2 if forced else 6, token if forced else None)
            if heard is None:
                continue
            name = self._encoding.decode([token])
            visible = token in heard.tokens or heard.stop_token == token or name in heard.text
            if heard.finish is FinishReason.STOP:
                self._find(Check.STOPS, True)
                seen.append(visible)
            elif visible:
                self._find(Check.STOPS, False, f"It continues after {name}.")
        if seen:
            self._stop_token(all(seen))

    def _stop_token(self, visible: bool) -> None:
        promised = self._capabilities.stop_visible
        self._capabilities = replace(self._capabilities, stop_visible=visible)
        # A hidden stop token is a warning only if this kind of backend should return it.
        self._find(Check.STOP_TOKEN, visible, severity=Severity.WARNING if promised else None)

    async def check_long_prompts(self) -> None:
        if not self._subject.long_prompt:
            return
        prompt = self._text_prompt(" word" * self._subject.long_prompt)
        try:
            heard = await self.generate(prompt, 1)
        except (BackendRejected, ContextTooLong) as error:
            # Rejecting a long prompt is correct, but the prompt should fit into the context size that was reported.
            self._find(Check.CONTEXT, False, f"It rejects a prompt of {len(prompt.tokens)} tokens: {error.message}.")
            return
        if heard.claimed is not None:
            is_complete = heard.claimed >= heard.sent
            detail = "" if is_complete else f"It received {heard.sent} prompt tokens and reports {heard.claimed}."
            self._find(Check.PROMPT_WHOLE, is_complete, detail)

    def context(self) -> None:
        size = self._capabilities.context
        if size is None:
            self._find(Check.CONTEXT, False, "It does not report its context size.")
        else:
            self._find(Check.CONTEXT, size >= SMALLEST_CONTEXT, f"{size} tokens")

    async def constraints(self) -> None:
        """Try each claimed kind of constraint, and remove those that the backend does not enforce."""
        claimed = self._capabilities.constrain
        trusted = claimed & self._subject.trusted
        enforced = trusted | {kind for kind in sorted(claimed - trusted) if await self._enforces(TRIALS[kind])}
        self._capabilities = replace(self._capabilities, constrain=enforced)
        # For regular expressions and grammars that is no failure, because the gateway checks such texts itself.
        lost = ", ".join(sorted(claimed - enforced - frozenset(TEXT_KINDS)))
        message = f"It does not enforce: {lost}." if lost else ", ".join(sorted(enforced))
        self._find(Check.CONSTRAIN, not lost and bool(enforced), message, Severity.WARNING if lost else None)

    async def scores(self) -> None:
        """Check that the backend can score each token of the beginning of an answer."""
        if self._subject.score is None:
            return
        targets = self._encoding.encode_marked(OPENED)
        job = ScoreJob(self.prompt_with(), targets, top=2, timeouts=self._timeouts, request_id=REQUEST_ID)
        # The first scoring request after the start of a server may take as long as its first generation.
        scored = await _answer(self._subject.score(job), self._timeouts.total_s) or ()
        can_score = len(scored) == len(targets) and all(map(_is_plausible, scored))
        self._capabilities = replace(self._capabilities, scores=can_score)
        self._find(Check.SCORES, can_score)

    async def _enforces(self, trial: Trial) -> bool:
        heard = await self._generate(self.prompt_with(OPENED), trial.max_tokens, constraint=trial.constraint)
        if heard is None:
            return False
        spelled = self._encoding.decode([token for token in heard.tokens if token not in STOP_TOKENS])
        return trial.is_enforced_in(heard.text or spelled, stopped=heard.finish is FinishReason.STOP)


async def _answer(request: Awaitable[T | None] | None, limit_s: float | None = None) -> T | None:
    """Return the result of `request`; None if it fails or takes more than `limit_s` seconds."""
    if request is None:
        return None
    try:
        async with asyncio.timeout(ANSWER_S if limit_s is None else limit_s):
            return await request
    except (BackendError, TimeoutError):
        # Many deployments block such endpoints. The backend works nevertheless, since it has generated an answer.
        return None


def _is_plausible(score: TokenScore | None) -> bool:
    """Return whether the log probability exists and is not above that of the likeliest token."""
    return score is not None and score.logprob is not None and score.logprob <= score.top[0][1] <= 0


def _first(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}]"


def _message_of(error: UnisonoError) -> str:
    return str(error.__cause__ or "")
