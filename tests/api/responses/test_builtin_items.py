"""Searches and runs of code as items: what a citation stands for, lives told once and again, and what a request's tool
is to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.api.responses.folding import fold, parsed
from unisono.api.builtin_tools import builtin_for, builtin_of, to_builtin_servers
from unisono.api.responses.outbound.citations import Citations, CitedPages
from unisono.api.responses.outbound.dialects import OPEN_RESPONSES, OPENAI, Dialect
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.response import ResponseFrame
from unisono.api.responses.outbound.stored_stream import replay_events
from unisono.core.conversation import AssistantCall, Json, Phase, ToolResult
from unisono.core.events import Closed, Delta, Event, Finished, HostedCall, Opened, Ran, Text
from unisono.core.generation import FinishReason, Usage
from unisono.core.tool_arguments import read_arguments
from unisono.core.tools import Approval, Command, ToolFilter, ToolOutcome, ToolServer, ToolTransport
from unisono.engine.request import GenerationReport

VIEW = "[3] Paris (https://a.example/paris)\n**viewing lines [0 - 2] of 9**\n\nL0: \nL1: URL: \nL2: Capital."
FOUND = (
    "[4] Find results for text: `x` in `Paris` (https://a.example/paris/find?pattern=x)\n"
    "**viewing lines [0 - 1] of 1**\n\nL0: # 【0†match at L2】\nL1: x"
)
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


def seen() -> CitedPages:
    pages = CitedPages([VIEW, FOUND, "Error: nothing", "[9] no view"])
    pages.add_result(RESULTS, RESULTS_FACTS)
    return pages


CITED: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "a line": ("So【3†L2】.", [("【3†L2】", "https://a.example/paris", "Paris")]),
    "lines": ("【3†L2-L9】", [("【3†L2-L9】", "https://a.example/paris", "Paris")]),
    "lines, the short way": ("【3†L2-9】", [("【3†L2-9】", "https://a.example/paris", "Paris")]),
    "a place that was found": ("【4†L1】", [("【4†L1】", "https://a.example/paris", "Paris")]),
    "a search result": ("【5†L4】", [("【5†L4】", "https://a.example/1", "One")]),
    "below a search result": ("【5†L5】", [("【5†L5】", "https://a.example/1", "One")]),
    "another search result": ("【5†L6-L7】", [("【5†L6-L7】", "https://b.example/2", "Two")]),
    "above the results": ("【5†L1】", []),
    "two in a row": (
        "a【3†L1】【5†L6】",
        [("【3†L1】", "https://a.example/paris", "Paris"), ("【5†L6】", "https://b.example/2", "Two")],
    ),
    "a page nobody saw": ("【8†L1】", []),
    "no view": ("【9†L1】", []),
    "a bracket before it": ("【【3†L1】", [("【3†L1】", "https://a.example/paris", "Paris")]),
    "never closed": ("【3†L1 and so on", []),
    "no citation": ("【note】 3†L1", []),
    "an enormous number": ("【" + "9" * 40 + "†L1】", []),
}


@pytest.mark.parametrize("case", CITED)
def test_a_citation_is_found_however_the_text_is_cut(case: str) -> None:
    text, expected = CITED[case]
    for size in range(1, len(text) + 1):
        citations = Citations(seen())
        notes = [note for at in range(0, len(text), size) for note in citations.feed(text[at : at + size])]
        assert [
            (text[note["start_index"] : note["end_index"]], note["url"], note["title"]) for note in notes
        ] == expected


def test_brackets_that_never_close_hold_nothing_back() -> None:
    citations = Citations(seen())
    assert citations.feed("【" * 100_000) == []
    assert citations.feed("x" * 1000) == []
    [note] = citations.feed("【3†L1】")
    assert note["start_index"] == 101_000


# -- lives


def hosted(index: int, name: str, tool: str, builtin: str) -> HostedCall:
    return HostedCall(index, f"call_{index}", name, f"builtin:{builtin}", tool)


def made(item: HostedCall, said: str, outcome: ToolOutcome) -> list[Event]:
    tokens = (1, 2, 3)
    item = replace(item, arguments=read_arguments(item.name, said))
    return [Opened(item), Delta(item, said), Closed(item, said, tokens), Ran(item, outcome, outcome.text)]


def answered(index: int, *texts: str) -> list[Event]:
    item = Text(index, Phase.FINAL)
    return [Opened(item), *(Delta(item, text) for text in texts), Closed(item, "".join(texts), (4,))]


FACTS: Json = {"cursor": 3, "url": "https://a.example/paris", "title": "Paris"}
LISTED = ToolOutcome(RESULTS, structured=RESULTS_FACTS)
BATCHES: list[list[Event]] = [
    made(
        hosted(0, "browser.search", "search", "browser"),
        '{"query":"x"}',
        ToolOutcome(RESULTS, structured=RESULTS_FACTS),
    ),
    made(hosted(1, "browser.open", "open", "browser"), '{"id":0}', ToolOutcome(VIEW, structured=FACTS)),
    made(hosted(2, "browser.find", "find", "browser"), '{"pattern":"x"}', ToolOutcome("nothing", is_error=True)),
    made(hosted(3, "python", "python", "python"), "print(1)", ToolOutcome("1\n")),
    made(hosted(4, "container.exec", "exec", "container"), '{"cmd":["ls"]}', ToolOutcome("a")),
    [*answered(5, "So【3†", "L2】.", " And【5†L6】"), Finished(FinishReason.STOP, Usage())],
]


def numbered() -> Callable[[str], str]:
    """Makes ids that are numbered from 0."""
    numbers = iter(range(1000))
    return lambda prefix: f"{prefix}{next(numbers)}"


def told(
    dialect: Dialect = OPENAI, *include: str, batches: list[list[Event]] = BATCHES
) -> tuple[list[Any], ResponseEvents]:
    frame = ResponseFrame("resp_1", 1, "m", {"tools": []}, dialect=dialect, include=frozenset(include))
    events = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
    wire = [event for batch in batches for event in events.write(batch)]
    wire.append(events.last())
    return parsed(wire), events


@pytest.mark.parametrize("dialect", [OPENAI, OPEN_RESPONSES], ids=["openai", "open-responses"])
def test_a_stream_folds_to_what_is_kept(dialect: Dialect) -> None:
    wire, events = told(dialect)
    folded = fold(wire)
    assert events.stored is not None
    assert folded.output == [dialect.item(item.wire) for item in events.stored.output]
    again = parsed(replay_events(events.stored, dialect))
    assert fold(again).output == folded.output
    steps = [event["type"] for event in wire if "delta" not in event]
    assert [event["type"] for event in again if "delta" not in event] == steps


def test_items_say_what_was_done() -> None:
    _, events = told()
    assert events.stored is not None
    search, opened, found, run, command, message = (dict(item.wire) for item in events.stored.output)
    assert search["action"] == {"type": "search", "query": "x", "queries": ["x"]}
    assert opened["action"] == {"type": "open_page", "url": "https://a.example/paris"}
    assert found["action"] == {"type": "find_in_page", "url": "https://a.example/paris", "pattern": "x"}
    assert (found["status"], search["status"]) == ("failed", "completed")
    assert (run["code"], run["outputs"], run["container_id"]) == ("print(1)", None, "cntr_1")
    assert (command["type"], command["server_label"], command["name"]) == ("mcp_call", "container", "exec")
    content: Any = message["content"]
    assert [note["url"] for note in content[0]["annotations"]] == ["https://a.example/paris", "https://b.example/2"]
    call, result = events.stored.output[3].meaning
    assert call == AssistantCall("call_3", "python", "print(1)", (1, 2, 3))
    assert result == ToolResult("call_3", "python", "1\n")


def test_where_a_link_leads_is_told_before_it_is_followed() -> None:
    wire, _ = told()
    added = [event["item"] for event in wire if event["type"] == "response.output_item.added"]
    assert added[1]["action"] == {"type": "open_page", "url": "https://a.example/1"}


def test_sources_and_outputs_are_shown_where_they_are_wanted() -> None:
    _, events = told(OPENAI, "web_search_call.action.sources", "code_interpreter_call.outputs")
    assert events.stored is not None
    search: Any = events.stored.output[0].wire
    run: Any = events.stored.output[3].wire
    assert search["action"]["sources"] == [
        {"type": "url", "url": "https://a.example/1"},
        {"type": "url", "url": "https://b.example/2"},
    ]
    assert run["outputs"] == [{"type": "logs", "logs": "1\n"}]


def test_events_that_somebody_else_began_go_on_with_the_same_numbers() -> None:
    whole, _ = told()
    for cut in range(1, len(BATCHES)):
        frame = ResponseFrame("resp_1", 1, "m", {"tools": []})
        before = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
        count = sum(len(before.write(batch)) for batch in BATCHES[:cut])
        after = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
        after.resume([event for batch in BATCHES[:cut] for event in batch], count)
        rest = [event for batch in BATCHES[cut:] for event in after.write(batch)]
        assert parsed([*rest, after.last()]) == whole[count:]


@pytest.mark.parametrize("cut", range(1, 4))
def test_what_was_broken_off_is_incomplete(cut: int) -> None:
    frame = ResponseFrame("resp_1", 1, "m", {"tools": []})
    events = ResponseEvents(frame, GenerationReport(), new_id=numbered(), clock=lambda: 2.0)
    batch = BATCHES[3][:cut]
    wire = [*events.write(batch), *events.cancel(), events.last()]
    [*items] = fold(parsed(wire)).output
    assert [item["status"] for item in items] == (["incomplete"] if cut == 3 else [])


# -- servers

PAGES = ToolServer("pages", "http://127.0.0.1:9/mcp", configured=True)
HERE = ToolServer(
    "here", command=Command(("x",)), transport=ToolTransport.STDIO, approval=Approval(always=ToolFilter())
)


def test_each_builtin_tool_has_one_server_and_asks_nobody_unless_it_is_said() -> None:
    kinds = ["web_search", "function", "web_search_preview", "code_interpreter", "container"]
    browser, python = to_builtin_servers(
        map(builtin_for, kinds), {"browser": PAGES, "python": HERE}, owner="ann", session="ann\0talk"
    )
    assert (browser.builtin, browser.url, browser.owner) == ("browser", PAGES.url, "ann\0talk")
    assert browser.approval == Approval(otherwise=False)
    assert (python.builtin, python.owner, python.approval) == ("python", "ann", HERE.approval)
    assert [builtin_of(server.label) for server in (browser, python, PAGES)] == ["browser", "python", ""]


NOT_OURS = ("function", "mcp", "web_search_2025", "websearch", "file_search", "code_interpreter_2", "")


@pytest.mark.parametrize("kind", NOT_OURS)
def test_other_kinds_are_none_of_them(kind: str) -> None:
    assert builtin_for(kind) == ""
