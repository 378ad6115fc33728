"""Server tools of the Messages API."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from unisono.api.client_toolbox import DeclaredTool, FunctionSpec, Toolbox
from unisono.api.gateway_tools import BROWSER, PYTHON, SETTING, builtin_notes, builtin_of, to_builtin_servers
from unisono.api.gateway_tools import SEARCH as TOOL_SEARCH
from unisono.api.media_replacement import LINE
from unisono.api.messages.client_tools import client_tool
from unisono.api.messages.content_blocks import FILES, ServerResultBlock
from unisono.api.messages.deferred_tools import is_search, is_searched, server_search
from unisono.api.messages.mcp_servers import TOOLSET
from unisono.api.messages.schema import CUSTOM, ChoiceSpec, MessagesInput, MessagesTool
from unisono.api.messages.tool_input import to_wire
from unisono.api.tool_calls import MCP_TOOL_PREFIX, SERVER_TOOL_PREFIX, to_messages_id
from unisono.api.tool_choice import (
    FUNCTIONS,
    ChoiceMode,
    HostedTool,
    NamedTool,
    OfferedTools,
    ToolChoice,
    client_tool_name,
    to_choice,
)
from unisono.api.tool_search import found_text, with_search
from unisono.core.conversation import Json
from unisono.core.events import HostedCall, Ran
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_approvals import ToolFilter
from unisono.core.tool_host import SEARCH_LABEL, ToolServer, found_names
from unisono.engine.request import Choice, ForcedCalls, ServerTools
from unisono.engine.server_tools.call_verdicts import BAD_ARGUMENTS, NO_CALLS_LEFT
from unisono.errors import UnsupportedValue
from unisono.schemas import ANTHROPIC

# Server tools of a request, and tools that are unavailable.
#
# Anthropic's server tools are available if the operator configured a server for the corresponding tool that gpt-oss
# was trained on.

# Types of server tools, with the corresponding builtin tool.
KINDS: Final = (
    (re.compile(r"web_(search|fetch)(_\d{8})?"), BROWSER),
    (re.compile(r"code_execution(_\d{8})?"), PYTHON),
)

MODES: Final[Mapping[str, ChoiceMode]] = {
    "auto": ChoiceMode.AUTO,
    "any": ChoiceMode.REQUIRED,
    "tool": ChoiceMode.REQUIRED,
    "none": ChoiceMode.NONE,
}


def builtin_for(kind: str) -> str:
    """Return the builtin tool that a tool type selects, or "" if it selects none."""
    return next((builtin for pattern, builtin in KINDS if pattern.fullmatch(kind)), "")


def to_servers(
    request: MessagesInput, trained: Mapping[str, ToolServer], *, owner: str, session: str
) -> tuple[ToolServer, ...]:
    """Return those servers in `trained` that run the request's builtin tools.

    This API has no approvals, so tools that require approval are unavailable.
    """
    builtins = [builtin_for(tool.type) for tool in request.tools or ()]
    return tuple(
        replace(server, allowed=(server.allowed or ToolFilter()) & ToolFilter(unasked=server.approval))
        for server in to_builtin_servers(builtins, trained, owner=owner, session=session)
    )


def declared(request: MessagesInput, hosted: frozenset[str]) -> Iterator[DeclaredTool]:
    """Yield the tools that are functions for the model, and the unavailable tools.

    Skips builtin tools in `hosted`, and a tool search that the gateway can run: these tools are available, but are not
    functions of the client.
    """
    has_search = is_searched(request)
    for position, tool in enumerate(request.tools or ()):
        if tool.type == TOOLSET:
            continue
        if builtin_for(tool.type) not in hosted and not (has_search and is_search(tool.type)):
            yield to_declared(tool, f"tools.{position}")


def to_declared(tool: MessagesTool, at: str) -> DeclaredTool:
    """Convert a tool; `at` is its path in the request."""
    if tool.type == CUSTOM:
        spec = FunctionSpec.model_construct(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        return DeclaredTool("function", at, at, spec, schema_field="input_schema", strict_rules=ANTHROPIC)
    if (client := client_tool(tool.type)) is not None:
        return DeclaredTool("function", at, at, client.function(tool.name, tool.model_extra or {}))
    builtin = builtin_for(tool.type)
    return DeclaredTool(tool.type, at, setting=SETTING + builtin if builtin else "")


def notes_on(tools: Sequence[MessagesTool], hosted: frozenset[str], *, is_bounded: bool) -> Iterator[str]:
    """Yield notes on fields of tools that the gateway runs.

    If `is_bounded` is True, `max_uses` limits the calls of these tools, so `max_uses` needs no note.
    """
    for position, tool in enumerate(tools):
        if builtin_for(tool.type) in hosted:
            declared_fields = {"strict": tool.strict, "defer_loading": tool.defer_loading}
            fields = {name: value for name, value in tool.settings.items() if name != "max_uses" or not is_bounded}
            yield from builtin_notes(f"tools.{position}", declared_fields | fields)


def bounded(server_tools: ServerTools, tools: Sequence[MessagesTool]) -> ServerTools:
    """Limit the number of server tool calls to the sum of `max_uses` of the tools.

    There is no limit unless every server tool of the request has `max_uses` and the request uses no MCP server.
    """
    served = [tool for tool in tools if builtin_for(tool.type)]
    uses = [most for tool in served if isinstance(most := (tool.model_extra or {}).get("max_uses"), int) and most > 0]
    if len(uses) < len(served) or len(served) < len(server_tools.servers):
        return server_tools
    return replace(server_tools, max_calls=sum(uses))


def with_server_tools(
    server_tools: ServerTools | None,
    request: MessagesInput,
    toolbox: Toolbox,
    served: Sequence[ToolServer],
    pause_after: int | None,
    removed: Collection[str],
) -> ServerTools | None:
    """Add the servers whose calls the client sees, the limits, and the tool search.

    The client sees the calls of the servers in `served`. The tool search does not find `removed` tools. The answer may
    pause after `pause_after` rounds of calls, but only if the client sees the calls of all servers, because a later
    request needs all these calls to continue the answer.
    """
    search = server_search(request, toolbox, removed)
    if server_tools is not None:
        server_tools = bounded(server_tools, request.tools or ())
        labels = frozenset(server.label for server in served)
        seen = all(server.label in labels for server in server_tools.servers)
        server_tools = replace(server_tools, visible=labels, pause_after=pause_after if seen else None)
    return server_tools if search is None else with_search(server_tools or ServerTools(), search)


def requested_choice(spec: ChoiceSpec | None, tools: Sequence[MessagesTool]) -> ToolChoice | None:
    if spec is None:
        return None
    if spec.type != "tool":
        return ToolChoice(MODES[spec.type])
    others = (tool.type for tool in tools if tool.name == spec.name and client_tool(tool.type) is None)
    kind = next((kind for kind in others if kind != CUSTOM), FUNCTIONS[0])
    return ToolChoice(ChoiceMode.REQUIRED, (NamedTool(kind, spec.name or ""),), one=True)


def to_server_tool_choice(
    choice: ToolChoice | None, toolbox: Toolbox, servers: Sequence[ToolServer], *, has_search: bool
) -> Choice | None:
    """Return the engine's constraint on calls.

    `has_search` is True if the gateway runs a tool search. Raises InvalidRequest for an undeclared tool, and
    UnsupportedValue for an unavailable tool. The error names the field.
    """
    labels = {server.builtin: server.label for server in servers if server.builtin}
    named = (choice.tools or ()) if choice is not None and choice.one else ()
    others = [server.label for server in servers if not server.builtin]
    if others and named and named[0].kind in FUNCTIONS and not client_tool_name(named[0], toolbox):
        # A request does not declare the tools of MCP servers. The tool may be on any of the servers, whose tools are
        # listed later.
        return ForcedCalls(frozenset(), frozenset((label, named[0].name) for label in others))

    def hosted(tool: NamedTool) -> HostedTool:
        if has_search and is_search(tool.kind):
            return SEARCH_LABEL, None
        builtin = builtin_for(tool.kind)
        if (label := labels.get(builtin)) is None:
            needs = f"; the operator can enable them with `{SETTING}{builtin}`" if builtin else ""
            raise UnsupportedValue(
                f"'tool_choice': tools of type '{tool.kind}' are not available{needs}.", param="tool_choice"
            )
        return label, None

    return to_choice(choice, OfferedTools(toolbox, hosts=bool(servers) or has_search, hosted=hosted))


# Blocks of server tools, in Anthropic's form: web searches, pages, and code execution.
#
# A result block contains the sealed text that the model read. If the client sends the block back, the call and its
# result are restored exactly. Of results from other servers, only the visible text is used.

SEALED: Final = "encrypted_content"
SEARCH, FETCH, CODE = "web_search", "web_fetch", "code_execution"
# Fields of results that the model reads.
VISIBLE: Final = ("title", "context", "url", "text", "stdout", "stderr", "file_id", "error_code", "error_message")
# Block names of the browser functions.
NAMES: Final[Mapping[tuple[str, str], str]] = {
    (BROWSER, "search"): SEARCH,
    (BROWSER, "open"): FETCH,
    (BROWSER, "find"): FETCH,
}
UNAVAILABLE: Final = "unavailable"
# Error codes by the rule that refused a call; the default is `UNAVAILABLE`.
ERROR_CODES: Final[Mapping[str, str]] = {NO_CALLS_LEFT: "max_uses_exceeded", BAD_ARGUMENTS: "invalid_tool_input"}


def name_of(item: HostedCall) -> str:
    """Return Anthropic's name for the called tool; "" if the API has no such tool."""
    builtin = builtin_of(item.server)
    if builtin == TOOL_SEARCH:
        return item.tool
    return CODE if builtin == PYTHON else NAMES.get((builtin, item.tool), "")


