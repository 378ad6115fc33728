"""Compaction before an answer (`context_management`), in the types of the SDK."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai_sdk.responding import EVENT_TYPES, folded, to_ask, watched

COMPACTING = "response.compaction.compacting"
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Tell me about porcelain."},
    {"role": "assistant", "content": "porcelain " * 4000},
    {"role": "user", "content": "script: an answer"},
]
MANAGED: Any = [{"type": "compaction", "compact_threshold": 2000}]


def compacted(client: OpenAI, **fields: Any) -> Any:
    response = client.responses.create(**to_ask(HISTORY, model="scripted", context_management=MANAGED, **fields))
    assert [item.type for item in response.output] == ["compaction", "reasoning", "message"]
    assert response.output_text == "Here is the answer."
    return response


@pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])
def test_a_compacted_response_can_be_continued(scripted: OpenAI, store: bool) -> None:
    first = compacted(scripted, store=store)
    assert first.usage.input_tokens > 2000
    if store:
        fields: dict[str, Any] = {"previous_response_id": first.id}
        assert scripted.responses.retrieve(first.id) == first
    else:
        # The output is appended to the input, as the SDK returned it.
        fields = {"input": [*HISTORY, *first.output]}
    question = {"role": "user", "content": "script: an answer"}
    fields["input"] = [*fields.get("input", ()), question]
    second = scripted.responses.create(**to_ask(model="scripted", context_management=MANAGED, store=store, **fields))
    assert [item.type for item in second.output] == ["reasoning", "message"]
    assert second.usage is not None
    assert second.usage.input_tokens < 500


@pytest.mark.skipif(COMPACTING not in EVENT_TYPES, reason="this version of the SDK does not know the event")
def test_the_stream_of_a_compacted_response_folds_to_it(scripted: OpenAI) -> None:
    fields = to_ask(HISTORY, model="scripted", context_management=MANAGED)
    events = watched(scripted, fields)
    assert [event["type"] for event in events].count(COMPACTING) == 1
    assert [item["type"] for item in folded(events)["output"]] == ["compaction", "reasoning", "message"]
    background = watched(scripted, {**fields, "background": True})
    assert [item["type"] for item in folded(background)["output"]] == ["compaction", "reasoning", "message"]


def test_an_invalid_threshold_is_refused_by_name(scripted: OpenAI) -> None:
    entry: Any = {"type": "compaction", "compact_threshold": 1}
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.create(**to_ask("Hi", model="scripted", context_management=[entry]))
    assert raised.value.param == "context_management.0.compact_threshold"
