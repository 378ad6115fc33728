"""Raw completions: a prompt as it was sent, and nothing read into what comes behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.engine.scripted import IDS, TEXT, Runner, Scripted, Step
from tests.harmony.fold import check_lifecycle
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.core.events import Closed, Delta, Event, Finished
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, OutputForm
from unisono.engine.raw_text import RawText
from unisono.engine.request import GenerationReport, GenerationRequest, RawPrompt, RequestFields
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

# the raw prompt's wishes, stop strings, the output, what is told
TOLD: dict[str, tuple[dict[str, Any], tuple[str, ...], str, str]] = {
    "special tokens are hidden": ({}, (), OUTPUT, BARE),
    "special tokens are shown, but for the one that ended it": ({"hides_special": False}, (), OUTPUT, MARKED),
    "what ended it is shown too": ({"hides_special": False, "shows_stop": True}, (), OUTPUT, OUTPUT),
    "a stop string is no part of it": ({}, ("日",), OUTPUT, BARE[: BARE.index("日")]),
    "a stop string is shown": ({"shows_stop": True}, ("日",), OUTPUT, BARE[: BARE.index("本")]),
    "a stop string over a hidden token": ({}, ("assistantfinal",), OUTPUT, f"analysisHm {BIRD}"),
    "a stop string that is a special token": (
        {"hides_special": False},
        ("<|end|>",),
        OUTPUT,
        THOUGHT,
    ),
    "a beginning of a stop string": ({}, ("本.!",), OUTPUT, BARE),
    "a token of the client's": ({"stop_tokens": frozenset({200007})}, (), OUTPUT, f"analysisHm {BIRD}"),
    "a call's end": ({}, (), "a<|call|>", "a"),
    "text that spells no token": ({}, (), "a <|nothing|> b<|return|>", "a <|nothing|> b"),
    "nothing": ({}, (), "<|return|>", ""),
}


def read(tokens: list[int], cuts: int, wishes: dict[str, Any], stop: tuple[str, ...]) -> tuple[str, list[int]]:
    said = RawText(ENCODING, RawPrompt(**wishes), stop)
    events: list[Event] = []
    for at in range(0, len(tokens), cuts):
        events += said.feed(tokens[at : at + cuts])
        # Whatever was told, the tokens of it are there.
        told = "".join(event.text for event in events if isinstance(event, Delta))
        assert len(told.encode()) <= len(ENCODING.decode_bytes(said.tokens))
    events += said.end(FinishReason.STOP)
    events += said.finished(GenerationReport().facts.usage)
    check_lifecycle(events)
    [closed] = [event for event in events if isinstance(event, Closed)]
    return closed.text, said.tokens


@pytest.mark.parametrize(("wishes", "stop", "output", "told"), TOLD.values(), ids=TOLD)
def test_what_is_told_is_the_same_however_the_stream_is_cut(
    wishes: dict[str, Any], stop: tuple[str, ...], output: str, told: str
) -> None:
    tokens = ENCODING.encode_as_server(output)
    seen = {(text, tuple(said)) for cuts in (1, 2, 3, 7, 100) for text, said in [read(tokens, cuts, wishes, stop)]}
    assert [text for text, _ in seen] == [told]


def test_half_a_character_at_the_end_is_told_as_a_broken_one() -> None:
    tokens = ENCODING.encode_text(BIRD)[:1]
    assert read(tokens, 1, {}, ())[0].endswith("\ufffd")
    assert read(tokens, 1, {}, ())[1] == tokens


# -- runs


class Raw(Runner):
    def __init__(self, *backends: Scripted) -> None:
        super().__init__(ENCODING, *backends)

    async def complete(self, raw: RawPrompt, **fields: Any) -> tuple[str, Finished, GenerationReport]:
        conversation = Conversation(Preamble(), (UserMessage("-"),))
        turn = GenerationRequest(
            "m",
            conversation,
            raw=raw,
            max_tokens=fields.pop("max_tokens", 100),
            fields=RequestFields("prompt"),
            **fields,
        )
        run = self.engine.start(turn)
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


async def test_a_prompt_goes_to_its_backend_as_it_is() -> None:
    ids = ENCODING.encode_as_server(PROMPT)
    # Cut as no tokenizer would.
    odd = (*ids, *ENCODING.encode_text("H"), *ENCODING.encode_text("i"))
    for raw, told, tokens, text in (
        (SHOWN, IDS, ids, None),
        (RawPrompt(tokens=odd), IDS, list(odd), None),
        (SHOWN, TEXT, ids, PROMPT),
        (RawPrompt(tokens=tuple(ids)), TEXT, ids, PROMPT),
    ):
        one = backend(Step(OUTPUT), told=told)
        await Raw(one).complete(raw)
        assert (list(one.jobs[0].prompt.tokens), one.jobs[0].prompt.text) == (tokens, text)


async def test_ids_that_no_text_is_cut_into_are_refused_where_only_text_is_taken() -> None:
    odd = RawPrompt(tokens=(*ENCODING.encode_text("H"), *ENCODING.encode_text("i")))
    with pytest.raises(UnsupportedValue) as refused:
        await Raw(backend(told=TEXT)).complete(odd)
    assert refused.value.param == "prompt"
    ids = backend(Step(OUTPUT), name="ids")
    _, _, report = await Raw(backend(told=TEXT), ids).complete(odd)
    assert report.backend == "ids"


@dataclass
class Breaking(Scripted):
    """Breaks off behind so many of the output's tokens, or of its letters."""

    at: int = 0

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        said = ENCODING.encode_as_server(OUTPUT)[: self.at] if self.told is IDS else OUTPUT[: self.at]
        for one in said:
            yield Chunk(text=one) if isinstance(one, str) else Chunk(tokens=(one,))
        raise BackendUnavailable("gone")


