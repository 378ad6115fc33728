"""Calls to builtin tools, in the form of OpenAI's items for web search and code execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from unisono.api.gateway_tools import BROWSER, PYTHON, builtin_of
from unisono.api.responses.items import Wire
from unisono.api.responses.outbound.citations import CitedPages
from unisono.core.conversation import Json
from unisono.core.events import HostedCall, Ran

# Action types by browser function.
ACTIONS: Final = {"search": "search", "open": "open_page", "find": "find_in_page"}


@dataclass(slots=True)
class BuiltinCalls:
    """Renderer of the builtin tool calls of one response.

    `sources` and `outputs` are True if the client requested these fields. `container` is the container id of the
    response. `pages` holds the pages that the browser has returned so far.
    """

    sources: bool = False
    outputs: bool = False
    container: str = ""
    pages: CitedPages = field(default_factory=CitedPages)

    def to_wire(self, item: HostedCall, item_id: str, status: str, ran: Ran | None = None) -> Wire:
        """Return the item of a call. `ran` is the result of the call, or None if there is none yet."""
        arguments = item.arguments.members
        if builtin_of(item.server) == BROWSER:
            action = self._action(item.tool, arguments, ran)
            return {"id": item_id, "type": "web_search_call", "status": status, "action": action}
        outputs = [{"type": "logs", "logs": ran.text_for_model}] if ran is not None and self.outputs else None
        return {
            "id": item_id,
            "type": "code_interpreter_call",
            "status": status,
            "code": _text(arguments.get("code")),
            "container_id": self.container,
            "outputs": outputs,
        }

    def _action(self, tool: str, arguments: Mapping[str, Json], ran: Ran | None) -> Wire:
        facts = ran.outcome.structured if ran is not None and isinstance(ran.outcome.structured, dict) else {}
        kind = ACTIONS[tool]
        if kind == "search":
            query = _text(arguments.get("query"))
            action: Wire = {"type": kind, "query": query, "queries": [query]}
            return action | {"sources": _sources(facts)} if self.sources and ran is not None else action
        url = _text(facts.get("url")) or self._address(arguments)
        if kind == "open_page":
            return {"type": kind, "url": url or None}
        return {"type": kind, "url": url, "pattern": _text(arguments.get("pattern"))}

    def _address(self, arguments: Mapping[str, Json]) -> str:
        """Return the address of the page that a call opens, or "" if only its result can tell."""
        link = arguments.get("id", -1)
        if isinstance(link, str):
            return link
        page = self.pages.get(arguments.get("cursor", -1))
        if page is None:
            return ""
        if isinstance(link, int) and link >= 0:
            return page.results.get(link, ("", ""))[0]
        return page.url

    def record_result(self, item: HostedCall, ran: Ran) -> None:
        """Record the result of a call, so that the returned page can be cited."""
        if builtin_of(item.server) == BROWSER and not ran.outcome.is_error:
            self.pages.add_result(ran.text_for_model, ran.outcome.structured)


def is_trained(item: HostedCall) -> bool:
    """Return True for a call to `python` or to an existing function of `browser`."""
    builtin = builtin_of(item.server)
    return builtin == PYTHON or (builtin == BROWSER and item.tool in ACTIONS)


def code_of(item: HostedCall) -> str:
    """Return the streamed part of a call: the code of a code execution, or "" for other calls."""
    if builtin_of(item.server) != PYTHON:
        return ""
    return _text(item.arguments.members.get("code"))


def _sources(facts: Mapping[str, Json]) -> list[Wire]:
    results = facts.get("results")
    found = (result.get("url") for result in (results if isinstance(results, list) else ()) if isinstance(result, dict))
    return [{"type": "url", "url": url} for url in dict.fromkeys(found) if isinstance(url, str) and url]


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