def to_call_block(item: HostedCall) -> dict[str, Any]:
    """Return the block of a call."""
    if not builtin_of(item.server):
        return {
            "type": "mcp_tool_use",
            "id": to_messages_id(item.call_id, MCP_TOOL_PREFIX),
            "name": item.tool,
            "server_name": item.server,
            "input": _input(item.arguments, item.tool),
        }
    name = name_of(item)
    return {
        "type": "server_tool_use",
        "id": to_messages_id(item.call_id, SERVER_TOOL_PREFIX),
        "name": name,
        "input": _input(item.arguments, name),
    }


def _input(arguments: ToolArguments, name: str) -> Any:
    return dict(arguments.members) if name == CODE or arguments.problem else to_wire(arguments.text)


def to_result(ran: Ran, sealed: str) -> dict[str, Any]:
    """Return the block of a call's result; `sealed` is the encrypted call and result."""
    if builtin_of(ran.item.server) == TOOL_SEARCH:
        return _search_result(ran, sealed)
    if not builtin_of(ran.item.server):
        return {
            "type": "mcp_tool_result",
            "tool_use_id": to_messages_id(ran.item.call_id, MCP_TOOL_PREFIX),
            "is_error": ran.outcome.is_error,
            "content": [{"type": "text", "text": ran.text_for_model, SEALED: sealed}],
        }
    name = name_of(ran.item)
    facts = ran.outcome.structured if isinstance(ran.outcome.structured, dict) else {}
    if name == CODE:
        content: Any = _code_result(ran, sealed)
    elif ran.outcome.is_error:
        code = ERROR_CODES.get(ran.rule, UNAVAILABLE)
        content = {"type": f"{name}_tool_result_error", "error_code": code, SEALED: sealed}
    elif name == SEARCH:
        content = [
            # The seal contains the whole call, so only the first result needs it.
            {"type": "web_search_result", "url": url, "title": title, "page_age": None, SEALED: sealed * (not place)}
            for place, (url, title) in enumerate(_results(facts))
        ]
    else:
        content = {
            "type": "web_fetch_result",
            "url": _text(facts.get("url")),
            "retrieved_at": None,
            "content": {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": ran.text_for_model},
                "title": _text(facts.get("title")) or None,
            },
            SEALED: sealed,
        }
    return {
        "type": f"{name}_tool_result",
        "tool_use_id": to_messages_id(ran.item.call_id, SERVER_TOOL_PREFIX),
        "content": content,
        # The first result of a search contains the seal. Without hits, there is no first result.
        **({} if content else {SEALED: sealed}),
    }


