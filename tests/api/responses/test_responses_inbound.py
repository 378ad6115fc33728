"""Input to a conversation: every kind of item, in every form it exists in, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.responses.frames import TOOLBOX, ids
from tests.api.responses.test_responses_schema import refusal_of, turn_of
from unisono.api.responses.inbound import referenced_ids
from unisono.api.responses.input_conversion import READERS, KnownState
from unisono.api.responses.input_items import KINDS, InputSilent
from unisono.api.responses.items import meaning_of, to_listing, to_stored, to_wire
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
from unisono.core.tool_names import ToolNames

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"a":1}'}
CALLED = AssistantCall("c", "f", '{"a":1}')


def items_of(given: Any, known: KnownState | None = None) -> list[Item]:
    return list(turn_of(known, input=given).request.conversation.items)


FIND = ToolNames().add("my docs", "find")

READ: dict[str, tuple[Any, list[Item]]] = {
    # a form of input: (what is sent, what it says)
    "a string": ("Hi", [UserMessage("Hi")]),
    "a message without a type": ([{"role": "user", "content": "Hi"}], [UserMessage("Hi")]),
    "parts of all names": (
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
    "reasoning that is a string": ([{"type": "reasoning", "content": "hm"}], [AssistantReasoning("hm")]),
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
    "an output of nothing": (
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
    "a call in the plain namespace": ([{**CALL, "namespace": "functions"}], [CALLED]),
    "a custom call and its output": (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "free", "input": "ls"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "a b"},
        ],
        [AssistantCall("c", "free", '{"input":"ls"}'), ToolResult("c", "free", "a b")],
    ),
    "a custom call under our prefix": (
        [{"type": "unisono:custom_tool_call", "call_id": "c", "name": "free", "input": "ls"}],
        [AssistantCall("c", "free", '{"input":"ls"}')],
    ),
    "a call a server answered": (
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
        [AssistantCall("mcp_1", FIND, "{}"), ToolResult("mcp_1", FIND, "x")],
    ),
    "a call a server failed": (
        [{"type": "mcp_call", "id": "mcp_1", "server_label": "d", "name": "find", "arguments": "{}", "error": "gone"}],
        [AssistantCall("mcp_1", "d__find", "{}"), ToolResult("mcp_1", "d__find", "gone")],
    ),
    "code that was run": (
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
            AssistantCall("ci_1", "code_interpreter", '{"code":"1+1"}'),
            ToolResult("ci_1", "code_interpreter", "2"),
        ],
    ),
}


@pytest.mark.parametrize(("given_input", "said"), READ.values(), ids=READ)
def test_input_says_what_it_means(given_input: Any, said: list[Item]) -> None:
    assert items_of(given_input) == said


def test_there_is_a_reader_for_every_kind() -> None:
    assert set(READERS) == set(KINDS.values())


@pytest.mark.parametrize("kind", [kind for kind, model in KINDS.items() if model is InputSilent])
def test_a_kind_without_meaning_is_left_out_with_a_note(kind: str) -> None:
    turn = turn_of(input=[{"type": kind, "id": "x_1", "anything": [1]}, {"role": "user", "content": "Hi"}])
    assert turn.request.conversation.items == (UserMessage("Hi"),)
    assert turn.notes == (f"input.0: no effect, because an item of type '{kind}' has no content for the model",)
    assert turn.input[0].wire["anything"] == [1]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JUNK, JUNK, JUNK, JUNK)
def test_reasoning_from_elsewhere_never_fails(item_id: Any, content: Any, summary: Any, sealed: Any) -> None:
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
def test_reasoning_that_cannot_be_read_is_left_out(foreign: dict[str, Any]) -> None:
    assert items_of([foreign, {"role": "user", "content": "Hi"}]) == [UserMessage("Hi")]


def known_of(*items: StoredItem, earlier: Sequence[Item] = (), sealed: Any = None) -> KnownState:
    kept = {item.id: item for item in items}
    return KnownState(earlier, kept.get, (sealed or {}).get)


THOUGHT = AssistantReasoning("hm", (1, 2))
KEPT = StoredItem("rs_1", (THOUGHT,), {"id": "rs_1", "type": "reasoning"})
FOUND = StoredItem(
    "mcp_1",
    (AssistantCall("mcp_1", "d__find", '{"q":1}', (1,)), ToolResult("mcp_1", "d__find", "x")),
    {"id": "mcp_1", "type": "mcp_call", "arguments": '{"q":1}'},
)
EXACT: dict[str, tuple[dict[str, Any], StoredItem]] = {
    "reasoning by its id": ({"type": "reasoning", "id": "rs_1", "summary": []}, KEPT),
    "reasoning with its text": ({"type": "reasoning", "id": "rs_1", "content": [{"text": "hm"}]}, KEPT),
    "a message": (
        {"id": "msg_1", "role": "assistant", "content": "Yes"},
        StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),)),
    ),
    "a call": (CALL, StoredItem("fc_1", (AssistantCall("c", "f", '{"a":1}', (1,)),))),
    "a custom call": (
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "free", "input": "ls"},
        StoredItem("ctc_1", (AssistantCall("c", "free", '{ "input":"ls"}', (1,)),), {"input": "ls", "call_id": "c"}),
    ),
    "a reference": (
        {"type": "item_reference", "id": "msg_1"},
        StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),), {"id": "msg_1", "type": "message"}),
    ),
    "a reference without a type": (
        {"id": "msg_1"},
        StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),), {"id": "msg_1", "type": "message"}),
    ),
    "a call a server answered, without its output": (
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "server_label": "d",
            "name": "find",
            "arguments": '{"q":1}',
            "output": None,
        },
        FOUND,
    ),
    "a call a server answered, spelled its own way": (
        {"type": "mcp_call", "id": "mcp_1", "name": "find", "arguments": '{ "q": 1 }', "output": "x"},
        FOUND,
    ),
}


@pytest.mark.parametrize(("sent", "kept"), EXACT.values(), ids=EXACT)
def test_what_was_kept_comes_back_with_its_exact_tokens(sent: dict[str, Any], kept: StoredItem) -> None:
    assert items_of([sent], known_of(kept)) == list(kept.meaning)


def test_what_a_client_changed_is_what_it_says_now() -> None:
    known = known_of(KEPT, StoredItem("msg_1", (AssistantMessage("Yes", Phase.FINAL, (1,)),)))
    sent = [
        {"type": "reasoning", "id": "rs_1", "content": [{"text": "other"}]},
        {"id": "msg_1", "role": "assistant", "content": "No"},
    ]
    assert items_of(sent, known) == [AssistantReasoning("other"), AssistantMessage("No")]


def test_sealed_content_is_opened() -> None:
    known = known_of(sealed={"ours": (THOUGHT,), "earlier": (UserMessage("Hi"), AssistantMessage("Yes"))})
    sent = [
        {"type": "compaction", "encrypted_content": "earlier"},
        {"type": "reasoning", "id": "rs_elsewhere", "summary": [], "encrypted_content": "ours"},
    ]
    assert items_of(sent, known) == [UserMessage("Hi"), AssistantMessage("Yes"), THOUGHT]
    turn = turn_of(known, input=[{"type": "compaction", "encrypted_content": "foreign"}, *sent])
    assert turn.notes == ("input.0: no effect, because this gateway cannot decrypt it",)


def test_earlier_items_come_first_and_results_find_their_calls_there() -> None:
    called, other = AssistantCall("c", "f", "{}", (1,)), AssistantCall("d", "g", "{}", (2,))
    earlier = [UserMessage("Hi"), THOUGHT, called, other]
    sent = [
        {"type": "function_call_output", "call_id": "d", "output": "D"},
        {"type": "function_call_output", "call_id": "c", "output": "C"},
    ]
    results = [called, ToolResult("c", "f", "C"), other, ToolResult("d", "g", "D")]
    assert items_of(sent, known_of(earlier=earlier)) == [UserMessage("Hi"), THOUGHT, *results]


def test_a_result_whose_call_was_deleted_stays_where_it_is() -> None:
    earlier = [UserMessage("Hi"), ToolResult("c", "f", "C")]
    assert items_of("And?", known_of(earlier=earlier)) == [*earlier, UserMessage("And?")]


def test_instructions_tools_and_effort_are_those_of_the_request() -> None:
    earlier = [DeveloperMessage("Be kind."), UserMessage("Hi"), AssistantMessage("Hello")]
    turn = turn_of(
        known_of(earlier=earlier),
        input="And?",
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f"}],
        reasoning={"effort": "high"},
    ).request
    assert turn.conversation.preamble.instructions == "Be brief.\n\nBe kind."
    assert [tool.name for tool in turn.conversation.preamble.tools] == ["f"]
    assert turn.conversation.preamble.effort == "high"
    assert turn.conversation.preamble.date == "2026-11-20"
    assert turn.conversation.items == (*earlier[1:], UserMessage("And?"))
    assert turn_of(known_of(earlier=earlier), input="And?").request.conversation.preamble.instructions == "Be kind."


def test_a_conversation_may_be_continued_without_new_input() -> None:
    turn = turn_of(known_of(earlier=[UserMessage("Hi")]), input=None, conversation={"id": "conv_1"})
    assert turn.request.conversation.items == (UserMessage("Hi"),)
    assert turn.input == ()


def test_input_is_kept_with_what_it_says_under_new_ids() -> None:
    sent = [
        {"role": "user", "content": "Hi"},
        {**CALL, "id": "fc_foreign"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]},
        {"type": "reasoning", "id": "__fake_id__", "content": [{"text": "hm"}], "summary": []},
    ]
    kept = turn_of(input=sent).input
    assert [item.id for item in kept] == ["msg_0", "fc_1", "fco_2", "rs_3"]
    assert [item.wire["id"] for item in kept] == [item.id for item in kept]
    assert meaning_of(kept) == (UserMessage("Hi"), CALLED, ToolResult("c", "f", "42"), AssistantReasoning("hm"))
    assert kept[0].wire == {
        "id": "msg_0",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    assert kept[2].wire == {
        "id": "fco_2",
        "type": "function_call_output",
        "status": "completed",
        "call_id": "c",
        "output": "42",
    }


def test_what_was_kept_says_the_same_when_it_is_read_again() -> None:
    for sent, _ in READ.values():
        first = turn_of(input=sent)
        again = turn_of(known_of(earlier=meaning_of(first.input)), input=None, conversation="conv_1")
        assert again.request.conversation.items == first.request.conversation.items
        listed = [dict(item.wire) for item in first.input]
        assert nameless(items_of(listed)) == nameless(first.request.conversation.items)


def nameless(items: Sequence[Item]) -> list[Item]:
    """Without the ids of calls: what a server called is known by the id of its item, which is a new one."""
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


def test_any_item_can_be_shown_and_read_back() -> None:
    new_id = ids()
    kept = [to_stored(item, new_id, TOOLBOX) for item in ITEMS]
    assert meaning_of(kept) == tuple(ITEMS)
    assert items_of([dict(item.wire) for item in kept]) == ITEMS
    assert all(item.wire["id"] == item.id for item in kept)
    assert to_wire(ITEMS[4], "fc_1", TOOLBOX)["namespace"] == "files"


def test_a_listing_names_its_ends() -> None:
    new_id = ids()
    kept = [to_stored(item, new_id, TOOLBOX) for item in ITEMS[:2]]
    page = to_listing(kept, has_more=True)
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", "msg_0", "msg_1", True)
    assert page["data"] == [item.wire for item in kept]
    assert to_listing([], has_more=False)["first_id"] is None
    custom = to_stored(ITEMS[6], new_id, TOOLBOX)
    [shown] = to_listing([custom], has_more=False, show=OPEN_RESPONSES.item)["data"]
    assert shown["type"] == "unisono:custom_tool_call"


def test_ids_that_a_request_leans_on_are_known_before_it_is_read() -> None:
    sent = [{"id": "msg_1"}, {**CALL, "id": "fc_1"}, {"role": "user", "content": "Hi"}, {"id": "msg_1"}]
    request = ResponsesRequest.model_validate({"model": "m", "input": sent})
    assert referenced_ids(request) == ("msg_1", "fc_1")


LONG = "a" * 300_000
TOO_LONG: dict[str, tuple[dict[str, Any], str]] = {
    # each part can be tokenized, all of them together cannot
    "message": ({"role": "user", "content": [LONG, LONG]}, "input.0.content"),
    "reasoning": ({"type": "reasoning", "content": [{"text": LONG}, {"text": LONG}]}, "input.0.content"),
    "code": ({"type": "code_interpreter_call", "outputs": [{"logs": LONG}, {"logs": LONG}]}, "input.0.outputs"),
}


@pytest.mark.parametrize(("sent", "param"), TOO_LONG.values(), ids=TOO_LONG)
def test_parts_that_are_too_long_together_are_refused(sent: dict[str, Any], param: str) -> None:
    assert refusal_of(input=[sent]).param == param
