"""What a request may ask of tool servers, what was said about their tools before, and what of it stays out of sight."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.frames import request_of
from unisono.api.responses.inbound import mcp_specs
from unisono.api.responses.server_tools.approval_history import ServerToolHistory, parted, server_tool_history, settled
from unisono.api.responses.server_tools.secrets import concealed, decrypted, has_secrets, is_concealed
from unisono.api.responses.server_tools.servers import MAX_SERVERS, ServerRules, to_servers
from unisono.api.sealing import Sealer
from unisono.core.conversation import AssistantCall, AssistantMessage, Item, ToolResult, UserMessage
from unisono.core.state_store import StoredItem
from unisono.core.tools import Approval, Command, HostedTool, ToolFilter, ToolServer, ToolTransport
from unisono.engine.request import ApprovalDecision
from unisono.engine.server_tools.policy import OUTCOME_UNKNOWN
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


def test_a_configured_server_is_the_operators_with_the_tenants_connections() -> None:
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


def test_by_its_exact_address_it_has_the_requests_label() -> None:
    [server] = servers({"server_label": "mine", "server_url": URL})
    assert (server.label, server.url, server.configured, server.allowed) == ("mine", URL, True, DOCS.allowed)


@pytest.mark.parametrize(("path", "transport"), [("mcp", "streamable_http"), ("x/sse", "sse"), ("sse/", "sse")])
def test_one_on_an_allowed_host_is_the_requests_own(path: str, transport: str) -> None:
    [server] = servers({"server_label": "mine", "server_url": f"https://ok.example.com/{path}", "authorization": "t"})
    assert (server.configured, server.transport, server.authorization) == (False, ToolTransport(transport), "t")
    assert server.approval.needed(tool("a"))


REFUSED: dict[str, tuple[list[dict[str, Any]], type[UnisonoError], str]] = {
    "unknown": ([{"server_label": "other"}], InvalidRequest, "tools.0.server_label"),
    "elsewhere": (
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
    "too many": (
        [
            {"server_label": f"s{number}", "server_url": "https://ok.example.com/mcp"}
            for number in range(MAX_SERVERS + 1)
        ],
        InvalidRequest,
        f"tools.{MAX_SERVERS}",
    ),
}


@pytest.mark.parametrize(("tools", "error", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_names_its_field(tools: list[dict[str, Any]], error: type[UnisonoError], param: str) -> None:
    with pytest.raises(error) as refused:
        servers(*tools)
    assert refused.value.param == param


def test_a_model_has_no_more_servers_than_it_is_given() -> None:
    with pytest.raises(InvalidRequest):
        servers({"server_label": "docs"}, rules=RULES.for_model(["files"]))
    # Nor by its address.
    with pytest.raises(ToolServerNotAllowed):
        servers({"server_label": "docs", "server_url": URL}, rules=RULES.for_model(["files"]))
    assert len(servers({"server_label": "docs"}, rules=RULES.for_model(None))) == 1


@pytest.mark.parametrize("allowed", [["b", "c"], {"tool_names": ["b", "c"]}], ids=["list", "object"])
def test_a_request_narrows_and_never_widens(allowed: Any) -> None:
    [server] = servers({"server_label": "docs", "allowed_tools": allowed})
    assert server.allowed is not None
    assert [name for name in "abc" if server.allowed.matches(tool(name))] == ["b"]


def stored(kind: str, item_id: str, *said: Item, **shown: Any) -> StoredItem:
    return StoredItem(item_id, said, {"type": kind, "id": item_id, **shown})


A, B = AssistantCall("call_a", "docs__find", "{}", (1, 2)), AssistantCall("call_b", "docs__find", "{}")
ASK_A, ASK_B = stored("mcp_approval_request", "mcpr_a", A), stored("mcp_approval_request", "mcpr_b", B)
YES = stored("mcp_approval_response", "mcpa_1", approval_request_id="mcpr_a", approve=True)
NO = stored("mcp_approval_response", "mcpa_2", approval_request_id="mcpr_a", approve=False, reason="No.")
CAME = ToolResult("call_a", "docs__find", "found")
CALLED = stored("mcp_call", "mcp_a", CAME, approval_request_id="mcpr_a")
ASIDE, ANSWER = UserMessage("Hurry."), AssistantMessage("ok")
NEVER = ToolResult("call_b", "docs__find", ApprovalDecision("", "", approved=False).denial)

SETTLED: dict[str, tuple[list[StoredItem], list[StoredItem], list[Item]]] = {
    # before, in the input: the conversation
    "nothing hosted": ([stored("message", "m", ASIDE)], [], [ASIDE]),
    "asked and decided now": ([ASK_A], [YES], [A]),
    "asked and unanswered": ([ASK_B], [stored("message", "m", ASIDE)], [B, NEVER, ASIDE]),
    "one of two is decided now": ([ASK_A, ASK_B], [YES], [A, B, NEVER]),
    "decided and made before": ([ASK_A, YES, CALLED], [], [A, CAME]),
    "with something said between": (
        [ASK_A, YES, stored("message", "m", ASIDE), CALLED],
        [],
        [A, CAME, ASIDE],
    ),
    "decided against before": (
        [ASK_A, NO, stored("message", "m", ANSWER)],
        [],
        [A, ToolResult("call_a", "docs__find", ApprovalDecision("", "", approved=False, reason="No.").denial), ANSWER],
    ),
    "decided before and nobody knows": (
        [ASK_A, YES],
        [stored("message", "m", ASIDE)],
        [A, ToolResult("call_a", "docs__find", OUTCOME_UNKNOWN), ASIDE],
    ),
    "carried by the client, made": (
        [],
        [ASK_A, YES, CALLED, stored("message", "m", ANSWER)],
        [A, CAME, ANSWER],
    ),
    "carried by the client, decided now": ([], [ASK_A, YES], [A]),
}


@pytest.mark.parametrize(("before", "given", "said"), SETTLED.values(), ids=SETTLED)
def test_every_call_that_was_asked_for_has_its_result_behind_it(
    before: list[StoredItem], given: list[StoredItem], said: list[Item]
) -> None:
    earlier, now = parted(given, server_tool_history(before))
    items = [each for item in (*before, *given) for each in item.meaning]
    assert list(settled(items, earlier, now)) == said


def test_a_request_is_known_by_the_clients_id_too() -> None:
    carried = stored("mcp_approval_request", "mcpr_new", A, approval_request_id="theirs")
    answer = stored("mcp_approval_response", "mcpa", approval_request_id="theirs", approve=True)
    assert server_tool_history([carried, answer]).decisions == (ApprovalDecision("call_a", "theirs", approved=True),)


def test_lists_that_failed_are_told_again() -> None:
    fine = stored("mcp_list_tools", "mcpl_1", server_label="docs", tools=[], error=None)
    failed = stored("mcp_list_tools", "mcpl_2", server_label="files", tools=[], error="gone")
    assert server_tool_history([fine, failed]) == ServerToolHistory(announced=frozenset({"docs"}))


def test_what_is_for_tool_servers_is_sealed_and_found_again() -> None:
    seals = Sealer(b"salt" * 8)
    secret = {"type": "mcp", "server_label": "a", "authorization": "hidden", "headers": {"x": "hidden"}}
    address = {"type": "mcp", "server_label": "b", "server_url": "https://x/hidden"}
    body = {"model": "m", "tools": [secret, address, {"type": "mcp", "server_label": "c"}, {"type": "function"}]}
    sealed = concealed(body, seals, "tenant")
    assert has_secrets(body)
    assert is_concealed(sealed)
    assert "hidden" not in repr(sealed)
    assert decrypted(sealed, seals, "tenant") == body
    for other in (Sealer(b"other" * 8), seals):
        with pytest.raises(StoreUnreadable):
            decrypted(sealed, other, "another tenant")
    assert not has_secrets({"tools": [{"type": "mcp", "server_label": "c"}]})
    assert not has_secrets({})


def test_what_a_client_writes_in_place_of_something_sealed_is_not_kept() -> None:
    seals = Sealer(b"salt" * 8)
    mine = seals.seal("tenant", [UserMessage("no JSON")])
    tool = {"type": "mcp", "server_label": "a"}
    for secrets in ({}, {"authorization": "hidden"}):
        body = {"tools": [tool | secrets | {"sealed": mine}]}
        assert has_secrets(body)
        assert decrypted(concealed(body, seals, "tenant"), seals, "tenant") == {"tools": [tool | secrets]}
