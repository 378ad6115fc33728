"""Recoveries of malformed output, as reported to the OpenAI SDK."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai_sdk.asking import WEATHER, fold_chunks, reasoning_of, scripted_request, unisono_fields

# Script: (content, reasoning, names of the calls, rules).
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
def test_a_whole_answer_reports_recoveries_in_a_header(scripted: OpenAI, name: str) -> None:
    content, reasoning, calls, rules = SHAPES[name]
    raw = scripted.chat.completions.with_raw_response.create(**scripted_request(name, tools=TOOLS))
    assert raw.headers.get("x-unisono-recoveries", "") == ",".join(rules)
    completion = raw.parse()
    assert_completion(completion, content, reasoning, calls)
    assert unisono_fields(completion)["recoveries"] == rules


@pytest.mark.parametrize("name", SHAPES)
def test_a_stream_reports_recoveries_in_the_last_chunk(scripted: OpenAI, name: str) -> None:
    content, reasoning, calls, rules = SHAPES[name]
    chunks = list(scripted.chat.completions.create(**scripted_request(name, tools=TOOLS), stream=True))
    assert_completion(fold_chunks(chunks), content, reasoning, calls)
    assert unisono_fields(chunks[-1])["recoveries"] == rules
    assert [chunk for chunk in chunks[:-1] if "unisono" in (chunk.model_extra or {})] == []


def assert_completion(completion: Any, content: str, reasoning: str | None, calls: list[str]) -> None:
    (choice,) = completion.choices
    assert (choice.message.content or "") == content
    assert reasoning_of(choice.message) == reasoning
    assert [call.function.name for call in choice.message.tool_calls or ()] == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


def test_a_model_setting_selects_the_reasoning_field(scripted: OpenAI) -> None:
    completion = scripted.chat.completions.create(**scripted_request("an answer", model="plain-reasoning"))
    assert completion.choices[0].message.model_extra == {"reasoning": "Let me see."}
