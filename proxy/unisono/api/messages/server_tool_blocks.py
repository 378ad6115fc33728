"""Blocks of server tools, in Anthropic's form: web searches, pages, and code execution.

A result contains, sealed, the text that the model read. Sent back, the call and its result are restored exactly. For
results of other servers only the visible text is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from unisono.api.builtin_tools import BROWSER, PYTHON, builtin_of
from unisono.api.builtin_tools import SEARCH as TOOL_SEARCH
from unisono.api.messages.ids import SERVERS, gateway_id
from unisono.api.messages.tool_input import exact
from unisono.api.tool_search import found_names
from unisono.core.conversation import Json
from unisono.core.events import HostedCall, Ran
from unisono.core.tool_arguments import ToolArguments
from unisono.engine.server_tools.policy import BAD_ARGUMENTS, NO_CALLS_LEFT

SEALED: Final = "encrypted_content"
SEARCH, FETCH, CODE = "web_search", "web_fetch", "code_execution"
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
    """Return the block name of a call; "" for a tool that the API does not have."""
    builtin = builtin_of(item.server)
    if builtin == TOOL_SEARCH:
        return item.tool
    return CODE if builtin == PYTHON else NAMES.get((builtin, item.tool), "")


def to_call_block(item: HostedCall) -> dict[str, Any]:
    """Return the block of a call."""
    name = name_of(item)
    return {
        "type": "server_tool_use",
        "id": gateway_id(item.call_id, SERVERS),
        "name": name,
        "input": _input(item.arguments, name),
    }


def _input(arguments: ToolArguments, name: str) -> Any:
    members = dict(arguments.members)
    if name == CODE or arguments.problem:
        return members
    # Arguments that are nested too deeply for Python have no members here, but they are not empty.
    is_whole = bool(members) or ":" not in arguments.text
    return exact(members, arguments.text) if is_whole else orjson.Fragment(arguments.text)


def to_result(ran: Ran, sealed: str) -> dict[str, Any]:
    """Return the block of a call's result."""
    if builtin_of(ran.item.server) == TOOL_SEARCH:
        return _search_result(ran, sealed)
    name = name_of(ran.item)
    facts = ran.outcome.structured if isinstance(ran.outcome.structured, dict) else {}
    if name == CODE:
        content: Any = {
            "type": "code_execution_result",
            "stdout": "" if ran.outcome.is_error else ran.text_for_model,
            "stderr": ran.text_for_model if ran.outcome.is_error else "",
            "return_code": int(ran.outcome.is_error),
            "content": [],
            SEALED: sealed,
        }
    elif ran.outcome.is_error:
        code = ERROR_CODES.get(ran.rule, UNAVAILABLE)
        content = {"type": f"{name}_tool_result_error", "error_code": code, SEALED: sealed}
    elif name == SEARCH:
        content = [
            # The seal covers the whole call, so only the first result carries it.
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
        "tool_use_id": gateway_id(ran.item.call_id, SERVERS),
        "content": content,
    }


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
        "tool_use_id": gateway_id(ran.item.call_id, SERVERS),
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


def sealed_in(content: Any) -> str:
    """Return the sealed text of a returned result, or ""."""
    first = content[0] if isinstance(content, list) and content else content
    sealed = first.get(SEALED) if isinstance(first, dict) else None
    return sealed if isinstance(sealed, str) else ""


def result_text(content: Any) -> str:
    """Return the visible text of a result."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n\n".join(filter(None, map(result_text, content)))
    if not isinstance(content, dict):
        return ""
    if names := references_in(content):
        return f"Found: {', '.join(names)}"
    fields = [content.get(name) for name in ("title", "url", "text", "stdout", "stderr", "error_code")]
    source = content.get("source")
    inner = [content.get("content"), source.get("data") if isinstance(source, dict) else None]
    return "\n".join(filter(None, [*filter(lambda text: isinstance(text, str), fields), *map(result_text, inner)]))
