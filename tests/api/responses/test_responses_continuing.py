"""The prompt of a continued response starts with the exact tokens of the earlier one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.frames import NOW, frame, ids
from tests.api.responses.test_responses_schema import generation_of as parse_generation
from unisono.api.responses.inbound import ResponsesGeneration
from unisono.api.responses.input_conversion import KnownState
from unisono.api.responses.items import meaning_of
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.core.conversation import Item
from unisono.core.generation import FinishReason
from unisono.core.state_store import StoredItem
from unisono.engine.request import GenerationReport
from unisono.harmony.channel_router import HarmonyRouter
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import plan_tools

TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "free"}]
REASONING = "<|channel|>analysis<|message|>hm  hm<|end|><|start|>assistant"
OUTPUTS = {
    # case: (model output, next input of the client)
    "a call": (
        REASONING + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ "a" : 1}<|call|>',
        [{"type": "function_call_output", "call_id": "call_0", "output": "42"}],
    ),
    "a call with its recipient first": (
        REASONING + ' to=functions.f<|channel|>commentary json<|message|>{"a":1}<|call|>',
        [{"type": "function_call_output", "call_id": "call_0", "output": "42"}],
    ),
    "a preamble and free text": (
        REASONING + "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to="
        'functions.free <|constrain|>json<|message|>{"input": "ls"}<|call|>',
        [{"type": "custom_tool_call_output", "call_id": "call_0", "output": "a b"}],
    ),
}


def generation_of(earlier: tuple[Item, ...], next_input: Any) -> ResponsesGeneration:
    return parse_generation(KnownState(earlier=earlier), input=next_input, tools=TOOLS, instructions="Be brief.")


def prompt(encoding: Encoding, generation: ResponsesGeneration) -> list[int]:
    return Renderer(encoding).prompt(generation.request.conversation, plan_tools(generation.toolbox.tools))


def stored_output(encoding: Encoding, generation: ResponsesGeneration, output: list[int]) -> tuple[StoredItem, ...]:
    router = HarmonyRouter(encoding, plan_tools(generation.toolbox.tools), lambda: "call_0")
    events = ResponseEvents(frame(toolbox=generation.toolbox), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    events.write([*router.feed(output), *router.end(FinishReason.STOP), router.finished(FinishReason.STOP)])
    assert events.stored is not None
    return events.stored.output


@pytest.mark.parametrize(("model_output", "next_input"), OUTPUTS.values(), ids=OUTPUTS)
def test_a_continued_prompt_starts_with_the_earlier_tokens(
    encoding: Encoding, model_output: str, next_input: list[dict[str, Any]]
) -> None:
    first = generation_of((), "Hi")
    output = encoding.encode_marked(model_output)
    stored = stored_output(encoding, first, output)
    expected_start = [*prompt(encoding, first), *output]
    continued_prompt = prompt(encoding, generation_of((*meaning_of(first.input), *meaning_of(stored)), next_input))
    assert continued_prompt[: len(expected_start)] == expected_start
    assert len(continued_prompt) > len(expected_start)


@pytest.mark.parametrize(("model_output", "next_input"), OUTPUTS.values(), ids=OUTPUTS)
def test_resent_items_give_the_same_prompt_as_a_continuation(
    encoding: Encoding, model_output: str, next_input: list[dict[str, Any]]
) -> None:
    first = generation_of((), "Hi")
    stored = stored_output(encoding, first, encoding.encode_marked(model_output))
    stored_by_id = {item.id: item for item in stored}
    history = [{"role": "user", "content": "Hi"}, *(dict(item.wire) for item in stored), *next_input]
    replayed = parse_generation(
        KnownState(stored_item=stored_by_id.get), input=history, tools=TOOLS, instructions="Be brief."
    )
    continued = generation_of((*meaning_of(first.input), *meaning_of(stored)), next_input)
    assert prompt(encoding, replayed) == prompt(encoding, continued)