def _code_result(ran: Ran, sealed: str) -> dict[str, Any]:
    return_code = _return_code(ran)
    return {
        "type": "code_execution_result",
        # A tool server returns one text. Clients look for the cause of a failure in `stderr`.
        "stdout": "" if return_code else ran.text_for_model,
        "stderr": ran.text_for_model if return_code else "",
        "return_code": return_code,
        "content": [],
        SEALED: sealed,
    }


def _return_code(ran: Ran) -> int:
    """Return the exit code of a program, or 1 if it failed without one.

    If a program fails, its tool call still succeeds, and the tool server reports the exit code.
    """
    facts = ran.outcome.structured if isinstance(ran.outcome.structured, dict) else {}
    code = facts.get("exit_code", 0)
    # The exit code of a program that was stopped may be unknown.
    has_failed = ran.outcome.is_error or code is None or facts.get("timed_out") is True
    return code if type(code) is int and code else int(has_failed)


def _search_result(ran: Ran, sealed: str) -> dict[str, Any]:
    if ran.outcome.is_error:
        code = ERROR_CODES.get(ran.rule, "invalid_tool_input")
        content: dict[str, Any] = {"type": "tool_search_tool_result_error", "error_code": code}
        content["error_message"] = ran.text_for_model
    else:
        references = [{"type": "tool_reference", "tool_name": name} for name in found_names(ran.outcome)]
        content = {"type": "tool_search_tool_search_result", "tool_references": references}
    return {
        "type": "tool_search_tool_result",
        "tool_use_id": to_messages_id(ran.item.call_id, SERVER_TOOL_PREFIX),
        "content": {**content, SEALED: sealed},
    }


