"""Raw completions: an unchanged prompt, and output that is not parsed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.engine.options import changed
from tests.engine.scripted import IDS, TEXT, Runner, Scripted, Step
from tests.harmony.fold import check_lifecycle
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.core.events import Closed, Delta, Event, Finished
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, OutputForm
from unisono.engine.raw_text import RawText
from unisono.engine.request import (
    GenerationReport,
    GenerationRequest,
    RawPrompt,
    RequestFields,
)
from unisono.errors import BackendUnavailable, ContextTooLong, UnisonoError, UnsupportedValue
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
BIRD = "🐦\u200d⬛"
THOUGHT = f"<|channel|>analysis<|message|>Hm {BIRD}"
OUTPUT = THOUGHT + "<|end|><|start|>assistant<|channel|>final<|message|>Naïve 日本.<|return|>"
BARE = f"analysisHm {BIRD}assistantfinalNaïve 日本."
MARKED = OUTPUT.removesuffix("<|return|>")
MARKERLESS = replace(TEXT, output=OutputForm.MARKERLESS)

# Options of the raw prompt, stop strings, model output, expected text.
TEXTS: dict[str, tuple[dict[str, Any], tuple[str, ...], str, str]] = {
    "special tokens are hidden": ({}, (), OUTPUT, BARE),
    "special tokens are shown, the stop token is hidden": ({"hides_special": False}, (), OUTPUT, MARKED),
    "special tokens and stop token are shown": ({"hides_special": False, "shows_stop": True}, (), OUTPUT, OUTPUT),
    "a stop string is hidden": ({}, ("日",), OUTPUT, BARE[: BARE.index("日")]),
    "a stop string is shown": ({"shows_stop": True}, ("日",), OUTPUT, BARE[: BARE.index("本")]),
    "a stop string over a hidden token": ({}, ("assistantfinal",), OUTPUT, f"analysisHm {BIRD}"),
    "a stop string that is a special token": (
        {"hides_special": False},
        ("<|end|>",),
        OUTPUT,
        THOUGHT,
    ),
    "the beginning of a stop string": ({}, ("本.!",), OUTPUT, BARE),
    "a stop token of the client": ({"stop_tokens": frozenset({200007})}, (), OUTPUT, f"analysisHm {BIRD}"),
    "the end of a call": ({}, (), "a<|call|>", "a"),
    "text that spells an unknown token": ({}, (), "a <|nothing|> b<|return|>", "a <|nothing|> b"),
    "empty output": ({}, (), "<|return|>", ""),
}


def read(tokens: list[int], size: int, options: dict[str, Any], stop: tuple[str, ...]) -> tuple[str, list[int]]:
    raw_text = RawText(ENCODING, RawPrompt(**options), stop)
    events: list[Event] = []
    for at in range(0, len(tokens), size):
        events += raw_text.feed(tokens[at : at + size])
        # The tokens of all emitted text are stored.
        emitted = "".join(event.text for event in events if isinstance(event, Delta))
        assert len(emitted.encode()) <= len(ENCODING.decode_bytes(raw_text.tokens))
    events += raw_text.end(FinishReason.STOP)
    events += raw_text.finished(GenerationReport().facts.usage)
    check_lifecycle(events)
    [closed] = [event for event in events if isinstance(event, Closed)]
    return closed.text, raw_text.tokens


@pytest.mark.parametrize(("options", "stop", "output", "expected"), TEXTS.values(), ids=TEXTS)
def test_raw_text_does_not_depend_on_chunk_boundaries(
    options: dict[str, Any], stop: tuple[str, ...], output: str, expected: str
) -> None:
    tokens = ENCODING.encode_as_server(output)
    results = {(text, tuple(ids)) for size in (1, 2, 3, 7, 100) for text, ids in [read(tokens, size, options, stop)]}
    assert [text for text, _ in results] == [expected]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    tokens = ENCODING.encode_text(BIRD)[:1]
    assert read(tokens, 1, {}, ())[0].endswith("\ufffd")
    assert read(tokens, 1, {}, ())[1] == tokens


# -- runs


class Raw(Runner):
    def __init__(self, *backends: Scripted) -> None:
        super().__init__(ENCODING, *backends)

    async def complete(self, raw: RawPrompt, **fields: Any) -> tuple[str, Finished, GenerationReport]:
        conversation = Conversation(Preamble(), (UserMessage("-"),))
        options = {"max_tokens": 100, "fields": RequestFields("prompt"), **fields}
        request = changed(GenerationRequest("m", conversation, raw=raw), **options)
        run = self.engine.start(request)
        batches = [batch async for batch in run]
        assert all(batches)
        events = [event for batch in batches for event in batch]
        check_lifecycle(events)
        last = events[-1]
        assert isinstance(last, Finished)
        return "".join(event.text for event in events if isinstance(event, Delta)), last, run.report


def backend(*steps: Step, **fields: Any) -> Scripted:
    return Scripted(ENCODING, list(steps), **fields)


SHOWN = RawPrompt(text=PROMPT, hides_special=False)


async def test_a_raw_prompt_is_sent_unchanged() -> None:
    ids = ENCODING.encode_as_server(PROMPT)
    # Non-canonical tokens for the same text.
    odd = (*ids, *ENCODING.encode_text("H"), *ENCODING.encode_text("i"))
    for raw, capabilities, tokens, text in (
        (SHOWN, IDS, ids, None),
        (RawPrompt(tokens=odd), IDS, list(odd), None),
        (SHOWN, TEXT, ids, PROMPT),
        (RawPrompt(tokens=tuple(ids)), TEXT, ids, PROMPT),
    ):
        sent_to = backend(Step(OUTPUT), caps=capabilities)
        await Raw(sent_to).complete(raw)
        assert (list(sent_to.jobs[0].prompt.tokens), sent_to.jobs[0].prompt.text) == (tokens, text)


async def test_non_canonical_token_ids_are_rejected_on_a_text_backend() -> None:
    odd = RawPrompt(tokens=(*ENCODING.encode_text("H"), *ENCODING.encode_text("i")))
    with pytest.raises(UnsupportedValue) as raised:
        await Raw(backend(caps=TEXT)).complete(odd)
    assert raised.value.param == "prompt"
    id_backend = backend(Step(OUTPUT), name="ids")
    _, _, report = await Raw(backend(caps=TEXT), id_backend).complete(odd)
    assert report.backend == "ids"


@dataclass
class FailingBackend(Scripted):
    """Backend that fails after `at` tokens or characters of the output."""

    at: int = 0
    output: str = OUTPUT

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        output = ENCODING.encode_as_server(self.output)[: self.at] if self.caps is IDS else self.output[: self.at]
        for piece in output:
            yield Chunk(text=piece) if isinstance(piece, str) else Chunk(tokens=(piece,))
        raise BackendUnavailable("gone")


@dataclass
class ContinuingBackend(Scripted):
    """Backend that continues the part of the output that the prompt ends in."""

    output: str = OUTPUT

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs = []
        marked = ENCODING.decode(job.prompt.tokens)
        assert marked == (job.prompt.text or marked)
        prefix = marked.removeprefix(PROMPT)
        assert self.output.startswith(prefix)
        self.steps = [Step(self.output[len(prefix) :])]
        async for chunk in super().complete(job):
            yield chunk


PAIRS = {"ids-ids": (IDS, IDS), "ids-text": (IDS, TEXT), "text-ids": (TEXT, IDS), "text-text": (TEXT, TEXT)}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
@pytest.mark.parametrize("forms", PAIRS.values(), ids=PAIRS)
async def test_a_raw_completion_continues_on_another_backend(
    forms: tuple[Capabilities, Capabilities], whole: bool
) -> None:
    length = len(ENCODING.encode_as_server(OUTPUT) if forms[0] is IDS else MARKED)
    for at in range(length):
        first = FailingBackend(ENCODING, [], caps=forms[0], at=at)
        second = ContinuingBackend(ENCODING, [], caps=forms[1], name="second")
        text, finished, report = await Raw(first, second).complete(SHOWN, whole=whole)
        assert text == MARKED, at
        assert (finished.reason, report.failovers, report.backend) == (FinishReason.STOP, 1, "second")
        assert ENCODING.decode(report.journal) == OUTPUT
        # A token of an incomplete character is generated twice, and counts once.
        assert finished.usage.completion_tokens == len(ENCODING.encode_as_server(OUTPUT)), at


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
async def test_tokens_of_an_incomplete_first_character_count_once(whole: bool) -> None:
    output = f"{BIRD} is it<|return|>"
    length = len(ENCODING.encode_as_server(output))
    for at in range(length):
        first = FailingBackend(ENCODING, [], at=at, output=output)
        second = ContinuingBackend(ENCODING, [], name="second", output=output)
        text, finished, report = await Raw(first, second).complete(SHOWN, whole=whole, max_tokens=length)
        assert text == output.removesuffix("<|return|>"), at
        assert finished.usage.completion_tokens == len(report.journal) == length, at


async def test_without_failover_only_an_unseen_completion_restarts() -> None:
    def broken() -> Scripted:
        return backend(Step("One two", failure=BackendUnavailable("gone")))

    with pytest.raises(BackendUnavailable):
        await Raw(broken(), backend(Step("three<|return|>"))).complete(SHOWN, failover=False)
    text, finished, _ = await Raw(broken(), backend(Step("three<|return|>"))).complete(
        SHOWN, failover=False, whole=True
    )
    assert text == "three"
    assert finished.usage.completion_tokens == 4


@pytest.mark.parametrize("error", [BackendUnavailable("gone"), ContextTooLong("long")], ids=lambda e: e.code)
async def test_the_error_is_raised_without_another_backend(error: UnisonoError) -> None:
    with pytest.raises(type(error)):
        await Raw(backend(Step("", failure=error))).complete(SHOWN)


async def test_usage_counts_prompt_and_generated_tokens() -> None:
    for capabilities in (IDS, TEXT):
        scripted = backend(Step(OUTPUT, cached=3), caps=capabilities, per_chunk=1)
        runner = Raw(scripted)
        _, finished, report = await runner.complete(SHOWN)
        usage = finished.usage
        assert (usage.prompt_tokens, usage.cached_tokens) == (len(ENCODING.encode_as_server(PROMPT)), 3)
        assert usage.completion_tokens == len(ENCODING.encode_as_server(OUTPUT))
        assert len(report.facts.steps) == 1
        assert runner.pool.slots_in_use == 0
        assert runner.pool.successes == 1
        request = GenerationRequest("m", Conversation(Preamble()), raw=SHOWN)
        assert await runner.engine.count(request) == usage.prompt_tokens


async def test_the_completion_ends_at_max_tokens() -> None:
    text, finished, _ = await Raw(backend(Step("one two three four<|return|>"))).complete(SHOWN, max_tokens=2)
    assert (text, finished.reason, finished.usage.completion_tokens) == ("one two", FinishReason.LENGTH, 2)


async def test_a_prompt_that_fills_the_context_is_rejected() -> None:
    small = replace(IDS, context=7)
    with pytest.raises(ContextTooLong) as raised:
        await Raw(backend(caps=small)).complete(SHOWN)
    assert raised.value.param == "prompt"


async def test_missing_special_tokens_of_a_markerless_backend_are_reported() -> None:
    for raw, unmet in ((SHOWN, True), (RawPrompt(text=PROMPT), False)):
        text, _, report = await Raw(backend(Step(BARE), caps=MARKERLESS)).complete(raw)
        assert (text, bool(report.unmet)) == (BARE, unmet)
