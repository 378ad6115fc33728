"""Tool servers in the configuration: entries, rejected values, filters and secrets."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.bootstrap.tool_servers import build_server_tools
from unisono.config import parse
from unisono.core.tool_approvals import Approval, ToolFilter
from unisono.core.tool_host import ClientCredentials, Command, HostedTool, ToolServer, ToolTimeouts, ToolTransport
from unisono.errors import ConfigError

URL = "https://mcp.example.com/mcp"


def server(**entry: Any) -> ToolServer:
    return parse({"mcp_servers": {"docs": {"url": URL, **entry}}}, {}).config.mcp_servers["docs"].server("docs")


def with_token(auth_type: str, token: str) -> dict[str, Any]:
    return {"auth_type": auth_type, "authentication_token": token}


ENTRIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "only an address": ({}, {}),
    "SSE transport": ({"transport": "sse"}, {"transport": ToolTransport.SSE}),
    "API key": (with_token("api_key", "k"), {"headers": {"x-api-key": "k"}}),
    "bearer token": (with_token("bearer_token", "t"), {"authorization": "Bearer t"}),
    "bearer token with its scheme": (with_token("bearer_token", "bearer t"), {"authorization": "Bearer t"}),
    "user and password": (with_token("basic", "a:b"), {"authorization": "Basic YTpi"}),
    "user and password in Base64": (with_token("basic", "YTpi"), {"authorization": "Basic YTpi"}),
    "complete authorization header": (with_token("authorization", "Custom x"), {"authorization": "Custom x"}),
    "token scheme": (with_token("token", "t"), {"authorization": "token t"}),
    "OAuth client credentials": (
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
    "read-only tools": ({"allowed_tools": {"read_only": True}}, {"allowed": ToolFilter(read_only=True)}),
    "all tools except one": ({"disallowed_tools": ["b"]}, {"allowed": ToolFilter(excluded=frozenset({"b"}))}),
    "approval always": ({"require_approval": "always"}, {"approval": Approval(always=ToolFilter())}),
    "approval never": ({"require_approval": "never"}, {"approval": Approval(otherwise=False)}),
    "approval except for named tools": (
        {"require_approval": {"never": {"tool_names": ["a"]}}},
        {"approval": Approval(never=ToolFilter(frozenset({"a"})))},
    ),
    "approval for tools that write": (
        {"require_approval": {"always": {"read_only": False}, "otherwise": "never"}},
        {"approval": Approval(always=ToolFilter(read_only=False), otherwise=False)},
    ),
    "timeouts": (
        {"timeout": 5, "connect_timeout_s": 1, "list_timeout_s": 2},
        {"timeouts": ToolTimeouts(connect_s=1, list_s=2, call_s=5)},
    ),
    "other settings": (
        {"idempotent": ["a"], "description": "d", "max_concurrent_requests": 2},
        {"idempotent": frozenset({"a"}), "description": "d", "concurrent": 2},
    ),
}


@pytest.mark.parametrize(("entry", "facts"), ENTRIES.values(), ids=ENTRIES)
def test_an_entry_becomes_a_tool_server(entry: dict[str, Any], facts: dict[str, Any]) -> None:
    assert server(**entry) == ToolServer(**{"label": "docs", "url": URL, "configured": True, **facts})


def test_a_stdio_server_has_a_command_and_environment() -> None:
    raw = {"transport": "stdio", "command": "npx", "args": ["-y", "files"], "env": {"A": "os.environ/A"}}
    files_server = parse({"mcp_servers": {"files": raw}}, {"A": "secret"}).config.mcp_servers["files"].server("files")
    assert (files_server.command, files_server.url) == (Command(("npx", "-y", "files"), {"A": "secret"}), "")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no URL": ({}, "mcp_servers.docs: transport `http` requires `url`"),
    "URL and command": (
        {"url": URL, "command": "x"},
        "mcp_servers.docs: transport `http` requires `url`, and does not allow `command`",
    ),
    "stdio without a command": ({"transport": "stdio"}, "mcp_servers.docs: transport `stdio` requires `command`"),
    "headers of a stdio server": (
        {"transport": "stdio", "command": "x", "static_headers": {"a": "b"}},
        "mcp_servers.docs: transport `stdio` has no headers",
    ),
    "no token": ({"url": URL, "auth_type": "bearer_token"}, "mcp_servers.docs: auth_type `bearer_token` requires"),
    "no issuer": (
        {"url": URL, "auth_type": "oauth2", "client_id": "a"},
        "mcp_servers.docs: auth_type `oauth2` requires",
    ),
    "unknown key": (
        {"url": URL, "allowed_tool": []},
        "mcp_servers.docs.allowed_tool: unknown key `allowed_tool` (did",
    ),
    "empty filter": (
        {"url": URL, "require_approval": {"never": {}}},
        "mcp_servers.docs.require_approval.never: the entry selects no tools",
    ),
    "unknown approval policy": (
        {"url": URL, "require_approval": "sometimes"},
        "mcp_servers.docs.require_approval: must be `always`, `never`, or a mapping",
    ),
    "empty entry": (None, "mcp_servers.docs: must be a mapping, not empty"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("entry", "message"), MISTAKES.values(), ids=MISTAKES)
def test_an_invalid_entry_is_rejected_with_its_path(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"mcp_servers": {"docs": entry}}, {})
    assert str(error.value).startswith(message)


HOSTS: dict[str, tuple[Any, str]] = {
    "URL instead of a host": ("https://mcp.example.com", "unisono.mcp_allowed_hosts[0].host: must be only a host name"),
    "host with a port": ("mcp.example.com:8443", "unisono.mcp_allowed_hosts[0].host: must be only a host name"),
    "private wildcard": (
        {"host": "*", "private": True},
        "unisono.mcp_allowed_hosts[0]: `private` requires a host name",
    ),
}


@pytest.mark.parametrize(("entry", "message"), HOSTS.values(), ids=HOSTS)
def test_an_invalid_allowed_host_is_rejected_with_its_path(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"unisono": {"mcp_allowed_hosts": [entry]}}, {})
    assert str(error.value).startswith(message)


def test_an_allowed_host_is_a_name_or_a_mapping_of_its_options() -> None:
    mapping = {"host": "::1", "ports": [], "plain_http": True, "private": True}
    by_name, by_mapping = parse(
        {"unisono": {"mcp_allowed_hosts": ["*.example.com", mapping]}}, {}
    ).config.unisono.mcp_allowed_hosts
    assert (by_name.host, by_name.ports, by_name.plain_http, by_name.private) == ("*.example.com", (443,), False, False)
    assert (by_mapping.host, by_mapping.ports, by_mapping.plain_http, by_mapping.private) == ("::1", (), True, True)


def test_secrets_are_masked_in_repr_str_and_dumps() -> None:
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
    "names and read-only": (ToolFilter(frozenset("abr")), ToolFilter(read_only=True), ["r"]),
    "contradicting filters": (ToolFilter(read_only=True), ToolFilter(read_only=False), []),
    "exclusions of both": (ToolFilter(excluded=frozenset("a")), ToolFilter(excluded=frozenset("b")), ["c", "r"]),
    "no filter": (ToolFilter(), ToolFilter(), ["a", "b", "c", "r"]),
    "without approval": (ToolFilter(unasked=Approval(never=ToolFilter(frozenset("ac")))), ToolFilter(), ["a", "c"]),
}


@pytest.mark.parametrize(("first", "second", "selected"), NARROWED.values(), ids=NARROWED)
def test_two_combined_filters_select_the_tools_that_both_match(
    first: ToolFilter, second: ToolFilter, selected: list[str]
) -> None:
    tools = [tool("a"), tool("b"), tool("c"), tool("r", read_only=True)]
    for joined in (first & second, second & first):
        assert [each.name for each in tools if joined.matches(each)] == selected


def test_a_tool_needs_approval_when_operator_or_client_requires_it() -> None:
    operator = Approval(never=ToolFilter(frozenset("ab")))
    client = Approval(always=ToolFilter(frozenset("a")), otherwise=False, second=operator)
    assert [client.needed(tool(name)) for name in "abc"] == [True, False, True]


def test_a_builtin_tool_needs_a_configured_server() -> None:
    servers = {"docs": {"url": URL}}
    config = parse({"mcp_servers": servers, "unisono": {"builtin_tools": {"browser": "docs"}}}, {}).config
    assert build_server_tools(config).rules.trained["browser"].label == "docs"
    config = parse({"mcp_servers": servers, "unisono": {"builtin_tools": {"python": "code"}}}, {}).config
    with pytest.raises(ConfigError, match=r"unisono\.builtin_tools\.python: unknown tool server `code`"):
        build_server_tools(config)


def test_an_unknown_builtin_tool_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"unisono\.builtin_tools"):
        parse({"unisono": {"builtin_tools": {"shell": "docs"}}}, {})