def references_in(content: Any) -> list[str]:
    """Return the names of the tools in the result of a search."""
    found = content.get("tool_references") if isinstance(content, dict) else None
    names = (each.get("tool_name") for each in (found if isinstance(found, list) else ()) if isinstance(each, dict))
    return [name for name in names if isinstance(name, str)]


def _results(facts: Mapping[str, Json]) -> list[tuple[str, str]]:
    results = facts.get("results")
    found = [result for result in (results if isinstance(results, list) else ()) if isinstance(result, dict)]
    return [(_text(result.get("url")), _text(result.get("title"))) for result in found]


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def sealed_in(block: ServerResultBlock) -> str:
    """Return the sealed text of a result that a client sent back; "" if it is not sealed."""
    content = block.content
    first = content[0] if isinstance(content, list) and content else content
    sealed = first.get(SEALED) if isinstance(first, dict) else block.encrypted_content
    return sealed if isinstance(sealed, str) else ""


def result_text(content: Any) -> str:
    """Return the visible text of a result."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n\n".join(filter(None, map(result_text, content)))
    if not isinstance(content, dict):
        return ""
    if "tool_references" in content:
        return found_text(references_in(content))
    lines = content.get("lines")
    edit = [line for line in (lines if isinstance(lines, list) else ()) if isinstance(line, str)]
    fields = [*(content.get(name) for name in VISIBLE), "\n".join(edit)]
    inner = [content.get("content"), _source_text(content.get("source"))]
    return "\n".join(filter(None, [*filter(lambda text: isinstance(text, str), fields), *map(result_text, inner)]))


def _source_text(source: Any) -> str:
    """Return the visible text of a document's source."""
    if not isinstance(source, dict):
        return ""
    # A fetched PDF is base64, which the model must not read as text.
    return LINE.format(kind="File") if str(source.get("type")) in FILES else result_text([source.get("data"), source])


def is_encrypted(content: Any) -> bool:
    """Return whether a result contains text that another server has encrypted."""
    return isinstance(content, dict) and any(name.startswith("encrypted_") for name in content)
