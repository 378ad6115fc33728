"""Built-in tools of gpt-oss run by the gateway: calls and results in the trained format."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.engine.hosting import ANSWER, DOCS, ENCODING, FREE, Servers, Talk, call, calls_of, tool
from tests.engine.scripted import CONVERSATION, IDS, TEXT
from tests.harmony.fold import items_of
from tests.harmony.recoveries import C, F, R
from unisono.core.conversation import FunctionTool, Json
from unisono.core.events import Closed, HostedCall, join_deltas
from unisono.core.generation import Capabilities
from unisono.core.tool_host import HostedTool, ToolOutcome, ToolServer
from unisono.engine.request import GenerationRequest, RequestOrigin, Resumption, ServerTools
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


def talk(
    *outputs: str, capabilities: Capabilities = IDS, servers: tuple[ToolServer, ...] = (BROWSER, PYTHON, SHELL)
) -> Talk:
    request = GenerationRequest(
        "m",
        CONVERSATION,
        server_tools=ServerTools(servers),
        resumption=Resumption(seed="a seed"),
        origin=RequestOrigin(tenant="team"),
    )
    return Talk(outputs, Servers(OFFERED, answer), caps=capabilities, turn=request)


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
    "code on the commentary channel": (
        trained("python", "1", "commentary"),
        ("code", "python", {"code": "1"}),
        "<|start|>python to=assistant<|channel|>commentary<|message|>python [('code', '1')]<|end|>",
    ),
    "code that is a JSON object": (
        trained("python", '{"a": 1}'),
        ("code", "python", {"code": '{"a": 1}'}),
        "<|start|>python to=assistant<|channel|>analysis<|message|>python [('code', '{\"a\": 1}')]<|end|>",
    ),
    "code in a JSON object with the key code": (
        trained("python", '{"code": "1"}'),
        ("code", "python", {"code": "1"}),
        "<|start|>python to=assistant<|channel|>analysis<|message|>python [('code', '1')]<|end|>",
    ),
    "only tool of a server": (
        trained("container.exec", '{"cmd":["ls"]}'),
        ("shell", "run", {"cmd": ["ls"]}),
        "<|start|>container.exec to=assistant<|channel|>analysis<|message|>run [('cmd', ['ls'])]<|end|>",
    ),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
async def test_a_builtin_tool_result_is_rendered_in_the_trained_format(case: str, capabilities: Capabilities) -> None:
    output, made, result = CALLS[case]
    exchange = talk(output, ANSWER, capabilities=capabilities)
    events, report = await exchange.events()
    assert exchange.host.made == [made]
    assert items_of(events) == (R("Now."), F("It is so."))
    assert [rule for rule in report.recoveries if rule != "restored-stop"] == []
    first, second = (list(base.prompt.tokens) for base in exchange.bases)
    result_and_start = ENCODING.encode_marked(result + "<|start|>assistant")
    assert second == [*first, *ENCODING.encode_as_server(output), *result_and_start]


async def test_the_system_message_declares_the_tools_of_the_servers() -> None:
    exchange = talk(ANSWER)
    await exchange.events()
    text = ENCODING.decode(exchange.bases[0].prompt.tokens)
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


async def test_each_prompt_extends_the_exact_tokens_of_earlier_steps() -> None:
    steps = [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + trained("browser.search", '{"query": "x"}'),
        trained("browser.open", '{"id": 0}'),
        trained("python", "print(1)"),
        ANSWER,
    ]
    exchange = talk(*steps)
    events, _ = await exchange.events()
    assert [made[1] for made in exchange.host.made] == ["search", "open", "python"]
    prompts = [list(base.prompt.tokens) for base in exchange.bases]
    for step, (before, after) in enumerate(itertools.pairwise(prompts)):
        previous = [*before, *ENCODING.encode_as_server(steps[step])]
        assert after[: len(previous)] == previous
    assert items_of(events) == (R("Hm."), R("Now."), F("It is so."))


FAULTS = {
    "unknown function": (trained("browser.click", "{}"), "web", "unknown-tool", "browser.find, browser.open"),
    "invalid JSON": (trained("browser.search", "x"), "web", "bad-tool-arguments", "not a JSON object"),
}


@pytest.mark.parametrize("case", FAULTS)
async def test_the_model_reads_an_error_result_for_an_invalid_call(case: str) -> None:
    output, server, rule, words = FAULTS[case]
    exchange = talk(output, ANSWER)
    events, report = await exchange.events()
    assert exchange.host.made == []
    [(called_server, _, error)] = calls_of(events)
    assert called_server == server
    assert words in error
    assert report.recoveries == [rule]


async def test_a_call_without_a_server_is_emitted_as_reasoning() -> None:
    exchange = talk(trained("browser.search", "{}"), "It is so.<|return|>", servers=(PYTHON,))
    events, report = await exchange.events()
    assert exchange.host.made == []
    assert items_of(events) == (R("{}"), F("It is so."))
    assert report.recoveries == ["analysis-only"]


async def test_an_unavailable_server_is_left_out_and_reported() -> None:
    exchange = talk(ANSWER, servers=(BROWSER, PYTHON))
    exchange.host.offered = {**OFFERED, "web": ToolServerUnavailable("gone")}
    _, report = await exchange.events()
    text = ENCODING.decode(exchange.bases[0].prompt.tokens)
    assert "## python" in text
    assert "## browser" not in text
    assert report.recoveries == ["tool-left-out"]


async def test_other_server_tools_are_declared_as_functions() -> None:
    exchange = talk(trained("browser.search", "{}"), call("docs__search"), ANSWER, servers=(BROWSER, DOCS))
    events, _ = await exchange.events()
    assert [made[:2] for made in exchange.host.made] == [("web", "search"), ("docs", "search")]
    assert "type docs__search" in ENCODING.decode(exchange.bases[0].prompt.tokens)
    assert calls_of(events)[1][0] == "docs"


async def test_a_client_function_takes_precedence_over_a_builtin_tool() -> None:
    mine = FunctionTool("python", "Mine.", {"type": "object", "properties": {}})
    exchange = talk(
        "<|channel|>commentary to=functions.python <|constrain|>json<|message|>{}<|call|>", servers=(PYTHON,)
    )
    preamble = replace(CONVERSATION.preamble, tools=(mine,))
    exchange = replace(exchange, turn=replace(exchange.turn, conversation=replace(CONVERSATION, preamble=preamble)))
    events, _ = await exchange.events()
    assert exchange.host.made == []
    assert items_of(events) == (C("python", "{}"),)
    text = ENCODING.decode(exchange.bases[0].prompt.tokens)
    assert "## python" not in text
    assert "type python__python" in text


@pytest.mark.parametrize("per_chunk", [2, 1000])
async def test_a_resumed_run_emits_the_same_items(per_chunk: int) -> None:
    steps = (trained("browser.search", '{"query": "x"}'), trained("python", "print(1)"), ANSWER)
    whole = replace(talk(*steps), per_chunk=per_chunk)
    batches, _ = await whole.batches()
    expected = [event for batch in batches for event in batch]
    for cut in range(1, len(batches)):
        again = replace(talk(*steps), per_chunk=per_chunk)
        emitted, report = await again.batches(cut=cut)
        resumed, rest_report = await again.batches(report.journal)
        # The first batch repeats all events from before the interruption.
        assert join_deltas(resumed[0]) == join_deltas([event for batch in emitted for event in batch])
        events = [event for batch in resumed for event in batch]
        assert items_of(events) == items_of(expected)
        # A call without a result may have run before the interruption, so it is not run again.
        last = resumed[0][-1]
        is_interrupted = isinstance(last, Closed) and isinstance(last.item, HostedCall)
        assert rest_report.recoveries == ["call-not-repeated"] * is_interrupted
        ran = [name for _, name, _ in again.host.made]
        if is_interrupted:
            assert ran in (["search"], ["python"])
        else:
            assert ran == ["search", "python"]
            assert calls_of(events) == calls_of(expected)
