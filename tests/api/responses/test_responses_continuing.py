"""A continued response begins with the very tokens of the one before: from the wire to the prompt and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.frames import NOW, frame, ids
from tests.api.responses.test_responses_schema import turn_of
from unisono.api.responses.inbound import ResponsesGeneration
from unisono.api.responses.input_conversion import KnownState
from unisono.api.responses.items import meaning_of
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.core.conversation import Item
from unisono.core.generation import FinishReason
from unisono.core.state_store import StoredItem
from unisono.engine.request import GenerationReport
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.tools import plan_tools

TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "free"}]
THOUGHT = "<|channel|>analysis<|message|>hm  hm<|end|><|start|>assistant"
ANSWERS = {
    # what the model writes, and what the client sends next
    "a call": (
        THOUGHT + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ "a" : 1}<|call|>',
        [{"type": "function_call_output", "call_id": "call_0", "output": "42"}],
    ),
    "a call with its recipient first": (
        THOUGHT + ' to=functions.f<|channel|>commentary json<|message|>{"a":1}<|call|>',
        [{"type": "function_call_output", "call_id": "call_0", "output": "42"}],
    ),
    "a preamble and free text": (
        THOUGHT + "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to="
        'functions.free <|constrain|>json<|message|>{"input": "ls"}<|call|>',
        [{"type": "custom_tool_call_output", "call_id": "call_0", "output": "a b"}],
    ),
}


def asked(earlier: tuple[Item, ...], sent: Any) -> ResponsesGeneration:
    return turn_of(KnownState(earlier=earlier), input=sent, tools=TOOLS, instructions="Be brief.")


def prompt(encoding: Encoding, turn: ResponsesGeneration) -> list[int]:
    return Renderer(encoding).prompt(turn.request.conversation, plan_tools(turn.toolbox.tools))


def answered(encoding: Encoding, turn: ResponsesGeneration, output: list[int]) -> tuple[StoredItem, ...]:
    router = HarmonyRouter(encoding, plan_tools(turn.toolbox.tools), lambda: "call_0")
    events = ResponseEvents(frame(toolbox=turn.toolbox), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    events.write([*router.feed(output), *router.end(FinishReason.STOP), router.finished(FinishReason.STOP)])
    assert events.stored is not None
    return events.stored.output


@pytest.mark.parametrize(("written", "sent"), ANSWERS.values(), ids=ANSWERS)
def test_a_continued_prompt_begins_with_what_was_there(
    encoding: Encoding, written: str, sent: list[dict[str, Any]]
) -> None:
    first = asked((), "Hi")
    output = encoding.encode_marked(written)
    kept = answered(encoding, first, output)
    before = [*prompt(encoding, first), *output]
    after = prompt(encoding, asked((*meaning_of(first.input), *meaning_of(kept)), sent))
    assert after[: len(before)] == before
    assert len(after) > len(before)


@pytest.mark.parametrize(("written", "sent"), ANSWERS.values(), ids=ANSWERS)
def test_a_client_that_sends_everything_back_has_the_same_prompt(
    encoding: Encoding, written: str, sent: list[dict[str, Any]]
) -> None:
    first = asked((), "Hi")
    kept = answered(encoding, first, encoding.encode_marked(written))
    found = {item.id: item for item in kept}
    history = [{"role": "user", "content": "Hi"}, *(dict(item.wire) for item in kept), *sent]
    replayed = turn_of(KnownState(stored_item=found.get), input=history, tools=TOOLS, instructions="Be brief.")
    continued = asked((*meaning_of(first.input), *meaning_of(kept)), sent)
    assert prompt(encoding, replayed) == prompt(encoding, continued)
