"""Search for deferred tools, run by the gateway: by words (BM25) or by a regular expression.

The same search always finds the same tools. It reads the name, the description and the arguments of each tool, and the
description of the tool's namespace or server.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any, Final

from unisono.core.conversation import FunctionTool, Json
from unisono.core.frozen import dataclass
from unisono.core.tool_host import FOUND, FOUND_ON, SEARCH_LABEL, HostedTool, ToolOutcome, ToolSearch
from unisono.engine.request import ServerTools
from unisono.schemas.patterns import BadPattern, Expression

MAX_FOUND: Final = 5
MAX_TOOL_CHARACTERS: Final = 4_000
MAX_NAMESPACES: Final = 50
# Maximum words of a query. The time of a search grows with them, and a search continues if the client disconnects.
MAX_QUERY_WORDS: Final = 64
# Maximum steps of matching a regular expression with all tools. A step takes about a microsecond.
MAX_STEPS: Final = 200_000
# Usual parameters of BM25: the weight of repeated words, and of the length of the text.
_REPETITION, _LENGTH = 1.2, 0.75
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+")

QUERY: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tools should do, in a few words."}},
    "required": ["query"],
}
PATTERN: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {
        "pattern": {
            "type": "string",
            "description": "Regular expression for a part of the name, the description or the arguments, such as "
            "`weather|forecast` or `(?i)get_.*_data`.",
        }
    },
    "required": ["pattern"],
}
NOTHING_FOUND: Final = "No tool was found. Search in other words, or answer without."


def found_text(names: Sequence[str]) -> str:
    """Return the text of a search result. The declarations of the found tools follow this text."""
    # Clients send back only the names. The text therefore contains nothing else that could change the prompt.
    return f"Found: {', '.join(names)}" if names else NOTHING_FOUND


def search_by_words(tools: Sequence[FunctionTool], arguments: Mapping[str, Json]) -> ToolOutcome:
    """Return the tools that best match the words in `arguments`."""
    # All arguments are read, because models also use the names `keywords`, or `paths` as in OpenAI's own search.
    words = dict.fromkeys(word for value in arguments.values() for word in _words(_joined(value)))
    wanted = [*words][:MAX_QUERY_WORDS]
    texts = [Counter(_words(_text(tool))) for tool in tools]
    average = sum(map(Counter.total, texts)) / max(len(texts), 1) or 1.0
    weights = {word: _weight(sum(word in text for text in texts), len(texts)) for word in wanted}

    def score(text: Counter[str]) -> float:
        length = 1 - _LENGTH + _LENGTH * text.total() / average
        return sum(
            weight * text[word] * (_REPETITION + 1) / (text[word] + _REPETITION * length)
            for word, weight in weights.items()
        )

    scores = [score(text) for text in texts]
    best = sorted((place for place, value in enumerate(scores) if value > 0), key=lambda place: (-scores[place], place))
    # The tools are returned in the order of their declaration, in which clients send them back.
    return _found(tools[place] for place in sorted(best[:MAX_FOUND]))


def search_by_pattern(tools: Sequence[FunctionTool], arguments: Mapping[str, Json]) -> ToolOutcome:
    """Return the first tools whose text matches the pattern in `arguments`, or an error."""
    # Anthropic's documents name the argument `pattern` in some places and `query` in others.
    pattern = arguments.get("pattern", arguments.get("query"))
    if not isinstance(pattern, str):
        return _bad("'pattern' must be a string.")
    try:
        expression = Expression(pattern)
    except BadPattern as error:
        return _bad(f"'pattern' cannot be used: {error}.")
    texts = [_text(tool) for tool in tools]
    if sum(map(expression.steps, texts)) > MAX_STEPS:
        return _bad("'pattern' is too complex.")
    return _found([tool for tool, text in zip(tools, texts, strict=True) if expression.found(text)][:MAX_FOUND])


def _joined(value: Json) -> str:
    """Return the text in an argument: a string, or the strings of a list joined by blanks."""
    if isinstance(value, list):
        return " ".join(each for each in value if isinstance(each, str))
    return value if isinstance(value, str) else ""


def _weight(with_word: int, total: int) -> float:
    return log(1 + (total - with_word + 0.5) / (with_word + 0.5))


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without plural `s`. Names are split into words."""
    words = (word.lower() for word in _WORD.findall(text))
    return [word.removesuffix("s") if len(word) > 3 else word for word in words]


def _text(tool: FunctionTool) -> str:
    parameters: Any = tool.parameters or {}
    fields = parameters.get("properties")
    named = [
        f"{name} {field.get('description') or ''}" if isinstance(field, dict) else str(name)
        for name, field in (fields.items() if isinstance(fields, dict) else ())
    ]
    return "\n".join([tool.name, tool.description, *named, tool.namespace_description])[:MAX_TOOL_CHARACTERS]


def _found(tools: Iterable[FunctionTool]) -> ToolOutcome:
    names = [tool.name for tool in tools]
    return ToolOutcome(found_text(names), structured={FOUND: [*names]})


def _bad(text: str) -> ToolOutcome:
    return ToolOutcome(text, is_error=True)


def found_on_servers(outcome: ToolOutcome) -> dict[str, tuple[str, str]]:
    """Return the server label, and the name on this server, of each found tool, by model name."""
    structured = outcome.structured
    places = structured.get(FOUND_ON) if isinstance(structured, dict) else None
    if not isinstance(places, dict):
        return {}
    return {name: (str(place[0]), str(place[1])) for name, place in places.items() if isinstance(place, list)}


@dataclass(frozen=True, slots=True)
class SearchMethod:
    """Method of a search, and the arguments that the model writes for it."""

    parameters: dict[str, Json]
    run: Callable[[Sequence[FunctionTool], Mapping[str, Json]], ToolOutcome]


BY_WORDS: Final = SearchMethod(QUERY, search_by_words)
BY_PATTERN: Final = SearchMethod(PATTERN, search_by_pattern)


def tool_search(
    name: str, method: SearchMethod, deferred: Sequence[FunctionTool], namespaces: Mapping[str, str] | None = None
) -> ToolSearch:
    """Return the search for deferred tools.

    `namespaces` maps the names of namespaces and servers to their descriptions, which the model reads.
    """
    namespaces = namespaces or {}
    about = [f"{space}: {' '.join(text.split())}" if text else space for space, text in namespaces.items()]
    description = "Search for more tools. Tools that are found can be called afterwards."
    if about:
        description += " There are tools of:\n" + "\n".join(about[:MAX_NAMESPACES])
    tools = tuple(deferred)
    tool = HostedTool(SEARCH_LABEL, name, description, method.parameters)

    def run(arguments: Mapping[str, Json], served: Sequence[FunctionTool]) -> ToolOutcome:
        # The model may search for words from the description of a server, as from that of a namespace.
        known = (replace(each, namespace_description=namespaces.get(each.server, "")) for each in served)
        return method.run((*tools, *known), arguments)

    return ToolSearch(tool, run)


def with_search(server_tools: ServerTools, search: ToolSearch) -> ServerTools:
    """Add a search to the server tools. The client sees the search's calls, but no tool list."""
    label = frozenset({SEARCH_LABEL})
    return replace(
        server_tools,
        servers=(*server_tools.servers, search.server),
        announced=server_tools.announced | label,
        visible=server_tools.visible | label,
        search=search,
    )
