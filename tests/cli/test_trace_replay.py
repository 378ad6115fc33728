"""Replay of recordings: malformed output, plans, server tools, failover and disconnects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.engine import test_failing as failing
from tests.engine import test_loop_resuming as server_tools
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
from unisono.middleware.pipeline import GuardedService
from unisono.middleware.telemetry import GenerationObservation
from unisono.observe.recording import Document, checked, dumped, to_document

MAX_BYTES = 1 << 22
CONVERSATION = Conversation(Preamble(tools=TOOLS, date="2026-01-01"), (UserMessage("Hi"),))


@dataclass
class KeepingObserver(Observer):
    """Observer that stores the facts of finished generations."""

    done: list[GenerationDone] = field(default_factory=list)

    def generation_started(self, began: GenerationStarted) -> None:
        assert began.recorded_request is not None

    def ended(self, done: GenerationDone) -> None:
        self.done.append(done)


async def record(service: GenerationService, request: GenerationRequest, *, batches: int = 10**9) -> Document:
    """Run a generation and return its recording.

    After `batches` event batches the client disconnects.
    """
    observer = KeepingObserver()
    run = GuardedService(service, [GenerationObservation([observer], recorded=True)]).start(request)
    received = 0
    async for _ in run:
        received += 1
        if received == batches:
            break
    await run.aclose()
    [done] = observer.done
    return checked(json.loads(dumped(to_document(done, "test", MAX_BYTES))))


def assert_replays(document: Document) -> None:
    replayed = read_document(document)
    assert replayed.fits
    assert is_as_recorded(document, replayed)


def planned_service(talk: planned.Talk) -> GenerationService:
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


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize(
    "capabilities", [planned.IDS, planned.GUIDED_HIDDEN, planned.TEXT], ids=["ids", "guided", "text"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_every_malformed_output_is_replayed_exactly(case: Case, capabilities: Capabilities) -> None:
    output = until_stop(planned.ENCODING.encode_as_server(case.output))
    talk = planned.Talk([output], turn(conversation=CONVERSATION), capabilities, finish=FinishReason(case.finish))
    document = await record(planned_service(talk), talk.turn)
    assert document["said"] or not case.items
    assert_replays(document)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    ("case", "capabilities"),
    planned.applicable(
        planned.CASES, {"ids": planned.IDS, "guided": planned.GUIDED, "text": planned.TEXT}, planned.does_apply
    ),
)
async def test_every_plan_is_replayed_exactly(case: planned.Case, capabilities: Capabilities) -> None:
    talk = planned.Talk([planned.tokens_of(output) for output in case.outputs], case.turn, capabilities)
    assert_replays(await record(planned_service(talk), talk.turn))


@pytest.mark.parametrize("talk", server_tools.TALKS.values(), ids=server_tools.TALKS)
async def test_every_conversation_with_server_tools_is_replayed_exactly(talk: server_tools.Talk) -> None:
    talk = replace(talk, bases=[], host=replace(talk.host, made=[], asked=[]))
    document = await record(talk.engine(), talk.turn)
    assert talk.turn.server_tools is not None
    if talk.turn.server_tools.decisions:
        with pytest.raises(Unreplayable, match="approved"):
            read_document(document)
        return
    assert_replays(document)


FAILOVERS = {
    "ids, then ids": (planned.IDS, planned.IDS),
    "ids, then text": (planned.IDS, planned.TEXT),
    "text, then ids": (planned.TEXT, planned.IDS),
}


@pytest.mark.parametrize("capabilities", FAILOVERS.values(), ids=FAILOVERS)
@pytest.mark.parametrize("dies_after", [0, 1, 4, 9])
async def test_an_answer_with_a_failover_is_replayed_exactly(
    dies_after: int, capabilities: Sequence[Capabilities]
) -> None:
    case = planned.tokens_of("<|channel|>analysis<|message|>Hm é.<|channel|>final<|message|>one two three<|return|>")
    bases: list[list[int]] = []
    backends = [
        failing.Mortal([case], capabilities[0], dies_after, bases=bases, name="a"),
        failing.Mortal([case], capabilities[1], bases=bases, name="b"),
    ]
    document = await record(_engine(backends), failing.TURN)
    assert [step["deployment"] for step in document["steps"]] == ["a", "b"]
    assert document["recoveries"][0] == "missing-end"
    assert_replays(document)


@pytest.mark.parametrize("dies_after", [0, 3, 9])
async def test_a_failed_answer_is_replayed_up_to_its_failure(dies_after: int) -> None:
    case = planned.tokens_of("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>one two three<|return|>")
    observer = KeepingObserver()
    service = GuardedService(
        _engine([failing.Mortal([case], dies_after=dies_after)]), [GenerationObservation([observer], recorded=True)]
    )
    with pytest.raises(BackendUnavailable):
        async for _ in service.start(failing.TURN):
            pass
    document = checked(json.loads(dumped(to_document(observer.done[0], "test", MAX_BYTES))))
    assert document["error"] == BackendUnavailable.code
    assert_replays(document)


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


STOP_STRINGS: dict[str, Sequence[str]] = {
    "matched": ("two",),
    "matched across tokens": ("o t",),
    "not matched": ("zz",),
}


@pytest.mark.parametrize("stop", STOP_STRINGS.values(), ids=STOP_STRINGS)
async def test_an_answer_with_a_stop_string_is_replayed_exactly(stop: tuple[str, ...]) -> None:
    output = planned.tokens_of("<|channel|>final<|message|>one two three<|return|>")
    talk = planned.Talk([output], turn(conversation=CONVERSATION, stop=stop))
    assert_replays(await record(planned_service(talk), talk.turn))


@pytest.mark.parametrize("batches", range(1, 6))
async def test_an_aborted_answer_is_replayed_up_to_the_disconnect(batches: int) -> None:
    output = planned.tokens_of("<|channel|>analysis<|message|>Hm." + "<|channel|>final<|message|>one two three" * 2)
    talk = planned.Talk([output], turn(conversation=CONVERSATION))
    document = await record(planned_service(talk), talk.turn, batches=batches)
    assert document["outcome"] == "left"
    assert_replays(document)


async def test_a_replay_that_differs_from_the_recording_is_detected() -> None:
    output = planned.tokens_of("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>one two<|return|>")
    talk = planned.Talk([output], turn(conversation=CONVERSATION))
    document = await record(planned_service(talk), talk.turn)
    for change in (
        {"output": [*document["output"][:-3], *document["output"][-2:]]},
        {"said": document["said"][1:]},
        {"said": [*document["said"], document["said"][-1]]},
        {"finish": "length", "output": document["output"][:-1], "steps": []},
    ):
        changed_document = {**document, **change}
        assert not is_as_recorded(changed_document, read_document(changed_document))