class Going(Scripted):
    """Goes on behind whatever of the output its prompt ends in."""

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs = []
        marked = ENCODING.decode(job.prompt.tokens)
        assert marked == (job.prompt.text or marked)
        said = marked.removeprefix(PROMPT)
        assert OUTPUT.startswith(said)
        self.steps = [Step(OUTPUT[len(said) :])]
        async for chunk in super().complete(job):
            yield chunk


PAIRS = {"ids-ids": (IDS, IDS), "ids-text": (IDS, TEXT), "text-ids": (TEXT, IDS), "text-text": (TEXT, TEXT)}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole"])
@pytest.mark.parametrize("forms", PAIRS.values(), ids=PAIRS)
async def test_it_goes_on_elsewhere_behind_what_was_said(forms: tuple[Capabilities, Capabilities], whole: bool) -> None:
    length = len(ENCODING.encode_as_server(OUTPUT) if forms[0] is IDS else MARKED)
    for at in range(length):
        first = Breaking(ENCODING, [], told=forms[0], at=at)
        second = Going(ENCODING, [], told=forms[1], name="second")
        text, finished, report = await Raw(first, second).complete(SHOWN, whole=whole)
        assert text == MARKED, at
        assert (finished.reason, report.failovers, report.backend) == (FinishReason.STOP, 1, "second")
        assert ENCODING.decode(report.journal) == OUTPUT


async def test_without_failover_what_was_shown_ends_in_the_error_and_what_was_not_begins_anew() -> None:
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
async def test_with_nowhere_to_go_the_error_comes_through(error: UnisonoError) -> None:
    with pytest.raises(type(error)):
        await Raw(backend(Step("", failure=error))).complete(SHOWN)


async def test_counts_are_of_the_prompt_and_of_what_was_generated() -> None:
    for told in (IDS, TEXT):
        one = backend(Step(OUTPUT, cached=3), told=told, per_chunk=1)
        runner = Raw(one)
        _, finished, report = await runner.complete(SHOWN)
        usage = finished.usage
        assert (usage.prompt_tokens, usage.cached_tokens) == (len(ENCODING.encode_as_server(PROMPT)), 3)
        assert usage.completion_tokens == len(ENCODING.encode_as_server(OUTPUT))
        assert len(report.facts.steps) == 1
        assert runner.pool.taken == 0
        assert runner.pool.well == 1
        turn = GenerationRequest("m", Conversation(Preamble()), raw=SHOWN)
        assert await runner.engine.count(turn) == usage.prompt_tokens


async def test_no_more_is_taken_than_was_asked_for() -> None:
    text, finished, _ = await Raw(backend(Step("one two three four<|return|>"))).complete(SHOWN, max_tokens=2)
    assert (text, finished.reason, finished.usage.completion_tokens) == ("one two", FinishReason.LENGTH, 2)


async def test_a_prompt_that_fills_the_window_is_refused() -> None:
    small = replace(IDS, context=7)
    with pytest.raises(ContextTooLong) as refused:
        await Raw(backend(told=small)).complete(SHOWN)
    assert refused.value.param == "prompt"


async def test_a_backend_without_special_tokens_says_so_where_they_are_asked_for() -> None:
    for raw, unmet in ((SHOWN, True), (RawPrompt(text=PROMPT), False)):
        text, _, report = await Raw(backend(Step(BARE), told=MARKERLESS)).complete(raw)
        assert (text, bool(report.unmet)) == (BARE, unmet)
