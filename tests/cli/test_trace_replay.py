"""A recording is read again to what was recorded: every malformed shape, every plan, every talk with hosted tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.engine import test_failing as failing
from tests.engine import test_loop_resuming as hosted
from tests.engine import test_plan_resuming as planned
from tests.engine.planning import turn
from tests.engine.test_resuming import until_stop
from tests.harmony.recoveries import CASES, TOOLS, Case
from unisono.cli.trace import Unreplayable, is_as_recorded, read_document
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.core.generation import Capabilities, FinishReason
from unisono.core.observer import GenerationDone, GenerationStarted, Observer
from unisono.engine.request import GenerationRequest, GenerationService
from unisono.errors import BackendUnavailable
from unisono.middleware.telemetry import ObservedService
from unisono.observe.recording import Document, checked, dumped, to_document

LARGE = 1 << 22
SAID = Conversation(Preamble(tools=TOOLS, date="2026-01-01"), (UserMessage("Hi"),))


@dataclass
class Noting(Observer):
    done: list[GenerationDone] = field(default_factory=list)

    def generation_started(self, began: GenerationStarted) -> None:
        assert began.recorded_request is not None

    def ended(self, done: GenerationDone) -> None:
        self.done.append(done)


async def recorded(turns: GenerationService, asked: GenerationRequest, *, batches: int = 10**9) -> Document:
    """The recording of a turn of which so many batches were taken."""
    noting = Noting()
    run = ObservedService(turns, [noting], recorded=True).start(asked)
    taken = 0
    async for _ in run:
        taken += 1
        if taken == batches:
            break
    await run.aclose()
    [done] = noting.done
    return checked(json.loads(dumped(to_document(done, "test", LARGE))))


def check(document: Document) -> None:
    again = read_document(document)
    assert again.fits
    assert is_as_recorded(document, again)


def planned_turns(talk: planned.Talk) -> GenerationService:
    backend = planned.Stepping(talk.outputs, talk.told, talk.per_chunk, [], 0, talk.finish)
    return planned.Engine(
        planned.EngineDeps(
            encoding=planned.ENCODING,
            renderer=planned.Renderer(planned.ENCODING),
            pool=planned.Line([backend]),
            memory=planned.ConversationCache(),
            new_call_id=lambda: "call_random",
            violation=planned.violation,
        )
    )


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("told", [planned.IDS, planned.GUIDED_HIDDEN, planned.TEXT], ids=["ids", "guided", "text"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_every_malformed_shape_is_read_again_alike(case: Case, told: Capabilities) -> None:
    output = until_stop(planned.ENCODING.encode_as_server(case.output))
    talk = planned.Talk([output], turn(conversation=SAID), told, finish=FinishReason(case.finish))
    document = await recorded(planned_turns(talk), talk.turn)
    assert document["said"] or not case.items
    check(document)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("told", [planned.IDS, planned.GUIDED, planned.TEXT], ids=["ids", "guided", "text"])
@pytest.mark.parametrize("case", planned.CASES.values(), ids=planned.CASES)
async def test_every_plan_is_read_again_alike(case: planned.Case, told: Capabilities) -> None:
    if all((told.prompt, told.constrain) != (each.prompt, each.constrain) for each in case.told):
        return
    talk = planned.Talk([planned.tokens_of(output) for output in case.outputs], case.turn, told)
    check(await recorded(planned_turns(talk), talk.turn))


@pytest.mark.parametrize("talk", hosted.TALKS.values(), ids=hosted.TALKS)
async def test_every_talk_with_hosted_tools_is_read_again_alike(talk: hosted.Talk) -> None:
    talk = replace(talk, bases=[], host=replace(talk.host, made=[], asked=[]))
    document = await recorded(talk.engine(), talk.turn)
    assert talk.turn.server_tools is not None
    if talk.turn.server_tools.decisions:
        with pytest.raises(Unreplayable, match="approved"):
            read_document(document)
        return
    check(document)


DEATHS = {
    "ids, then ids": (planned.IDS, planned.IDS),
    "ids, then text": (planned.IDS, planned.TEXT),
    "text, then ids": (planned.TEXT, planned.IDS),
}


@pytest.mark.parametrize("told", DEATHS.values(), ids=DEATHS)
@pytest.mark.parametrize("dies_after", [0, 1, 4, 9])
async def test_an_answer_that_moved_to_another_backend_is_read_again_alike(
    dies_after: int, told: Sequence[Capabilities]
) -> None:
    case = planned.tokens_of("<|channel|>analysis<|message|>Hm é.<|channel|>final<|message|>one two three<|return|>")
    bases: list[list[int]] = []
    backends = [
        failing.Mortal([case], told[0], dies_after, bases=bases, name="a"),
        failing.Mortal([case], told[1], bases=bases, name="b"),
    ]
    document = await recorded(_engine(backends), failing.TURN)
    assert [step["deployment"] for step in document["steps"]] == ["a", "b"]
    assert document["recoveries"][0] == "missing-end"
    check(document)


@pytest.mark.parametrize("dies_after", [0, 3, 9])
async def test_an_answer_that_failed_is_read_as_far_as_it_came(dies_after: int) -> None:
    case = planned.tokens_of("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>one two three<|return|>")
    noting = Noting()
    turns = ObservedService(_engine([failing.Mortal([case], dies_after=dies_after)]), [noting], recorded=True)
    with pytest.raises(BackendUnavailable):
        async for _ in turns.start(failing.TURN):
            pass
    document = checked(json.loads(dumped(to_document(noting.done[0], "test", LARGE))))
    assert document["error"] == BackendUnavailable.code
    check(document)


def _engine(backends: Sequence[failing.Mortal]) -> GenerationService:
    return failing.Engine(
        failing.EngineDeps(
            encoding=failing.ENCODING,
            renderer=failing.RENDERER,
            pool=failing.Line(backends),
            memory=failing.ConversationCache(),
            new_call_id=lambda: "call_random",
        )
    )


STOPPED: dict[str, Sequence[str]] = {"met": ("two",), "met across tokens": ("o t",), "never met": ("zz",)}


@pytest.mark.parametrize("stop", STOPPED.values(), ids=STOPPED)
async def test_an_answer_that_a_stop_string_ended_is_read_again_alike(stop: tuple[str, ...]) -> None:
    output = planned.tokens_of("<|channel|>final<|message|>one two three<|return|>")
    talk = planned.Talk([output], turn(conversation=SAID, stop=stop))
    check(await recorded(planned_turns(talk), talk.turn))


@pytest.mark.parametrize("batches", range(1, 6))
async def test_an_answer_that_its_client_left_is_read_as_far_as_it_came(batches: int) -> None:
    output = planned.tokens_of("<|channel|>analysis<|message|>Hm." + "<|channel|>final<|message|>one two three" * 2)
    talk = planned.Talk([output], turn(conversation=SAID))
    document = await recorded(planned_turns(talk), talk.turn, batches=batches)
    assert document["outcome"] == "left"
    check(document)


async def test_a_parser_that_reads_something_else_is_found_out() -> None:
    output = planned.tokens_of("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>one two<|return|>")
    talk = planned.Talk([output], turn(conversation=SAID))
    document = await recorded(planned_turns(talk), talk.turn)
    for changed in (
        {"output": [*document["output"][:-3], *document["output"][-2:]]},
        {"said": document["said"][1:]},
        {"said": [*document["said"], document["said"][-1]]},
        {"finish": "length", "output": document["output"][:-1], "steps": []},
    ):
        other = {**document, **changed}
        assert not is_as_recorded(other, read_document(other))
