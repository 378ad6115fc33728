"""The tools gpt-oss was trained on, run by the gateway: called, answered and gone on behind in the trained form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.engine.hosting import ANSWER, DOCS, ENCODING, FREE, Servers, Talk, call, calls_of, tool
from tests.engine.scripted import ASKED, IDS, TEXT
from tests.harmony.fold import items_of
from tests.harmony.recoveries import C, F, R
from unisono.core.conversation import FunctionTool, Json
from unisono.core.generation import Capabilities
from unisono.core.tools import HostedTool, ToolOutcome, ToolServer
from unisono.engine.request import GenerationRequest, ServerTools
from unisono.errors import ToolServerUnavailable, UnisonoError

BROWSER = ToolServer("web", "http://127.0.0.1:9/mcp", approval=FREE, builtin="browser")
PYTHON = ToolServer("code", "http://127.0.0.1:9/mcp", approval=FREE, builtin="python")
SHELL = ToolServer("shell", "http://127.0.0.1:9/mcp", approval=FREE, builtin="container")
RUNS = HostedTool("code", "python", "Code is run, and what it prints is told.", {"type": "object"})
OFFERED: Mapping[str, tuple[HostedTool, ...] | UnisonoError] = {
    "web": (tool("web", "find"), tool("web", "open"), tool("web", "search"), tool("web", "click")),
    "code": (RUNS,),
    "shell": (tool("shell", "run"),),
    "docs": (tool("docs", "search"),),
}


def answer(name: str, arguments: Mapping[str, Json]) -> ToolOutcome:
    return ToolOutcome(f"{name} {sorted(arguments.items())}")


def talk(*outputs: str, told: Capabilities = IDS, servers: tuple[ToolServer, ...] = (BROWSER, PYTHON, SHELL)) -> Talk:
    turn = GenerationRequest("m", ASKED, seed="a seed", tenant="team", server_tools=ServerTools(servers))
    return Talk(outputs, Servers(OFFERED, answer), told=told, turn=turn)


def trained(name: str, body: str, channel: str = "analysis") -> str:
    return f"<|channel|>{channel} to={name} code<|message|>{body}<|call|>"


CALLS: dict[str, tuple[str, tuple[str, str, Mapping[str, Json]], str]] = {
    "a search": (
        trained("browser.search", '{"query":"x"}'),
        ("web", "search", {"query": "x"}),
        "<|start|>browser.search to=assistant<|channel|>analysis<|message|>search [('query', 'x')]<|end|>",
    ),
    "code": (
        trained("python", "print('a')\n"),
        ("code", "python", {"code": "print('a')\n"}),
        "<|start|>python to=assistant<|channel|>analysis<|message|>python [('code', \"print('a')\\n\")]<|end|>",
    ),
    "code on commentary": (
        trained("python", "1", "commentary"),
        ("code", "python", {"code": "1"}),
        "<|start|>python to=assistant<|channel|>commentary<|message|>python [('code', '1')]<|end|>",
    ),
    "code that is a JSON object": (
        trained("python", '{"a": 1}'),
        ("code", "python", {"code": '{"a": 1}'}),
        "<|start|>python to=assistant<|channel|>analysis<|message|>python [('code', '{\"a\": 1}')]<|end|>",
    ),
    "code wrapped as for a function": (
        trained("python", '{"code": "1"}'),
        ("code", "python", {"code": "1"}),
        "<|start|>python to=assistant<|channel|>analysis<|message|>python [('code', '1')]<|end|>",
    ),
    "a server's only tool": (
        trained("container.exec", '{"cmd":["ls"]}'),
        ("shell", "run", {"cmd": ["ls"]}),
        "<|start|>container.exec to=assistant<|channel|>analysis<|message|>run [('cmd', ['ls'])]<|end|>",
    ),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
async def test_a_trained_tool_is_run_and_answers_in_the_trained_form(case: str, told: Capabilities) -> None:
    output, made, result = CALLS[case]
    asked = talk(output, ANSWER, told=told)
    events, report = await asked.events()
    assert asked.host.made == [made]
    assert items_of(events) == (R("Now."), F("It is so."))
    assert [rule for rule in report.recoveries if rule != "restored-stop"] == []
    first, second = (list(base.prompt.tokens) for base in asked.bases)
    goes_on = ENCODING.encode_marked(result + "<|start|>assistant")
    assert second == [*first, *ENCODING.encode_as_server(output), *goes_on]


async def test_the_system_message_declares_what_servers_have() -> None:
    asked = talk(ANSWER)
    await asked.events()
    text = ENCODING.decode(asked.bases[0].prompt.tokens)
    system, *rest = text.split("<|end|>")
    assert [part for part in ("## browser", "## container", "## python") if part in system] == [
        "## browser",
        "## container",
        "## python",
    ]
    assert "Code is run, and what it prints is told." in system
    assert "Jupyter" not in system
    assert "click" not in text
    assert "namespace functions" not in system
    assert not any("python" in part or "browser" in part for part in rest)


async def test_every_step_begins_behind_all_that_was_said_before_token_for_token() -> None:
    steps = [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + trained("browser.search", '{"query": "x"}'),
        trained("browser.open", '{"id": 0}'),
        trained("python", "print(1)"),
        ANSWER,
    ]
    asked = talk(*steps)
    events, _ = await asked.events()
    assert [made[1] for made in asked.host.made] == ["search", "open", "python"]
    prompts = [list(base.prompt.tokens) for base in asked.bases]
    for step, (before, after) in enumerate(itertools.pairwise(prompts)):
        said = [*before, *ENCODING.encode_as_server(steps[step])]
        assert after[: len(said)] == said
    assert items_of(events) == (R("Hm."), R("Now."), F("It is so."))


FAULTS = {
    "a function there is not": (trained("browser.click", "{}"), "web", "unknown-tool", "browser.find, browser.open"),
    "no JSON": (trained("browser.search", "x"), "web", "bad-tool-arguments", "not a JSON object"),
}


@pytest.mark.parametrize("case", FAULTS)
async def test_what_a_call_does_wrong_is_told_to_the_model(case: str) -> None:
    output, server, rule, words = FAULTS[case]
    asked = talk(output, ANSWER)
    events, report = await asked.events()
    assert asked.host.made == []
    [(place, _, said)] = calls_of(events)
    assert place == server
    assert words in said
    assert report.recoveries == [rule]


async def test_what_no_server_stands_for_is_thought() -> None:
    asked = talk(trained("browser.search", "{}"), "It is so.<|return|>", servers=(PYTHON,))
    events, report = await asked.events()
    assert asked.host.made == []
    assert items_of(events) == (R("{}"), F("It is so."))
    assert report.recoveries == ["analysis-only"]


async def test_a_server_that_does_not_answer_is_done_without_and_the_report_says_so() -> None:
    asked = talk(ANSWER, servers=(BROWSER, PYTHON))
    asked.host.offered = {**OFFERED, "web": ToolServerUnavailable("gone")}
    _, report = await asked.events()
    text = ENCODING.decode(asked.bases[0].prompt.tokens)
    assert "## python" in text
    assert "## browser" not in text
    assert report.recoveries == ["tool-left-out"]


async def test_other_hosted_tools_are_functions_beside_trained_ones() -> None:
    asked = talk(trained("browser.search", "{}"), call("docs__search"), ANSWER, servers=(BROWSER, DOCS))
    events, _ = await asked.events()
    assert [made[:2] for made in asked.host.made] == [("web", "search"), ("docs", "search")]
    assert "type docs__search" in ENCODING.decode(asked.bases[0].prompt.tokens)
    assert calls_of(events)[1][0] == "docs"


async def test_a_client_with_a_function_of_that_name_keeps_it() -> None:
    mine = FunctionTool("python", "Mine.", {"type": "object", "properties": {}})
    asked = talk("<|channel|>commentary to=functions.python <|constrain|>json<|message|>{}<|call|>", servers=(PYTHON,))
    preamble = replace(ASKED.preamble, tools=(mine,))
    asked = replace(asked, turn=replace(asked.turn, conversation=replace(ASKED, preamble=preamble)))
    events, _ = await asked.events()
    assert asked.host.made == []
    assert items_of(events) == (C("python", "{}"),)
    text = ENCODING.decode(asked.bases[0].prompt.tokens)
    assert "## python" not in text
    assert "type python__python" in text


@pytest.mark.parametrize("per_chunk", [2, 1000])
async def test_a_run_that_is_taken_over_anywhere_calls_once_and_says_the_same(per_chunk: int) -> None:
    steps = (trained("browser.search", '{"query": "x"}'), trained("python", "print(1)"), ANSWER)
    whole = replace(talk(*steps), per_chunk=per_chunk)
    batches, _ = await whole.batches()
    expected = [event for batch in batches for event in batch]
    for cut in range(1, len(batches)):
        again = replace(talk(*steps), per_chunk=per_chunk)
        shown, report = await again.batches(cut=cut)
        made = len(again.host.made)
        taken, _ = await again.batches(report.journal)
        assert items_of([event for batch in taken for event in batch]) == items_of(expected)
        assert len(taken[0]) >= len([event for batch in shown for event in batch]) or not shown
        assert len(again.host.made) <= max(made, 2)
