"""Output items of builtin tools: citations, live and replayed events, and tool servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.api.responses.folding import fold, parsed
from unisono.api.gateway_tools import builtin_for, builtin_of, to_builtin_servers
from unisono.api.responses.outbound.citations import Citations, CitedPages
from unisono.api.responses.outbound.dialects import OPEN_RESPONSES, OPENAI, Dialect
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.response import ResponseFrame
from unisono.api.responses.outbound.stored_stream import replay_events
from unisono.core.conversation import AssistantCall, Json, Phase, ToolResult
from unisono.core.events import Closed, Delta, Event, Finished, HostedCall, Opened, Ran, Text
from unisono.core.generation import FinishReason, Usage
from unisono.core.server_tool_arguments import read_arguments
from unisono.core.tool_approvals import Approval, ToolFilter
from unisono.core.tool_host import Command, ToolOutcome, ToolServer, ToolTransport
from unisono.engine.request import GenerationReport

VIEW = "[3] Paris (https://a.example/paris)\n**viewing lines [0 - 2] of 9**\n\nL0: \nL1: URL: \nL2: Capital."
FIND_RESULT = (
    "[4] Find results for text: `x` in `Paris` (https://a.example/paris/find?pattern=x)\n"
    "**viewing lines [0 - 1] of 1**\n\nL0: # 【0†match at L2】\nL1: x"
)
# The header has the decoded address, which is not the address of the page.
SPACED = [
    (
        "[10] error 42 (file:///error 42 (1).txt)\n**viewing lines [0 - 1] of 1**\n\nL1: x",
        "file:///error%2042%20(1).txt",
    ),
    ("[11] b (file:///a%26b.txt)\n**viewing lines [0 - 1] of 1**\n\nL1: x", "file:///a%2526b.txt"),
    ("[12] c (file:///c d.txt)\n**viewing lines [0 - 1] of 1**\n\nL1: x", ""),
]
QUERY = "[13] disk (full)\n**viewing lines [0 - 1] of 1**\n\nL1: x"
RESULTS = (
    "[5] query\n**viewing lines [0 - 6] of 6**\n\nL2: # Search Results\nL3: \n"
    "L4:   * 【0†One†a.example】 snippet\nL5: more of it\nL6:   * 【1†Two†b.example】 snippet"
)
RESULTS_FACTS: Json = {
    "cursor": 5,
    "url": "",
    "title": "query",
    "results": [
        {"id": 0, "url": "https://a.example/1", "title": "One"},
        {"id": 1, "url": "https://b.example/2", "title": "Two"},
    ],
}


def cited_pages() -> CitedPages:
    pages = CitedPages(
        [(VIEW, ""), (FIND_RESULT, ""), ("Error: nothing", ""), ("[9] no view", ""), *SPACED, (QUERY, "")]
    )
    pages.add_result(RESULTS, RESULTS_FACTS)
    return pages


CITATIONS: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "a line": ("So【3†L2】.", [("【3†L2】", "https://a.example/paris", "Paris")]),
    "lines": ("【3†L2-L9】", [("【3†L2-L9】", "https://a.example/paris", "Paris")]),
    "lines, short form": ("【3†L2-9】", [("【3†L2-9】", "https://a.example/paris", "Paris")]),
    "a find result": ("【4†L1】", [("【4†L1】", "https://a.example/paris", "Paris")]),
    "a search result": ("【5†L4】", [("【5†L4】", "https://a.example/1", "One")]),
    "below a search result": ("【5†L5】", [("【5†L5】", "https://a.example/1", "One")]),
    "another search result": ("【5†L6-L7】", [("【5†L6-L7】", "https://b.example/2", "Two")]),
    "above the results": ("【5†L1】", []),
    "two in a row": (
        "a【3†L1】【5†L6】",
        [("【3†L1】", "https://a.example/paris", "Paris"), ("【5†L6】", "https://b.example/2", "Two")],
    ),
    "an unknown page": ("【8†L1】", []),
    "a page without a view header": ("【9†L1】", []),
    "a bracket before the citation": ("【【3†L1】", [("【3†L1】", "https://a.example/paris", "Paris")]),
    "an unclosed citation": ("【3†L1 and so on", []),
    "an address with spaces": ("【10†L1】", [("【10†L1】", "file:///error%2042%20(1).txt", "error 42")]),
    "an address with an encoded %": ("【11†L1】", [("【11†L1】", "file:///a%2526b.txt", "b")]),
    "an unknown address": ("【12†L1】", []),
    "a query with brackets": ("【13†L1】", []),
    "no citation": ("【note】 3†L1", []),
    "a huge page number": ("【" + "9" * 40 + "†L1】", []),
}


@pytest.mark.parametrize("case", CITATIONS)
def test_citations_are_found_in_chunks_of_any_size(case: str) -> None:
    text, expected = CITATIONS[case]
    for size in range(1, len(text) + 1):
        citations = Citations(cited_pages())
        notes = [note for start in range(0, len(text), size) for note in citations.feed(text[start : start + size])]
        assert [
            (text[note["start_index"] : note["end_index"]], note["url"], note["title"]) for note in notes
        ] == expected


def test_unclosed_brackets_are_not_buffered() -> None:
    citations = Citations(cited_pages())
    assert citations.feed("【" * 100_000) == []
    assert citations.feed("x" * 1000) == []
    [note] = citations.feed("【3†L1】")
    assert note["start_index"] == 101_000


# -- events of items


def builtin_call(index: int, name: str, tool: str, builtin: str) -> HostedCall:
    return HostedCall(index, f"call_{index}", name, f"builtin:{builtin}", tool)


def call_events(item: HostedCall, arguments: str, outcome: ToolOutcome) -> list[Event]:
    tokens = (1, 2, 3)
    item = replace(item, arguments=read_arguments(item.name, arguments))
    return [Opened(item), Delta(item, arguments), Closed(item, arguments, tokens), Ran(item, outcome, outcome.text)]


def message_events(index: int, *texts: str) -> list[Event]:
    item = Text(index, Phase.FINAL)
    return [Opened(item), *(Delta(item, text) for text in texts), Closed(item, "".join(texts), (4,))]


FACTS: Json = {"cursor": 3, "url": "https://a.example/paris", "title": "Paris"}
LISTED = ToolOutcome(RESULTS, structured=RESULTS_FACTS)
BATCHES: list[list[Event]] = [
    call_events(
        builtin_call(0, "browser.search", "search", "browser"),
        '{"query":"x"}',
        ToolOutcome(RESULTS, structured=RESULTS_FACTS),
    ),
    call_events(builtin_call(1, "browser.open", "open", "browser"), '{"id":0}', ToolOutcome(VIEW, structured=FACTS)),
    call_events(
        builtin_call(2, "browser.find", "find", "browser"), '{"pattern":"x"}', ToolOutcome("nothing", is_error=True)
    ),
    call_events(builtin_call(3, "python", "python", "python"), "print(1)", ToolOutcome("1\n")),
    call_events(builtin_call(4, "container.exec", "exec", "container"), '{"cmd":["ls"]}', ToolOutcome("a")),
    [*message_events(5, "So【3†", "L2】.", " And【5†L6】"), Finished(FinishReason.STOP, Usage())],
]


def numbered() -> Callable[[str], str]:
    """Return a function that numbers ids from 0."""
    numbers = iter(range(1000))
    return lambda prefix: f"{prefix}{next(numbers)}"


def write_events(
    dialect: Dialect = OPENAI, *include: str, batches: list[list[Event]] = BATCHES
) -> tuple[list[Any], ResponseEvents]:
    frame = ResponseFrame("resp_1", 1, "m", {"tools": []}, dialect=dialect, include=frozenset(include))
    events = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
    wire = [event for batch in batches for event in events.write(batch)]
    wire.append(events.last())
    return parsed(wire), events


@pytest.mark.parametrize("dialect", [OPENAI, OPEN_RESPONSES], ids=["openai", "open-responses"])
def test_live_and_replayed_streams_equal_the_stored_response(dialect: Dialect) -> None:
    wire, events = write_events(dialect)
    folded = fold(wire)
    assert events.stored is not None
    assert folded.output == [dialect.item(item.wire) for item in events.stored.output]
    replayed = parsed(replay_events(events.stored, dialect))
    assert fold(replayed).output == folded.output
    steps = [event["type"] for event in wire if "delta" not in event]
    assert [event["type"] for event in replayed if "delta" not in event] == steps


def test_items_describe_the_actions_of_builtin_tools() -> None:
    _, events = write_events()
    assert events.stored is not None
    search, open_page, find, run, command, message = (dict(item.wire) for item in events.stored.output)
    assert search["action"] == {"type": "search", "query": "x", "queries": ["x"]}
    assert open_page["action"] == {"type": "open_page", "url": "https://a.example/paris"}
    assert find["action"] == {"type": "find_in_page", "url": "https://a.example/paris", "pattern": "x"}
    assert (find["status"], search["status"]) == ("failed", "completed")
    assert (run["code"], run["outputs"], run["container_id"]) == ("print(1)", None, "cntr_1")
    assert (command["type"], command["server_label"], command["name"]) == ("mcp_call", "container", "exec")
    content: Any = message["content"]
    assert [note["url"] for note in content[0]["annotations"]] == ["https://a.example/paris", "https://b.example/2"]
    call, result = events.stored.output[3].meaning
    assert call == AssistantCall("call_3", "python", "print(1)", (1, 2, 3))
    assert result == ToolResult("call_3", "python", "1\n")


def test_the_added_event_of_an_opened_link_has_its_url() -> None:
    wire, _ = write_events()
    added_items = [event["item"] for event in wire if event["type"] == "response.output_item.added"]
    assert added_items[1]["action"] == {"type": "open_page", "url": "https://a.example/1"}


def test_sources_and_outputs_are_included_on_request() -> None:
    _, events = write_events(OPENAI, "web_search_call.action.sources", "code_interpreter_call.outputs")
    assert events.stored is not None
    search: Any = events.stored.output[0].wire
    run: Any = events.stored.output[3].wire
    assert search["action"]["sources"] == [
        {"type": "url", "url": "https://a.example/1"},
        {"type": "url", "url": "https://b.example/2"},
    ]
    assert run["outputs"] == [{"type": "logs", "logs": "1\n"}]


def test_resumed_events_continue_with_the_same_numbers() -> None:
    complete, _ = write_events()
    for cut in range(1, len(BATCHES)):
        frame = ResponseFrame("resp_1", 1, "m", {"tools": []})
        before = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
        count = sum(len(before.write(batch)) for batch in BATCHES[:cut])
        after = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
        after.resume([event for batch in BATCHES[:cut] for event in batch], count)
        rest = [event for batch in BATCHES[cut:] for event in after.write(batch)]
        assert parsed([*rest, after.last()]) == complete[count:]


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_cancelled_call_is_incomplete(cut: int) -> None:
    frame = ResponseFrame("resp_1", 1, "m", {"tools": []})
    events = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
    batch = BATCHES[3][:cut]
    wire = [*events.write(batch), *events.cancel(), events.last()]
    [*items] = fold(parsed(wire)).output
    assert [item["status"] for item in items] == (["incomplete"] if cut == 3 else [])


# -- tool servers

PAGES = ToolServer("pages", "http://127.0.0.1:9/mcp", configured=True)
LOCAL_PYTHON = ToolServer(
    "here", command=Command(("x",)), transport=ToolTransport.STDIO, approval=Approval(always=ToolFilter())
)


def test_each_builtin_tool_has_one_server_and_its_own_approval_policy() -> None:
    kinds = ["web_search", "function", "web_search_preview", "code_interpreter", "container"]
    browser, python = to_builtin_servers(
        map(builtin_for, kinds), {"browser": PAGES, "python": LOCAL_PYTHON}, owner="ann", session="ann\0talk"
    )
    assert (browser.builtin, browser.url, browser.owner) == ("browser", PAGES.url, "ann\0talk")
    assert browser.approval == Approval(otherwise=False)
    assert (python.builtin, python.owner, python.approval) == ("python", "ann", LOCAL_PYTHON.approval)
    assert [builtin_of(server.label) for server in (browser, python, PAGES)] == ["browser", "python", ""]


OTHER_TYPES = ("function", "mcp", "web_search_2025", "websearch", "file_search", "code_interpreter_2", "")


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_other_tool_types_are_not_builtin(kind: str) -> None:
    assert builtin_for(kind) == ""
