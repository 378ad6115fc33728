"""Conversion of input to conversation items: every item type and form, and stored input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.responses.frames import TOOLBOX, ids, to_stored
from tests.api.responses.test_responses_schema import generation_of, refusal_of
from unisono.api.responses.inbound import referenced_ids
from unisono.api.responses.input_conversion import KnownState
from unisono.api.responses.input_items import KINDS, InputSilent
from unisono.api.responses.item_readers import READERS
from unisono.api.responses.items import meaning_of, to_listing, to_wire
from unisono.api.responses.outbound.dialects import OPEN_RESPONSES
from unisono.api.responses.schema import ResponsesRequest
from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    Item,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.core.state_store import StoredItem
from unisono.core.tool_host import ToolNames

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"a":1}'}
CALLED = AssistantCall("c", "f", '{"a":1}')


def items_of(raw_input: Any, known: KnownState | None = None) -> list[Item]:
    return list(generation_of(known, input=raw_input).request.conversation.items)


FIND = ToolNames().add("my docs", "find")

INPUT_FORMS: dict[str, tuple[Any, list[Item]]] = {
    # case: (input, expected items)
    "a string": ("Hi", [UserMessage("Hi")]),
    "a message without a type": ([{"role": "user", "content": "Hi"}], [UserMessage("Hi")]),
    "text parts of every type": (
        [{"role": "user", "content": [{"type": kind, "text": kind[0]} for kind in ("text", "input_text")] + ["s"]}],
        [UserMessage("tis")],
    ),
    "a later developer message": (
        [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}],
        [UserMessage("Hi"), DeveloperMessage("Be brief.")],
    ),
    "an answer": (
        [{"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]}],
        [AssistantMessage("Yes")],
    ),
    "a final answer": (
        [{"role": "assistant", "phase": "final_answer", "content": "Yes"}],
        [AssistantMessage("Yes", Phase.FINAL)],
    ),
    "a preamble": (
        [{"role": "assistant", "phase": "commentary", "content": "Look."}],
        [AssistantMessage("Look.", Phase.COMMENTARY)],
    ),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [AssistantMessage("No.")],
    ),
    "raw markers": (
        [{"role": "assistant", "content": "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>Yes"}],
        [AssistantReasoning("hm"), AssistantMessage("Yes")],
    ),
    "reasoning": (
        [{"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}],
        [AssistantReasoning("hm")],
    ),
    "reasoning as a string": ([{"type": "reasoning", "content": "hm"}], [AssistantReasoning("hm")]),
    "a call and its output": (
        [CALL, {"type": "function_call_output", "call_id": "c", "output": "42"}],
        [CALLED, ToolResult("c", "f", "42")],
    ),
    "an output of parts": (
        [
            CALL,
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "4"}, {"type": "output_text", "text": "2"}],
            },
        ],
        [CALLED, ToolResult("c", "f", "42")],
    ),
    "an output of null": (
        [CALL, {"type": "function_call_output", "call_id": "c", "output": None}],
        [CALLED, ToolResult("c", "f", "")],
    ),
    "an output of bare JSON": (
        [CALL, {"type": "function_call_output", "call_id": "c", "output": {"a": [1]}}],
        [CALLED, ToolResult("c", "f", '{"a":[1]}')],
    ),
    "outputs in another order": (
        [
            CALL,
            {**CALL, "call_id": "d", "name": "g"},
            {"type": "function_call_output", "call_id": "d", "output": "D"},
            {"type": "function_call_output", "call_id": "c", "output": "C"},
        ],
        [CALLED, ToolResult("c", "f", "C"), AssistantCall("d", "g", '{"a":1}'), ToolResult("d", "g", "D")],
    ),
    "arguments as an object": (
        [{**CALL, "arguments": {"a": 1}}],
        [CALLED],
    ),
    "a call in a namespace": (
        [{**CALL, "namespace": "files"}],
        [AssistantCall("c", "files__f", '{"a":1}')],
    ),
    "a result without a call": (
        [
            {"role": "user", "content": "Hi"},
            {"type": "function_call_output", "name": "f", "namespace": "n", "output": "x"},
        ],
        [UserMessage("Hi"), ToolResult("input.1.1", "n__f", "x")],
    ),
    "a call in the plain namespace": ([{**CALL, "namespace": "functions"}], [CALLED]),
    "a custom call and its output": (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "free", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "a b"},
        ],
        [AssistantCall("c", "free", "ls"), ToolResult("c", "free", "a b")],
    ),
    "a custom call with the unisono prefix": (
        [{"type": "unisono:custom_tool_call", "call_id": "c", "name": "free", "input": "ls"}],
        [AssistantCall("c", "free", "ls")],
    ),
    "a call answered by a server": (
        [
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "server_label": "my docs",
                "name": "find",
                "arguments": "{}",
                "output": "x",
            }
        ],
        [AssistantCall("call_1", FIND, "{}"), ToolResult("call_1", FIND, "x")],
    ),
    "a call failed by a server": (
        [{"type": "mcp_call", "id": "mcp_1", "server_label": "d", "name": "find", "arguments": "{}", "error": "gone"}],
        [AssistantCall("call_1", "d__find", "{}"), ToolResult("call_1", "d__find", "gone")],
    ),
    "a call failed by a server, in the form of the gateway": (
        [
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "server_label": "d",
                "name": "find",
                "arguments": "{}",
                "error": {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "gone"}]},
            }
        ],
        [AssistantCall("call_1", "d__find", "{}"), ToolResult("call_1", "d__find", "gone")],
    ),
    "a call of a server with an output and an error": (
        [{"type": "mcp_call", "id": "mcp_1", "name": "find", "output": "half", "error": {"message": "stopped"}}],
        [AssistantCall("call_1", "find", ""), ToolResult("call_1", "find", "half\nstopped")],
    ),
    "executed code": (
        [
            {
                "type": "code_interpreter_call",
                "id": "ci_1",
                "code": "1+1",
                "container_id": "x",
                "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "x"}],
            }
        ],
        [
            AssistantCall("call_1", "python", "1+1"),
            ToolResult("call_1", "python", "2\n[Image removed here: this model reads text only.]"),
        ],
    ),
}


@pytest.mark.parametrize(("given_input", "expected"), INPUT_FORMS.values(), ids=INPUT_FORMS)
def test_input_becomes_conversation_items(given_input: Any, expected: list[Item]) -> None:
    assert items_of(given_input) == expected


def test_every_item_type_has_a_reader() -> None:
    assert set(READERS) == set(KINDS.values())


@pytest.mark.parametrize("kind", [kind for kind, model in KINDS.items() if model is InputSilent])
def test_an_item_without_model_content_is_skipped_with_a_note(kind: str) -> None:
    generation = generation_of(input=[{"type": kind, "id": "x_1", "anything": [1]}, {"role": "user", "content": "Hi"}])
    assert generation.request.conversation.items == (UserMessage("Hi"),)
    assert generation.notes == (f"input.0: no effect, because an item of type '{kind}' has no content for the model",)
    assert generation.input[0].wire["anything"] == [1]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JUNK, JUNK, JUNK, JUNK)
def test_foreign_reasoning_is_always_accepted(item_id: Any, content: Any, summary: Any, sealed: Any) -> None:
    foreign = {"type": "reasoning", "id": item_id, "content": content, "summary": summary, "encrypted_content": sealed}
    items = items_of([foreign, {"role": "user", "content": "Hi"}])
    assert items[-1] == UserMessage("Hi")
    assert all(isinstance(item, AssistantReasoning) and item.text for item in items[:-1])


@pytest.mark.parametrize(
    "foreign",
    [
        {"type": "reasoning", "id": "__fake_id__", "summary": []},
        {"type": "reasoning", "id": "rs_foreign", "summary": [{"type": "summary_text", "text": "It thought."}]},
        {"type": "reasoning", "id": "rs_foreign", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "reasoning"},
    ],
)
def test_reasoning_without_readable_text_is_skipped(foreign: dict[str, Any]) -> None:
    assert items_of([foreign, {"role": "user", "content": "Hi"}]) == [UserMessage("Hi")]


def known_state(*items: StoredItem, earlier: Sequence[Item] = (), sealed: Any = None) -> KnownState:
    stored = {item.id: item for item in items}
    return KnownState(earlier, stored.get, (sealed or {}).get)


REASONING = AssistantReasoning("hm", (1, 2))
STORED_REASONING = StoredItem("rs_1", (REASONING,), {"id": "rs_1", "type": "reasoning"})
STORED_CALL = StoredItem(
    "mcp_1",
    (AssistantCall("mcp_1", "d__find", '{"q":1}', (1,)), ToolResult("mcp_1", "d__find", "x")),
    {"id": "mcp_1", "type": "mcp_call", "arguments": '{"q":1}'},
)
STORED_ITEMS: dict[str, tuple[dict[str, Any], StoredItem]] = {
    "reasoning by its id": ({"type": "reasoning", "id": "rs_1", "summary": []}, STORED_REASONING),
    "reasoning with its text": ({"type": "reasoning", "id": "rs_1", "content": [{"text": "hm"}]}, STORED_REASONING),
    "a message": (
        {"id": "msg_1", "role": "assistant", "content": "Yes"},
        StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),)),
    ),
    "a call": (CALL, StoredItem("fc_1", (AssistantCall("c", "f", '{"a":1}', (1,)),))),
    "a custom call": (
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "free", "input": "ls"},
        StoredItem("ctc_1", (AssistantCall("c", "free", "ls", (1,)),), {"input": "ls", "call_id": "c"}),
    ),
    "a reference": (
        {"type": "item_reference", "id": "msg_1"},
        StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),), {"id": "msg_1", "type": "message"}),
    ),
    "a reference without a type": (
        {"id": "msg_1"},
        StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),), {"id": "msg_1", "type": "message"}),
    ),
    "a call answered by a server, without its output": (
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "server_label": "d",
            "name": "find",
            "arguments": '{"q":1}',
            "output": None,
        },
        STORED_CALL,
    ),
    "a call answered by a server, with other white space": (
        {"type": "mcp_call", "id": "mcp_1", "name": "find", "arguments": '{ "q": 1 }', "output": "x"},
        STORED_CALL,
    ),
}


@pytest.mark.parametrize(("sent", "stored"), STORED_ITEMS.values(), ids=STORED_ITEMS)
def test_a_stored_item_is_restored_with_its_exact_tokens(sent: dict[str, Any], stored: StoredItem) -> None:
    assert items_of([sent], known_state(stored)) == list(stored.meaning)


def test_an_item_changed_by_the_client_has_its_new_content() -> None:
    known = known_state(STORED_REASONING, StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),)))
    sent = [
        {"type": "reasoning", "id": "rs_1", "content": [{"text": "other"}]},
        {"id": "msg_1", "role": "assistant", "content": "No"},
    ]
    assert items_of(sent, known) == [AssistantReasoning("other"), AssistantMessage("No")]


def test_sealed_content_is_decrypted() -> None:
    known = known_state(sealed={"ours": (REASONING,), "earlier": (UserMessage("Hi"), AssistantMessage("Yes"))})
    sent = [
        {"type": "compaction", "encrypted_content": "earlier"},
        {"type": "reasoning", "id": "rs_elsewhere", "summary": [], "encrypted_content": "ours"},
    ]
    assert items_of(sent, known) == [UserMessage("Hi"), AssistantMessage("Yes"), REASONING]
    generation = generation_of(known, input=[{"type": "compaction", "encrypted_content": "foreign"}, *sent])
    assert generation.notes == ("input.0: no effect, because this gateway cannot decrypt it",)


def test_results_are_matched_with_calls_in_earlier_items() -> None:
    called, other = AssistantCall("c", "f", "{}", (1,)), AssistantCall("d", "g", "{}", (2,))
    earlier = [UserMessage("Hi"), REASONING, called, other]
    sent = [
        {"type": "function_call_output", "call_id": "d", "output": "D"},
        {"type": "function_call_output", "call_id": "c", "output": "C"},
    ]
    results = [called, ToolResult("c", "f", "C"), other, ToolResult("d", "g", "D")]
    assert items_of(sent, known_state(earlier=earlier)) == [UserMessage("Hi"), REASONING, *results]


def test_a_result_without_its_deleted_call_keeps_its_position() -> None:
    earlier = [UserMessage("Hi"), ToolResult("c", "f", "C")]
    assert items_of("And?", known_state(earlier=earlier)) == [*earlier, UserMessage("And?")]


def test_instructions_tools_and_effort_come_from_the_request() -> None:
    earlier = [DeveloperMessage("Be kind."), UserMessage("Hi"), AssistantMessage("Hello")]
    generation = generation_of(
        known_state(earlier=earlier),
        input="And?",
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f"}],
        reasoning={"effort": "high"},
    ).request
    assert generation.conversation.preamble.instructions == "Be brief.\n\nBe kind."
    assert [tool.name for tool in generation.conversation.preamble.tools] == ["f"]
    assert generation.conversation.preamble.effort == "high"
    assert generation.conversation.preamble.date == "2026-11-20"
    assert generation.conversation.items == (*earlier[1:], UserMessage("And?"))
    assert (
        generation_of(known_state(earlier=earlier), input="And?").request.conversation.preamble.instructions
        == "Be kind."
    )


def test_a_conversation_can_be_continued_without_new_input() -> None:
    generation = generation_of(known_state(earlier=[UserMessage("Hi")]), input=None, conversation={"id": "conv_1"})
    assert generation.request.conversation.items == (UserMessage("Hi"),)
    assert generation.input == ()


def test_input_is_stored_with_its_items_under_new_ids() -> None:
    sent = [
        {"role": "user", "content": "Hi"},
        {**CALL, "id": "fc_foreign"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]},
        {"type": "reasoning", "id": "__fake_id__", "content": [{"text": "hm"}], "summary": []},
    ]
    stored = generation_of(input=sent).input
    assert [item.id for item in stored] == ["msg_0", "fc_1", "fco_2", "rs_3"]
    assert [item.wire["id"] for item in stored] == [item.id for item in stored]
    assert meaning_of(stored) == (UserMessage("Hi"), CALLED, ToolResult("c", "f", "42"), AssistantReasoning("hm"))
    assert stored[0].wire == {
        "id": "msg_0",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    assert stored[2].wire == {
        "id": "fco_2",
        "type": "function_call_output",
        "status": "completed",
        "call_id": "c",
        "output": "42",
    }


def test_stored_input_converts_to_the_same_items_again() -> None:
    for sent, _ in INPUT_FORMS.values():
        first = generation_of(input=sent)
        again = generation_of(known_state(earlier=meaning_of(first.input)), input=None, conversation="conv_1")
        assert again.request.conversation.items == first.request.conversation.items
        listed = [dict(item.wire) for item in first.input]
        assert without_call_ids(items_of(listed)) == without_call_ids(first.request.conversation.items)


def without_call_ids(items: Sequence[Item]) -> list[Item]:
    """Remove call ids: a call by a server takes the id of its item, which is new in each request."""
    return [replace(item, call_id="") if isinstance(item, AssistantCall | ToolResult) else item for item in items]


ITEMS: list[Item] = [
    UserMessage("Hi"),
    DeveloperMessage("Be brief."),
    AssistantReasoning("hm"),
    AssistantMessage("Look.", Phase.COMMENTARY),
    AssistantCall("c", "files__read", "{}"),
    ToolResult("c", "files__read", "x"),
    AssistantCall("d", "free", '{"input":"ls"}'),
    ToolResult("d", "free", "y"),
    AssistantMessage("Yes"),
]


def test_every_item_survives_conversion_to_the_wire_and_back() -> None:
    new_id = ids()
    stored = [to_stored(item, new_id, TOOLBOX) for item in ITEMS]
    assert meaning_of(stored) == tuple(ITEMS)
    assert items_of([dict(item.wire) for item in stored]) == ITEMS
    assert all(item.wire["id"] == item.id for item in stored)
    assert to_wire(ITEMS[4], "fc_1", TOOLBOX)["namespace"] == "files"


def test_a_listing_has_its_first_and_last_id() -> None:
    new_id = ids()
    stored = [to_stored(item, new_id, TOOLBOX) for item in ITEMS[:2]]
    page = to_listing(stored, has_more=True)
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", "msg_0", "msg_1", True)
    assert page["data"] == [item.wire for item in stored]
    assert to_listing([], has_more=False)["first_id"] is None
    custom = to_stored(ITEMS[6], new_id, TOOLBOX)
    [item] = to_listing([custom], has_more=False, show=OPEN_RESPONSES.item)["data"]
    assert item["type"] == "unisono:custom_tool_call"


def test_referenced_ids_are_collected_before_conversion() -> None:
    sent = [{"id": "msg_1"}, {**CALL, "id": "fc_1"}, {"role": "user", "content": "Hi"}, {"id": "msg_1"}]
    request = ResponsesRequest.model_validate({"model": "m", "input": sent})
    assert referenced_ids(request) == ("msg_1", "fc_1")


LONG = "a" * 300_000
TOO_LONG: dict[str, tuple[dict[str, Any], str]] = {
    # Each part is short enough for the tokenizer, all parts together are not.
    "message": ({"role": "user", "content": [LONG, LONG]}, "input.0.content"),
    "reasoning": ({"type": "reasoning", "content": [{"text": LONG}, {"text": LONG}]}, "input.0.content"),
}


@pytest.mark.parametrize(("sent", "param"), TOO_LONG.values(), ids=TOO_LONG)
def test_parts_with_too_long_a_combined_text_are_refused(sent: dict[str, Any], param: str) -> None:
    assert refusal_of(input=[sent]).param == param
