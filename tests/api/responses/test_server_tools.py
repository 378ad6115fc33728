"""Server tools of Responses requests: server selection, approval history, sealed secrets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.frames import request_of
from unisono.api.responses.inbound import mcp_specs
from unisono.api.responses.server_tools.approval_history import (
    ServerToolHistory,
    parted,
    server_tool_history,
    with_call_results,
)
from unisono.api.responses.server_tools.mcp_spec import concealed, decrypted, has_secrets, is_concealed
from unisono.api.responses.server_tools.servers import MAX_SERVERS, ServerRules, to_servers
from unisono.api.sealing import Sealer
from unisono.core.conversation import AssistantCall, AssistantMessage, Item, ToolResult, UserMessage
from unisono.core.state_store import StoredItem
from unisono.core.tool_approvals import Approval, ToolFilter
from unisono.core.tool_host import Command, HostedTool, ToolServer, ToolTransport
from unisono.engine.request import ApprovalDecision
from unisono.engine.server_tools.call_verdicts import OUTCOME_UNKNOWN
from unisono.errors import InvalidRequest, StoreUnreadable, ToolServerNotAllowed, UnisonoError

URL = "https://mcp.example.com/mcp"
DOCS = ToolServer(
    "docs",
    URL,
    headers={"x-own": "1"},
    allowed=ToolFilter(frozenset({"a", "b"})),
    approval=Approval(otherwise=False),
    configured=True,
)
FILES = ToolServer("files", command=Command(("files",)), transport=ToolTransport.STDIO, configured=True)
KEYED = ToolServer("keyed", "https://keyed.example.com", headers={"X-Api-Key": "k"}, configured=True)
RULES = ServerRules(
    {"docs": DOCS, "files": FILES, "keyed": KEYED}, may_name=lambda url: url.startswith("https://ok.example.com/")
)


def servers(*tools: dict[str, Any], rules: ServerRules = RULES) -> tuple[ToolServer, ...]:
    request = request_of(tools=[{"type": "mcp", **tool} for tool in tools])
    return to_servers(mcp_specs(request), rules, "tenant")


def tool(name: str) -> HostedTool:
    return HostedTool("docs", name)


def test_a_configured_server_is_owned_by_the_tenant() -> None:
    [server] = servers({"server_label": "docs"})
    assert server == ToolServer(
        "docs",
        URL,
        headers={"x-own": "1"},
        allowed=DOCS.allowed,
        approval=DOCS.approval,
        configured=True,
        owner="tenant",
    )


def test_a_configured_server_named_by_url_has_the_label_of_the_request() -> None:
    [server] = servers({"server_label": "mine", "server_url": URL})
    assert (server.label, server.url, server.configured, server.allowed) == ("mine", URL, True, DOCS.allowed)


@pytest.mark.parametrize(("path", "transport"), [("mcp", "streamable_http"), ("x/sse", "sse"), ("sse/", "sse")])
def test_a_server_on_an_allowed_host_needs_approval(path: str, transport: str) -> None:
    [server] = servers({"server_label": "mine", "server_url": f"https://ok.example.com/{path}", "authorization": "t"})
    assert (server.configured, server.transport, server.authorization) == (False, ToolTransport(transport), "t")
    assert server.approval.needed(tool("a"))


REFUSED: dict[str, tuple[list[dict[str, Any]], type[UnisonoError], str]] = {
    "an unknown label": ([{"server_label": "other"}], InvalidRequest, "tools.0.server_label"),
    "another address": (
        [{"server_label": "docs", "server_url": "https://evil.example.com"}],
        ToolServerNotAllowed,
        "tools.0.server_url",
    ),
    "nearly its address": (
        [{"server_label": "docs", "server_url": f"{URL}?"}],
        ToolServerNotAllowed,
        "tools.0.server_url",
    ),
    "one label twice": ([{"server_label": "docs"}] * 2, InvalidRequest, "tools.1.server_label"),
    "a header of the operator's": (
        [{"server_label": "docs", "headers": {"X-Own": "2"}}],
        InvalidRequest,
        "tools.0.headers",
    ),
    "another key": ([{"server_label": "keyed", "authorization": "x"}], InvalidRequest, "tools.0.authorization"),
    "another key as a header": (
        [{"server_label": "keyed", "headers": {"Authorization": "x"}}],
        InvalidRequest,
        "tools.0.headers",
    ),
    "a key for a program": ([{"server_label": "files", "authorization": "x"}], InvalidRequest, "tools.0"),
    "too many servers": (
        [
            {"server_label": f"s{number}", "server_url": "https://ok.example.com/mcp"}
            for number in range(MAX_SERVERS + 1)
        ],
        InvalidRequest,
        f"tools.{MAX_SERVERS}",
    ),
}


@pytest.mark.parametrize(("tools", "error", "param"), REFUSED.values(), ids=REFUSED)
def test_an_error_names_the_invalid_field(tools: list[dict[str, Any]], error: type[UnisonoError], param: str) -> None:
    with pytest.raises(error) as refused:
        servers(*tools)
    assert refused.value.param == param


def test_a_model_can_use_only_its_own_servers() -> None:
    with pytest.raises(InvalidRequest):
        servers({"server_label": "docs"}, rules=RULES.for_model(["files"]))
    # The same applies to its URL.
    with pytest.raises(ToolServerNotAllowed):
        servers({"server_label": "docs", "server_url": URL}, rules=RULES.for_model(["files"]))
    assert len(servers({"server_label": "docs"}, rules=RULES.for_model(None))) == 1


@pytest.mark.parametrize("allowed", [["b", "c"], {"tool_names": ["b", "c"]}], ids=["list", "object"])
def test_a_request_can_only_narrow_the_allowed_tools(allowed: Any) -> None:
    [server] = servers({"server_label": "docs", "allowed_tools": allowed})
    assert server.allowed is not None
    assert [name for name in "abc" if server.allowed.matches(tool(name))] == ["b"]


def stored_item(kind: str, item_id: str, *meaning: Item, **fields: Any) -> StoredItem:
    return StoredItem(item_id, meaning, {"type": kind, "id": item_id, **fields})


CALL_A, CALL_B = AssistantCall("call_a", "docs__find", "{}", (1, 2)), AssistantCall("call_b", "docs__find", "{}")
REQUEST_A, REQUEST_B = (
    stored_item("mcp_approval_request", "mcpr_a", CALL_A),
    stored_item("mcp_approval_request", "mcpr_b", CALL_B),
)
APPROVED = stored_item("mcp_approval_response", "mcpa_1", approval_request_id="mcpr_a", approve=True)
DENIED = stored_item("mcp_approval_response", "mcpa_2", approval_request_id="mcpr_a", approve=False, reason="No.")
RESULT = ToolResult("call_a", "docs__find", "found")
CALL_ITEM = stored_item("mcp_call", "mcp_a", RESULT, approval_request_id="mcpr_a")
USER_MESSAGE, ANSWER = UserMessage("Hurry."), AssistantMessage("ok")
DENIAL = ToolResult("call_b", "docs__find", ApprovalDecision("", "", approved=False).denial)

HISTORIES: dict[str, tuple[list[StoredItem], list[StoredItem], list[Item]]] = {
    # case: (earlier items, input items, expected conversation)
    "no server tools": ([stored_item("message", "m", USER_MESSAGE)], [], [USER_MESSAGE]),
    "requested, decided now": ([REQUEST_A], [APPROVED], [CALL_A]),
    "requested, not decided": (
        [REQUEST_B],
        [stored_item("message", "m", USER_MESSAGE)],
        [CALL_B, DENIAL, USER_MESSAGE],
    ),
    "one of two decided now": ([REQUEST_A, REQUEST_B], [APPROVED], [CALL_A, CALL_B, DENIAL]),
    "decided and called before": ([REQUEST_A, APPROVED, CALL_ITEM], [], [CALL_A, RESULT]),
    "with a message between decision and call": (
        [REQUEST_A, APPROVED, stored_item("message", "m", USER_MESSAGE), CALL_ITEM],
        [],
        [CALL_A, RESULT, USER_MESSAGE],
    ),
    "denied before": (
        [REQUEST_A, DENIED, stored_item("message", "m", ANSWER)],
        [],
        [
            CALL_A,
            ToolResult("call_a", "docs__find", ApprovalDecision("", "", approved=False, reason="No.").denial),
            ANSWER,
        ],
    ),
    "decided before, outcome unknown": (
        [REQUEST_A, APPROVED],
        [stored_item("message", "m", USER_MESSAGE)],
        [CALL_A, ToolResult("call_a", "docs__find", OUTCOME_UNKNOWN), USER_MESSAGE],
    ),
    "sent by the client, called": (
        [],
        [REQUEST_A, APPROVED, CALL_ITEM, stored_item("message", "m", ANSWER)],
        [CALL_A, RESULT, ANSWER],
    ),
    "sent by the client, decided now": ([], [REQUEST_A, APPROVED], [CALL_A]),
}


@pytest.mark.parametrize(("earlier_items", "input_items", "expected"), HISTORIES.values(), ids=HISTORIES)
def test_every_requested_call_is_followed_by_its_result(
    earlier_items: list[StoredItem], input_items: list[StoredItem], expected: list[Item]
) -> None:
    earlier, decided_now = parted(input_items, server_tool_history(earlier_items))
    items = [meaning for item in (*earlier_items, *input_items) for meaning in item.meaning]
    assert list(with_call_results(items, earlier, decided_now)) == expected


def test_an_approval_is_matched_by_the_clients_request_id() -> None:
    request = stored_item("mcp_approval_request", "mcpr_new", CALL_A, approval_request_id="theirs")
    decision = stored_item("mcp_approval_response", "mcpa", approval_request_id="theirs", approve=True)
    assert server_tool_history([request, decision]).decisions == (ApprovalDecision("call_a", "theirs", approved=True),)


def test_a_decision_that_is_sent_again_decides_nothing() -> None:
    assert server_tool_history([REQUEST_A, APPROVED, APPROVED]) == server_tool_history([REQUEST_A, APPROVED])
    answered = [REQUEST_A, APPROVED, stored_item("message", "m", ANSWER)]
    _, now = parted([*answered, APPROVED], server_tool_history([]))
    assert now.decisions == ()


def test_failed_tool_lists_are_not_marked_as_announced() -> None:
    listed = stored_item("mcp_list_tools", "mcpl_1", server_label="docs", tools=[], error=None)
    failed = stored_item("mcp_list_tools", "mcpl_2", server_label="files", tools=[], error="gone")
    assert server_tool_history([listed, failed]) == ServerToolHistory(announced=frozenset({"docs"}))


def test_secrets_of_tool_servers_are_sealed_and_restored() -> None:
    sealer = Sealer(b"salt" * 8)
    with_token = {"type": "mcp", "server_label": "a", "authorization": "hidden", "headers": {"x": "hidden"}}
    with_url = {"type": "mcp", "server_label": "b", "server_url": "https://x/hidden"}
    body = {"model": "m", "tools": [with_token, with_url, {"type": "mcp", "server_label": "c"}, {"type": "function"}]}
    sealed = concealed(body, sealer, "tenant")
    assert has_secrets(body)
    assert is_concealed(sealed)
    assert "hidden" not in repr(sealed)
    assert decrypted(sealed, sealer, "tenant") == body
    for other_sealer in (Sealer(b"other" * 8), sealer):
        with pytest.raises(StoreUnreadable):
            decrypted(sealed, other_sealer, "another tenant")
    assert not has_secrets({"tools": [{"type": "mcp", "server_label": "c"}]})
    assert not has_secrets({})


def test_a_sealed_field_sent_by_a_client_is_dropped() -> None:
    sealer = Sealer(b"salt" * 8)
    forged = sealer.seal("tenant", [UserMessage("no JSON")])
    tool = {"type": "mcp", "server_label": "a"}
    for secrets in ({}, {"authorization": "hidden"}):
        body = {"tools": [tool | secrets | {"sealed": forged}]}
        assert has_secrets(body)
        assert decrypted(concealed(body, sealer, "tenant"), sealer, "tenant") == {"tools": [tool | secrets]}
