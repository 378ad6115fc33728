"""Malformed output as an SDK sees it: an ordinary answer, and the repairs named beside it."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai_sdk.asking import WEATHER, about, folded, reasoning, scene

# name: (content, reasoning, names of the calls, rules)
SHAPES: dict[str, tuple[str, str | None, list[str], list[str]]] = {
    "an answer": ("Here is the answer.", "Let me see.", [], []),
    "two ends": ("Answer", None, [], ["trailing-stop"]),
    "no start before a channel": ("ok", "Hm.", [], ["missing-start"]),
    "a bare header": ("", "Hm.", ["f"], ["missing-start"]),
    "prose before a start": ("ok", "Hm.", [], ["free-text-between"]),
    "no channel": ("ok", None, [], ["missing-channel"]),
    "an unknown channel": ("x", None, [], ["unknown-channel"]),
    "half a channel": ("x", None, [], ["channel-spelling"]),
    "a typed answer": ("{}", None, [], ["type-as-recipient"]),
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("name", SHAPES)
def test_a_whole_answer_names_its_repairs_in_a_header(scripted: OpenAI, name: str) -> None:
    content, thoughts, calls, rules = SHAPES[name]
    raw = scripted.chat.completions.with_raw_response.create(**scene(name, tools=TOOLS))
    assert raw.headers.get("x-unisono-recoveries", "") == ",".join(rules)
    completion = raw.parse()
    check(completion, content, thoughts, calls)
    assert about(completion)["recoveries"] == rules


@pytest.mark.parametrize("name", SHAPES)
def test_a_stream_names_its_repairs_in_the_last_chunk(scripted: OpenAI, name: str) -> None:
    content, thoughts, calls, rules = SHAPES[name]
    chunks = list(scripted.chat.completions.create(**scene(name, tools=TOOLS), stream=True))
    check(folded(chunks), content, thoughts, calls)
    assert about(chunks[-1])["recoveries"] == rules
    assert [chunk for chunk in chunks[:-1] if "unisono" in (chunk.model_extra or {})] == []


def check(completion: Any, content: str, thoughts: str | None, calls: list[str]) -> None:
    (choice,) = completion.choices
    assert (choice.message.content or "") == content
    assert reasoning(choice.message) == thoughts
    assert [call.function.name for call in choice.message.tool_calls or ()] == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


def test_the_reasoning_field_is_a_setting_of_the_model(scripted: OpenAI) -> None:
    completion = scripted.chat.completions.create(**scene("an answer", model="plain-reasoning"))
    assert completion.choices[0].message.model_extra == {"reasoning": "Let me see."}
