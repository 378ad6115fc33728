"""Tool servers in the configuration: what an entry comes to, what is refused, and what stays secret."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.bootstrap.tool_servers import build_server_tools
from unisono.config import parse
from unisono.core.tools import (
    Approval,
    ClientCredentials,
    Command,
    HostedTool,
    ToolFilter,
    ToolServer,
    ToolTimeouts,
    ToolTransport,
)
from unisono.errors import ConfigError

URL = "https://mcp.example.com/mcp"


def server(**entry: Any) -> ToolServer:
    return parse({"mcp_servers": {"docs": {"url": URL, **entry}}}, {}).config.mcp_servers["docs"].server("docs")


def with_token(auth_type: str, token: str) -> dict[str, Any]:
    return {"auth_type": auth_type, "authentication_token": token}


ENTRIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an address": ({}, {}),
    "the older transport": ({"transport": "sse"}, {"transport": ToolTransport.SSE}),
    "a key": (with_token("api_key", "k"), {"headers": {"x-api-key": "k"}}),
    "a bearer token": (with_token("bearer_token", "t"), {"authorization": "Bearer t"}),
    "a bearer token that says so": (with_token("bearer_token", "bearer t"), {"authorization": "Bearer t"}),
    "a user with a password": (with_token("basic", "a:b"), {"authorization": "Basic YTpi"}),
    "the same, encoded": (with_token("basic", "YTpi"), {"authorization": "Basic YTpi"}),
    "a whole header": (with_token("authorization", "Custom x"), {"authorization": "Custom x"}),
    "a token": (with_token("token", "t"), {"authorization": "token t"}),
    "a client": (
        {
            "auth_type": "oauth2",
            "client_id": "me",
            "client_secret": "s",
            "issuer": "https://login",
        },
        {"oauth": ClientCredentials("me", "https://login", "s")},
    ),
    "headers": ({"static_headers": {"x-a": "b"}}, {"headers": {"x-a": "b"}}),
    "some tools": ({"allowed_tools": ["a"]}, {"allowed": ToolFilter(frozenset({"a"}))}),
    "no tools": ({"allowed_tools": []}, {"allowed": ToolFilter(frozenset())}),
    "tools that only read": ({"allowed_tools": {"read_only": True}}, {"allowed": ToolFilter(read_only=True)}),
    "all but one": ({"disallowed_tools": ["b"]}, {"allowed": ToolFilter(excluded=frozenset({"b"}))}),
    "approval always": ({"require_approval": "always"}, {"approval": Approval(always=ToolFilter())}),
    "approval never": ({"require_approval": "never"}, {"approval": Approval(otherwise=False)}),
    "approval for most": (
        {"require_approval": {"never": {"tool_names": ["a"]}}},
        {"approval": Approval(never=ToolFilter(frozenset({"a"})))},
    ),
    "approval for few": (
        {"require_approval": {"always": {"read_only": False}, "otherwise": "never"}},
        {"approval": Approval(always=ToolFilter(read_only=False), otherwise=False)},
    ),
    "times": (
        {"timeout": 5, "connect_timeout_s": 1, "list_timeout_s": 2},
        {"timeouts": ToolTimeouts(connect_s=1, list_s=2, call_s=5)},
    ),
    "the rest": (
        {"idempotent": ["a"], "description": "d", "max_concurrent_requests": 2},
        {"idempotent": frozenset({"a"}), "description": "d", "concurrent": 2},
    ),
}


@pytest.mark.parametrize(("entry", "facts"), ENTRIES.values(), ids=ENTRIES)
def test_what_an_entry_comes_to(entry: dict[str, Any], facts: dict[str, Any]) -> None:
    assert server(**entry) == ToolServer(**{"label": "docs", "url": URL, "configured": True, **facts})


def test_a_command_is_run_with_its_own_environment() -> None:
    raw = {"transport": "stdio", "command": "npx", "args": ["-y", "files"], "env": {"A": "os.environ/A"}}
    found = parse({"mcp_servers": {"files": raw}}, {"A": "secret"}).config.mcp_servers["files"].server("files")
    assert (found.command, found.url) == (Command(("npx", "-y", "files"), {"A": "secret"}), "")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no way to it": ({}, "mcp_servers.docs: transport `http` needs `url`"),
    "two ways": ({"url": URL, "command": "x"}, "mcp_servers.docs: transport `http` needs `url`, and no `command`"),
    "a program without one": ({"transport": "stdio"}, "mcp_servers.docs: transport `stdio` needs `command`"),
    "credentials of a program": (
        {"transport": "stdio", "command": "x", "static_headers": {"a": "b"}},
        "mcp_servers.docs: transport `stdio` has no headers",
    ),
    "no token": ({"url": URL, "auth_type": "bearer_token"}, "mcp_servers.docs: auth_type `bearer_token` needs"),
    "no issuer": ({"url": URL, "auth_type": "oauth2", "client_id": "a"}, "mcp_servers.docs: auth_type `oauth2` needs"),
    "an unknown key": (
        {"url": URL, "allowed_tool": []},
        "mcp_servers.docs.allowed_tool: unknown key `allowed_tool` (did",
    ),
    "a filter that is none": (
        {"url": URL, "require_approval": {"never": {}}},
        "mcp_servers.docs.require_approval.never: selects no tools",
    ),
    "an approval that is none": (
        {"url": URL, "require_approval": "sometimes"},
        "mcp_servers.docs.require_approval: must be `always`, `never`, or a mapping",
    ),
    "no entry": (None, "mcp_servers.docs: must be a mapping, not empty"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("entry", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse({"mcp_servers": {"docs": entry}}, {})
    assert str(wrong.value).startswith(message)


HOSTS: dict[str, tuple[Any, str]] = {
    "an address": ("https://mcp.example.com", "unisono.mcp_allowed_hosts[0].host: must be only a host name"),
    "with a port": ("mcp.example.com:8443", "unisono.mcp_allowed_hosts[0].host: must be only a host name"),
    "everything inside": ({"host": "*", "private": True}, "unisono.mcp_allowed_hosts[0]: `private` needs a host name"),
}


@pytest.mark.parametrize(("entry", "message"), HOSTS.values(), ids=HOSTS)
def test_a_host_that_cannot_be_allowed_is_named(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse({"unisono": {"mcp_allowed_hosts": [entry]}}, {})
    assert str(wrong.value).startswith(message)


def test_an_allowed_host_is_a_word_or_all_that_can_be_said_of_it() -> None:
    long = {"host": "::1", "ports": [], "plain_http": True, "private": True}
    short, told = parse(
        {"unisono": {"mcp_allowed_hosts": ["*.example.com", long]}}, {}
    ).config.unisono.mcp_allowed_hosts
    assert (short.host, short.ports, short.plain_http, short.private) == ("*.example.com", (443,), False, False)
    assert (told.host, told.ports, told.plain_http, told.private) == ("::1", (), True, True)


def test_secrets_stay_out_of_every_rendering() -> None:
    raw = {
        "docs": {
            "url": f"{URL}?key=hidden1",
            "auth_type": "basic",
            "authentication_token": "hidden2",
            "static_headers": {"x-a": "hidden3"},
        },
        "files": {"transport": "stdio", "command": "x", "env": {"A": "hidden4"}},
        "crm": {
            "url": URL,
            "auth_type": "oauth2",
            "client_id": "c",
            "client_secret": "hidden5",
            "issuer": "https://login",
        },
    }
    config = parse({"mcp_servers": raw}, {}).config
    assert "hidden" not in f"{config!r} {config} {config.model_dump()} {config.model_dump_json()}"


def tool(name: str, *, read_only: bool = False) -> HostedTool:
    return HostedTool("docs", name, annotations={"readOnlyHint": read_only})


NARROWED: dict[str, tuple[ToolFilter, ToolFilter, list[str]]] = {
    "names in both": (ToolFilter(frozenset("ab")), ToolFilter(frozenset("bc")), ["b"]),
    "names and a kind": (ToolFilter(frozenset("abr")), ToolFilter(read_only=True), ["r"]),
    "two kinds at once": (ToolFilter(read_only=True), ToolFilter(read_only=False), []),
    "what either leaves out": (ToolFilter(excluded=frozenset("a")), ToolFilter(excluded=frozenset("b")), ["c", "r"]),
    "nothing named": (ToolFilter(), ToolFilter(), ["a", "b", "c", "r"]),
    "without approval": (ToolFilter(unasked=Approval(never=ToolFilter(frozenset("ac")))), ToolFilter(), ["a", "c"]),
}


@pytest.mark.parametrize(("one", "other", "left"), NARROWED.values(), ids=NARROWED)
def test_two_filters_leave_what_both_match(one: ToolFilter, other: ToolFilter, left: list[str]) -> None:
    tools = [tool("a"), tool("b"), tool("c"), tool("r", read_only=True)]
    for joined in (one & other, other & one):
        assert [each.name for each in tools if joined.matches(each)] == left


def test_what_either_of_two_wants_approved_needs_approval() -> None:
    operator = Approval(never=ToolFilter(frozenset("ab")))
    client = Approval(always=ToolFilter(frozenset("a")), otherwise=False, second=operator)
    assert [client.needed(tool(name)) for name in "abc"] == [True, False, True]


def test_a_builtin_tool_needs_a_server_there_is() -> None:
    servers = {"docs": {"url": URL}}
    config = parse({"mcp_servers": servers, "unisono": {"builtin_tools": {"browser": "docs"}}}, {}).config
    assert build_server_tools(config).rules.trained["browser"].label == "docs"
    config = parse({"mcp_servers": servers, "unisono": {"builtin_tools": {"python": "code"}}}, {}).config
    with pytest.raises(ConfigError, match=r"unisono\.builtin_tools\.python: unknown tool server `code`"):
        build_server_tools(config)


def test_there_are_no_other_builtin_tools() -> None:
    with pytest.raises(ConfigError, match=r"unisono\.builtin_tools"):
        parse({"unisono": {"builtin_tools": {"shell": "docs"}}}, {})
