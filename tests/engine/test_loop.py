"""Tool loop: calls that the gateway runs, and the answer that continues after the results."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.hosting import ANSWER, DOCS, ENCODING, FILES, SEARCH, Servers, Talk, call, calls_of, tool
from tests.engine.scripted import CONVERSATION, IDS, TEXT
from tests.harmony.fold import items_of
from tests.harmony.recoveries import C, F, P, R
from tests.threads import Threads
from unisono.core.conversation import AnswerForm, AssistantCall, FunctionTool, ToolResult, UserMessage
from unisono.core.events import Closed, Event, Finished, HostedCall, Listed, Listing, Opened, Ran, ToolCall
from unisono.core.generation import Capabilities, FinishReason
from unisono.core.tool_host import ToolOutcome
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.interventions.requirements import UNMET_FORM
from unisono.engine.journal import must_be_kept
from unisono.engine.request import ApprovalDecision, ServerTools
from unisono.errors import (
    BackendUnavailable,
    ToolServerNotAllowed,
    ToolServerUnavailable,
    UnisonoError,
    UnsupportedValue,
)


def hosting(talk: Talk, **more: Any) -> Talk:
    """Return the talk with other settings of its server tools."""
    assert talk.turn.server_tools is not None
    return replace(talk, turn=replace(talk.turn, server_tools=replace(talk.turn.server_tools, **more)))


def result_tokens(name: str, text: str) -> list[int]:
    marked = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{text}<|end|>"
    return ENCODING.encode_marked(marked)


# -- single calls


@pytest.mark.parametrize(
    "capabilities", [IDS, replace(IDS, stop_visible=False), TEXT], ids=["ids", "ids, stop hidden", "text"]
)
@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
async def test_a_server_tool_call_runs_and_the_answer_continues(capabilities: Capabilities, per_chunk: int) -> None:
    talk = Talk([SEARCH, ANSWER], caps=capabilities, per_chunk=per_chunk)
    events, report = await talk.events()
    assert talk.host.made == [("docs", "search", {"q": "one"})]
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert items_of(events) == (R("I look."), R("Now."), F("It is so."))
    assert [rule for rule in report.recoveries if rule != "restored-stop"] == []
    first, second = (list(base.prompt.tokens) for base in talk.bases)
    result = result_tokens("docs__search", "search of one")
    assert second == [
        *first,
        *ENCODING.encode_as_server(SEARCH),
        *result,
        *ENCODING.encode_marked("<|start|>assistant"),
    ]


async def test_each_prompt_extends_the_exact_tokens_of_earlier_steps() -> None:
    steps = [
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + SEARCH,
        "<|channel|>final<|message|>Well<|end|><|start|>assistant"
        + call("docs__fetch", '{ "q" : "two"}', thought="Ah"),
        ANSWER,
    ]
    talk = Talk(steps)
    events, _ = await talk.events()
    prompts = [list(base.prompt.tokens) for base in talk.bases]
    for step, (before, after) in enumerate(itertools.pairwise(prompts)):
        previous = [*before, *ENCODING.encode_as_server(steps[step])]
        assert after[: len(previous)] == previous
    assert items_of(events) == (P("I look."), R("I look."), F("Well"), R("Ah"), R("Now."), F("It is so."))


async def test_a_call_is_emitted_before_it_runs() -> None:
    talk = Talk([SEARCH, ANSWER], per_chunk=1000)
    run = talk.engine().start(talk.turn)
    batches = aiter(run)
    emitted: list[list[Event]] = []
    while not (emitted and must_be_kept(emitted[-1])):
        emitted.append(await anext(batches))
    assert talk.host.made == []
    [opened, _, closed] = emitted[-1]
    assert isinstance(closed, Closed)
    assert opened == Opened(closed.item)
    assert isinstance(closed.item, HostedCall)
    assert (closed.item.server, closed.item.tool, closed.item.name) == ("docs", "search", "docs__search")
    assert closed.text == '{"q":"one"}'
    assert [*ENCODING.encode_as_server("<|start|>assistant" + SEARCH)][-len(closed.tokens) :] == list(closed.tokens)
    ran = await anext(batches)
    assert talk.host.made == [("docs", "search", {"q": "one"})]
    assert ran == [Ran(closed.item, ToolOutcome("search of one"), "search of one")]
    rest = [batch async for batch in batches]
    assert not any(map(must_be_kept, [ran, *rest]))


async def test_usage_counts_prompt_output_and_tool_results() -> None:
    talk = Talk([SEARCH, call("docs__fetch"), ANSWER])
    events, _ = await talk.events()
    usage = events[-1].usage  # type: ignore[union-attr]
    generated = [ENCODING.encode_as_server(step) for step in talk.outputs]
    results = result_tokens("docs__search", "search of one") + result_tokens("docs__fetch", "fetch of ")
    assert usage.prompt_tokens == len(talk.bases[0].prompt.tokens)
    assert usage.completion_tokens == sum(map(len, generated))
    assert usage.tool_output_tokens == len(results)


async def test_max_tokens_applies_to_all_steps_together() -> None:
    size = len(ENCODING.encode_as_server(SEARCH))
    talk = Talk([SEARCH, ANSWER])
    talk = replace(talk, turn=replace(talk.turn, answer=replace(talk.turn.answer, max_tokens=size + 5)))
    await talk.events()
    assert [job.max_tokens for job in talk.bases] == [size + 5, 5]


async def test_the_answer_ends_after_a_call_that_uses_up_max_tokens() -> None:
    talk = Talk([SEARCH, ANSWER])
    talk = replace(
        talk,
        turn=replace(talk.turn, answer=replace(talk.turn.answer, max_tokens=len(ENCODING.encode_as_server(SEARCH)))),
    )
    events, _ = await talk.events()
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert len(talk.bases) == 1
    assert events[-1].reason is FinishReason.LENGTH  # type: ignore[union-attr]


async def test_cached_server_tool_calls_are_restored_in_the_next_request() -> None:
    # The client sends back only its own call; the prompt has all earlier tokens.
    talk = Talk([SEARCH, call("f", thought="Now f."), ANSWER])
    engine = talk.engine()
    events = [event async for batch in engine.start(talk.turn) for event in batch]
    [closed] = [event for event in events if isinstance(event, Closed) and isinstance(event.item, ToolCall)]
    assert isinstance(closed.item, ToolCall)
    sent = (AssistantCall(closed.item.call_id, "f", "{}"), ToolResult(closed.item.call_id, "f", "done"))
    later = replace(talk.turn, conversation=replace(CONVERSATION, items=(*CONVERSATION.items, *sent)))
    assert [batch async for batch in engine.start(later)]
    [*_, before, after] = [list(base.prompt.tokens) for base in talk.bases]
    previous = [*before, *ENCODING.encode_as_server(call("f", thought="Now f."))]
    assert after == [*previous, *result_tokens("f", "done"), *ENCODING.encode_marked("<|start|>assistant")]


async def test_a_missing_answer_is_opened_after_tool_results() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|return|>"
    talk = Talk([SEARCH, thought, "It is so.<|return|>"])
    events, report = await talk.events()
    assert items_of(events) == (R("I look."), R("Hm."), F("It is so."))
    assert report.recoveries == ["analysis-only"]
    approved = decided(Talk([thought, "It is so.<|return|>"]), ApprovalDecision("call_old", "mcpr_1", True))
    events, report = await approved.events()
    assert items_of(events) == (R("Hm."), F("It is so."))


async def test_a_result_that_fills_the_context_ends_the_answer() -> None:
    talk = Talk([SEARCH, ANSWER], Servers(answer=lambda *_: ToolOutcome("long " * 5000)))
    talk = replace(talk, caps=replace(IDS, context=4000))
    events, _ = await talk.events()
    assert len(calls_of(events)) == len(talk.bases) == 1
    assert events[-1].reason is FinishReason.LENGTH  # type: ignore[union-attr]
    # Another deployment with enough context continues the answer.
    small = talk.backend(bases=talk.bases)
    batches, report = await talk.batches(backends=[small, talk.backend(caps=IDS, name="large")])
    assert items_of([e for batch in batches for e in batch])[-1] == F("It is so.")
    assert report.backend == "large"


# -- tool lists


def listings(events: list[Event]) -> list[tuple[str, list[str], str | None]]:
    return [(e.item.server, [each.name for each in e.tools], e.error) for e in events if isinstance(e, Listed)]


async def test_tool_lists_are_emitted_in_order_unless_already_announced() -> None:
    talk = hosting(Talk([ANSWER]), servers=(FILES, DOCS))
    events, _ = await talk.events()
    assert events[0] == Opened(Listing(0, "files"))
    assert listings(events) == [("files", ["delete"], None), ("docs", ["search", "fetch"], None)]
    known = hosting(talk, announced=frozenset({"files"}))
    events, _ = await known.events()
    assert events[0] == Opened(Listing(0, "docs"))
    assert listings(events) == [("docs", ["search", "fetch"], None)]
    # The prompt does not depend on the lists that the client knows.
    assert list(talk.bases[0].prompt.tokens) == list(known.bases[0].prompt.tokens)


async def test_server_tools_follow_client_tools_and_never_take_their_names() -> None:
    mine = FunctionTool("docs__search", "My own.", {"type": "object", "properties": {}})
    preamble = replace(CONVERSATION.preamble, tools=(mine,))
    talk = Talk([call("docs__search") + "<|start|>"])
    talk = replace(talk, turn=replace(talk.turn, conversation=replace(CONVERSATION, preamble=preamble)))
    events, _ = await talk.events()
    assert items_of(events) == (C("docs__search", "{}"),)
    assert talk.host.made == []
    declared = ENCODING.decode(list(talk.bases[0].prompt.tokens))
    names = [line.split()[1] for line in declared.splitlines() if line.startswith("type ")]
    assert names[0] == "docs__search"
    assert names[1].startswith("docs_search_")
    assert names[2] == "docs__fetch"


async def test_a_server_that_cannot_list_its_tools_is_left_out() -> None:
    talk = Talk([ANSWER], Servers({"docs": ToolServerUnavailable("not there"), "files": (tool("files", "delete"),)}))
    events, _ = await hosting(talk, servers=(DOCS, FILES)).events()
    assert listings(events) == [("docs", [], "not there"), ("files", ["delete"], None)]
    assert items_of(events) == (R("Now."), F("It is so."))


REFUSALS: dict[str, tuple[UnisonoError, bool]] = {
    "required server": (ToolServerUnavailable("not there"), False),
    "forbidden optional server": (ToolServerNotAllowed("no"), True),
}


@pytest.mark.parametrize(("refusal", "optional"), REFUSALS.values(), ids=REFUSALS)
async def test_a_listing_error_is_raised(refusal: UnisonoError, optional: bool) -> None:
    talk = hosting(Talk([ANSWER], Servers({"docs": refusal})), optional=optional)
    with pytest.raises(type(refusal)):
        await talk.batches()
    assert talk.bases == []


async def test_servers_are_listed_concurrently() -> None:
    class Slow(Servers):
        async def list_tools(self, *args: Any, **more: Any) -> Any:
            listed = await super().list_tools(*args, **more)
            async with asyncio.timeout(2):
                while len(self.asked) < 2:
                    await asyncio.sleep(0)
            return listed

    events, _ = await hosting(Talk([ANSWER], Slow()), servers=(DOCS, FILES)).events()
    assert len(listings(events)) == 2


async def test_only_an_invalid_tool_is_left_out() -> None:
    odd = replace(tool("docs", "odd"), schema={"type": "object", "properties": {"a" * 300: {"type": "string"}}})
    talk = Talk([call("docs__odd"), ANSWER], Servers({"docs": (odd, tool("docs", "search"))}))
    events, report = await talk.events()
    assert report.recoveries == ["tool-left-out", "unknown-tool"]
    assert calls_of(events) == [("docs", "odd", "There is no tool 'docs__odd'. There is: docs__search.")]
    assert talk.host.made == []


async def test_an_engine_without_a_tool_host_rejects_server_tools() -> None:
    talk = Talk([ANSWER])
    engine = talk.engine()
    bare = Engine(
        EngineDeps(
            encoding=ENCODING,
            renderer=engine._deps.renderer,
            pool=engine._deps.pool,
            memory=engine._deps.memory,
            new_call_id=lambda: "call_1",
        )
    )
    with pytest.raises(UnsupportedValue):
        await anext(aiter(bare.start(talk.turn)))
    assert [batch async for batch in bare.start(replace(talk.turn, server_tools=ServerTools()))]


async def test_count_includes_server_tools() -> None:
    talk = Talk([ANSWER])
    await talk.events()
    assert await talk.engine().count(talk.turn) == len(talk.bases[0].prompt.tokens)


async def test_the_tool_list_stays_the_same_for_the_whole_answer() -> None:
    class Changing(Servers):
        async def call(self, *args: Any, **more: Any) -> Any:
            self.offered = {"docs": ()}
            return await super().call(*args, **more)

    talk = Talk([SEARCH, call("docs__fetch"), ANSWER], Changing())
    events, _ = await talk.events()
    assert calls_of(events) == [("docs", "search", "search of one"), ("docs", "fetch", "fetch of ")]
    assert talk.host.asked == ["docs"]


# -- server tools and client tools


async def test_server_calls_run_and_client_calls_are_returned() -> None:
    both = call("f").removesuffix("<|call|>") + "<|end|><|start|>assistant" + SEARCH
    talk = Talk([both])
    events, _ = await talk.events()
    assert items_of(events) == (C("f"), R("I look."))
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert len(talk.bases) == 1
    assert events[-1].reason is FinishReason.STOP  # type: ignore[union-attr]


async def test_without_parallel_calls_one_client_call_is_returned() -> None:
    first, second = call("f").removesuffix("<|call|>"), SEARCH.removesuffix("<|call|>")
    talk = Talk([f"{second}<|end|><|start|>assistant{first}<|end|><|start|>assistant{call('a')}"])
    talk = replace(talk, turn=replace(talk.turn, answer=replace(talk.turn.answer, parallel_calls=False)))
    events, _ = await talk.events()
    assert items_of(events) == (R("I look."), C("f"))
    assert calls_of(events) == [("docs", "search", "search of one")]


@pytest.mark.parametrize("per_chunk", [1, 1000])
async def test_server_calls_are_buffered_while_client_calls_stream(per_chunk: int) -> None:
    talk = Talk([SEARCH, call("f", '{"a":1}')], per_chunk=per_chunk)
    talk = replace(talk, turn=replace(talk.turn, answer=replace(talk.turn.answer, hold_calls=False)))
    events, _ = await talk.events()
    assert items_of(events) == (R("I look."), C("f", '{"a":1}'))
    assert calls_of(events) == [("docs", "search", "search of one")]


async def test_calls_of_one_step_run_in_order() -> None:
    both = SEARCH.removesuffix("<|call|>") + "<|end|><|start|>assistant" + call("docs__fetch", '{"q":"two"}')
    talk = Talk([both, ANSWER], per_chunk=1000)
    events, _ = await talk.events()
    calls = [event for event in events if isinstance(event, Ran | Closed) and isinstance(event.item, HostedCall)]
    assert [(type(e).__name__, e.item.tool) for e in calls if isinstance(e.item, HostedCall)] == [
        ("Closed", "search"),
        ("Ran", "search"),
        ("Closed", "fetch"),
        ("Ran", "fetch"),
    ]
    assert "search of one" in (last_prompt := ENCODING.decode(list(talk.bases[1].prompt.tokens)))
    assert "fetch of two" in last_prompt


async def test_a_server_call_is_reasoning_if_calls_are_not_allowed() -> None:
    talk = Talk([call("docs__search"), "It is so.<|return|>"])
    talk = replace(talk, turn=replace(talk.turn, answer=replace(talk.turn.answer, calls_allowed=False)))
    events, _ = await talk.events()
    assert items_of(events) == (R("{}"), F("It is so."))
    assert talk.host.made == []


async def test_a_call_does_not_run_if_a_stop_string_ends_the_answer() -> None:
    output = SEARCH.removesuffix("<|call|>") + "<|end|><|start|>assistant<|channel|>final<|message|>so STOP<|return|>"
    talk = Talk([output])
    talk = replace(talk, turn=replace(talk.turn, answer=replace(talk.turn.answer, stop=("STOP",))))
    events, _ = await talk.events()
    assert items_of(events) == (R("I look."), F("so "))
    assert talk.host.made == []


# -- approval


async def test_a_call_that_needs_approval_is_returned_as_a_request() -> None:
    talk = hosting(Talk([call("files__delete", '{"q":"x"}')]), servers=(FILES,))
    events, report = await talk.events()
    assert calls_of(events) == [("files", "delete", "?")]
    assert talk.host.made == []
    assert report.recoveries == []
    assert not any(isinstance(event, Ran) for event in events)


FORM = AnswerForm("city", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
RETURNED: dict[str, tuple[str, str]] = {
    "request for approval": (call("files__delete", '{"q":"x"}'), ""),
    "client tool call": (call("get_weather", '{"city":"Paris"}'), ""),
    "no call": (ANSWER, UNMET_FORM),
}


@pytest.mark.parametrize(("output", "unmet"), RETURNED.values(), ids=RETURNED)
async def test_a_missing_form_is_reported_only_without_returned_calls(output: str, unmet: str) -> None:
    talk = hosting(Talk([output]), servers=(FILES,))
    talk = replace(
        talk,
        turn=replace(
            talk.turn, answer=replace(talk.turn.answer, form=FORM, disabled_rules=frozenset({"regenerated-answer"}))
        ),
    )
    _, report = await talk.events()
    assert report.unmet == unmet


OPEN_CALL = AssistantCall("call_old", "files__delete", '{"q":"x"}')
OPEN_CALL_CONVERSATION = replace(CONVERSATION, items=(*CONVERSATION.items, OPEN_CALL))


def decided(talk: Talk, *decisions: ApprovalDecision) -> Talk:
    talk = replace(talk, turn=replace(talk.turn, conversation=OPEN_CALL_CONVERSATION))
    return hosting(talk, servers=(FILES,), decisions=decisions)


async def test_an_approved_call_runs_before_any_generation() -> None:
    talk = decided(Talk([ANSWER]), ApprovalDecision("call_old", "mcpr_1", True))
    events, _ = await talk.events()
    [closed] = [e for e in events if isinstance(e, Closed) and isinstance(e.item, HostedCall)]
    assert closed.item == HostedCall(0, "call_old", "files__delete", "files", "delete", approval="mcpr_1")
    assert (closed.text, closed.tokens) == ('{"q":"x"}', ())
    assert calls_of(events) == [("files", "delete", "delete of x")]
    assert talk.host.made == [("files", "delete", {"q": "x"})]
    prompt = ENCODING.decode(list(talk.bases[0].prompt.tokens))
    assert prompt.endswith(
        "<|call|>" + ENCODING.decode(result_tokens("files__delete", "delete of x")) + "<|start|>assistant"
    )
    assert events[-1].usage.tool_output_tokens == 0  # type: ignore[union-attr]


async def test_a_denied_call_does_not_run_and_the_model_reads_the_denial() -> None:
    talk = decided(Talk([ANSWER]), ApprovalDecision("call_old", "mcpr_1", False, "Too risky."))
    events, _ = await talk.events()
    assert talk.host.made == []
    assert calls_of(events) == []
    assert "The user did not approve this call. Too risky.<|end|><|start|>assistant" in ENCODING.decode(
        list(talk.bases[0].prompt.tokens)
    )


UNAVAILABLE: dict[str, Servers] = {
    "unavailable tool": Servers({"files": ()}),
    "unavailable server": Servers({"files": ToolServerUnavailable("gone")}),
}


@pytest.mark.parametrize("host", UNAVAILABLE.values(), ids=UNAVAILABLE)
async def test_an_approval_of_an_unavailable_tool_is_void(host: Servers) -> None:
    talk = decided(Talk([ANSWER], host), ApprovalDecision("call_old", "mcpr_1", True))
    events, report = await talk.events()
    [(server, name, result)] = calls_of(events)
    assert (server, name) == ("files", "delete")
    assert "not available" in result
    assert talk.host.made == []
    assert report.recoveries == ["approval-void"]
    assert result in ENCODING.decode(list(talk.bases[0].prompt.tokens))


async def test_an_approval_for_a_server_not_in_the_request_is_void() -> None:
    talk = hosting(decided(Talk([ANSWER]), ApprovalDecision("call_old", "mcpr_1", True)), servers=(DOCS,))
    events, report = await talk.events()
    assert talk.host.made == []
    assert report.recoveries == ["approval-void"]
    assert [(server, name) for server, name, _ in calls_of(events)] == [("files", "delete")]


async def test_a_decision_without_an_open_call_is_ignored() -> None:
    answered = replace(
        OPEN_CALL_CONVERSATION,
        items=(*OPEN_CALL_CONVERSATION.items, ToolResult("call_old", "files__delete", "gone"), UserMessage("?")),
    )
    talk = decided(
        Talk([ANSWER]), ApprovalDecision("call_old", "mcpr_1", True), ApprovalDecision("call_other", "mcpr_2", True)
    )
    talk = replace(talk, turn=replace(talk.turn, conversation=answered))
    events, _ = await talk.events()
    assert (talk.host.made, calls_of(events)) == ([], [])


# -- arguments


@pytest.mark.parametrize(("length", "in_threads"), [(10_000, 0), (20_000, 2)])
async def test_long_arguments_are_parsed_once_in_a_thread(length: int, in_threads: int) -> None:
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    texts = ["".join(map(str, range(first, length)))[:length] for first in (1, 2)]
    talk = Talk([*(call("docs__search", f'{{"q":"{text}"}}') for text in texts), ANSWER])
    events, _ = await talk.events()
    assert len(calls_of(events)) == 2
    assert [name for name in threads.begun if name == "ToolRound.parse_next"] == ["ToolRound.parse_next"] * in_threads


# -- errors


def failing(name: str, arguments: object) -> ToolOutcome:
    return ToolOutcome("The disk is full.", is_error=True)


def lost(name: str, arguments: object) -> ToolOutcome:
    return ToolOutcome("No answer.", is_error=True, outcome_unknown=True)


FAULTS: dict[str, tuple[str, Servers, str, str]] = {
    "arguments are not JSON": (call("docs__search", "{q"), Servers(), "not a JSON object", "bad-tool-arguments"),
    "arguments are not an object": (
        call("docs__search", "[1]"),
        Servers(),
        "another JSON value",
        "bad-tool-arguments",
    ),
    "lone surrogate": (call("docs__search", '{"q":"\\ud800"}'), Servers(), "surrogate pair", "bad-tool-arguments"),
    "unclosed nesting": (
        call("docs__search", '{"q":' + "[" * 9000),
        Servers(),
        "not a JSON object",
        "bad-tool-arguments",
    ),
    "number out of range": (
        call("docs__search", '{"q":1e999}'),
        Servers(),
        "1e999 is out of range",
        "bad-tool-arguments",
    ),
    "unknown tool of a server": (call("docs__write"), Servers(), "docs__search, docs__fetch", "unknown-tool"),
    "failing tool": (SEARCH, Servers(answer=failing), "The disk is full.", ""),
    "tool without an answer": (SEARCH, Servers(answer=lost), "No answer.", "call-not-repeated"),
}


@pytest.mark.parametrize(("step", "host", "error", "rule"), FAULTS.values(), ids=FAULTS)
async def test_the_model_reads_an_error_result_and_continues(step: str, host: Servers, error: str, rule: str) -> None:
    host = replace(host, made=[])
    talk = Talk([step, ANSWER], host)
    talk.turn = replace(talk.turn, answer=replace(talk.turn.answer, disabled_rules=frozenset({"repetition"})))
    events, report = await talk.events()
    [ran] = [event for event in events if isinstance(event, Ran)]
    assert ran.outcome.is_error
    assert error in ran.text_for_model
    assert error in ENCODING.decode(list(talk.bases[1].prompt.tokens))
    assert report.recoveries == ([rule] if rule else [])
    assert items_of(events)[-1] == F("It is so.")
    assert (host.made == []) is (rule in ("bad-tool-arguments", "unknown-tool"))


async def test_the_model_reads_an_error_of_the_tool_host() -> None:
    def refuse(name: str, arguments: object) -> ToolOutcome:
        raise ToolServerNotAllowed("not from here")

    events, _ = await Talk([SEARCH, ANSWER], Servers(answer=refuse)).events()
    assert calls_of(events) == [("docs", "search", "not from here")]


async def test_empty_arguments_are_an_empty_object() -> None:
    talk = Talk([call("docs__search", ""), ANSWER])
    await talk.events()
    assert talk.host.made == [("docs", "search", {})]


def other(n: int) -> str:
    return call("docs__search", f'{{"q":"{n}"}}')


LIMITS: dict[str, tuple[list[str], dict[str, Any], int, list[str]]] = {
    "three faults in a row": (
        [call("docs__made_up"), call("docs__search", "?"), call("docs__made_up")], {}, 0,
        ["unknown-tool", "bad-tool-arguments", "tools-ended"],
    ),
    "repeated call": ([SEARCH] * 4, {}, 2, ["repeated-call", "tools-ended"]),
    "call limit": ([other(1), other(2), other(3)], {"max_calls": 2}, 2, ["call-limit", "tools-ended"]),
    "call limit of zero": ([other(1)], {"max_calls": 0}, 0, ["call-limit", "tools-ended"]),
    "no time left": ([other(1)], {"total_s": 0.0}, 0, ["tool-deadline", "tools-ended"]),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "bound", "made", "rules"), LIMITS.values(), ids=LIMITS)
async def test_tool_calls_end_at_a_limit(steps: list[str], bound: dict[str, Any], made: int, rules: list[str]) -> None:
    talk = hosting(Talk([*steps, "It is so.<|return|>"]), **bound)
    events, report = await talk.events()
    assert len(talk.host.made) == made
    assert report.recoveries == rules
    assert len(calls_of(events)) == len(steps)
    assert items_of(events) == (*(R("I look."),) * steps.count(SEARCH), F("It is so."))
    opened = ENCODING.encode_marked("<|start|>assistant<|channel|>final<|message|>")
    assert list(talk.bases[-1].prompt.tokens)[-len(opened) :] == opened


async def test_the_answer_pauses_after_the_configured_rounds() -> None:
    talk = hosting(Talk([SEARCH, other(2), "never asked for"]), pause_after=2)
    events, report = await talk.events()
    assert isinstance(events[-1], Finished)
    assert (events[-1].paused, events[-1].reason, report.recoveries, report.unmet) == (True, FinishReason.STOP, [], "")
    assert isinstance(events[-2], Ran)
    assert (len(talk.bases), len(talk.host.made)) == (2, 2)


async def test_a_pausable_answer_pauses_at_the_deadline() -> None:
    talk = hosting(Talk([other(1), "never asked for"]), pause_after=9, total_s=0.0)
    events, report = await talk.events()
    assert isinstance(events[-1], Finished)
    assert (events[-1].paused, report.recoveries, talk.host.made) == (True, ["tool-deadline"], [])
    assert "may be made again" in calls_of(events)[0][2]


async def test_a_pausable_answer_finishes_at_the_call_limit() -> None:
    talk = hosting(Talk([other(1), other(2), "It is so.<|return|>"]), pause_after=2, max_calls=1)
    events, report = await talk.events()
    assert isinstance(events[-1], Finished)
    assert (events[-1].paused, report.recoveries) == (False, ["call-limit", "tools-ended"])


async def test_repeated_calls_are_found_across_spellings_until_another_call() -> None:
    twice = [call("docs__search", '{"q":"1","r":2}'), call("docs__search", '{ "r": 2, "q": "1" }')]
    talk = Talk([*twice, twice[0], call("docs__fetch"), *twice, ANSWER])
    events, report = await talk.events()
    assert len(talk.host.made) == 5
    assert "made before" in calls_of(events)[2][2]
    assert report.recoveries == ["repeated-call"]


async def test_faults_before_a_successful_call_do_not_add_up() -> None:
    talk = Talk(
        [step for n in range(3) for step in (call("docs__made_up"), call("docs__made_up"), other(n))] + [ANSWER]
    )
    events, report = await talk.events()
    assert len(talk.host.made) == 3
    assert report.recoveries == ["unknown-tool"]
    assert items_of(events)[-1] == F("It is so.")


async def test_a_call_after_an_opened_answer_is_dropped() -> None:
    talk = hosting(Talk([other(1), "It is so.<|end|><|start|>assistant" + other(2)]), max_calls=0)
    events, report = await talk.events()
    assert items_of(events) == (F("It is so."),)
    assert len(calls_of(events)) == 1
    assert report.recoveries == ["call-limit", "tools-ended", "late-call"]
    assert talk.host.made == []


async def test_a_given_answer_is_not_opened_again() -> None:
    step = other(1).removesuffix("<|call|>") + "<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"
    talk = hosting(Talk([step]), max_calls=0)
    events, _ = await talk.events()
    assert items_of(events) == (F("So."),)
    assert len(talk.bases) == 1


async def test_a_call_ends_at_the_deadline() -> None:
    class WaitsForDeadline(Servers):
        async def call(self, *args: Any, deadline: float | None = None, **more: Any) -> Any:
            assert deadline is not None
            await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
            return ToolOutcome("Too late.", is_error=True)

    talk = hosting(Talk([other(1), "It is so.<|return|>"], WaitsForDeadline()), total_s=0.05)
    events, report = await talk.events()
    assert calls_of(events) == [("docs", "search", "Too late.")]
    assert report.recoveries == ["tool-deadline", "tools-ended"]
    assert items_of(events) == (F("It is so."),)


# -- cancellation and failover


async def test_cancelling_the_stream_cancels_the_running_call() -> None:
    talk = Talk([SEARCH, ANSWER], Servers(takes_s=60))
    run = talk.engine().start(talk.turn)

    async def read() -> None:
        async for _ in run:
            pass

    reading = asyncio.create_task(read())
    async with asyncio.timeout(5):
        while not talk.host.made:
            await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await run.aclose()
    assert talk.host.cancelled == ["search"]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
async def test_another_backend_continues_after_tool_results(whole: bool) -> None:
    talk = Talk([SEARCH, ANSWER])
    talk = replace(talk, turn=replace(talk.turn, answer=replace(talk.turn.answer, whole=whole)))
    first = talk.backend(outputs=[talk.backend().outputs[0]], name="first")

    class Failing(type(first)):  # type: ignore[misc]
        async def complete(self, job: Any) -> Any:
            if self.jobs:
                raise BackendUnavailable("gone")
            async for chunk in super().complete(job):
                yield chunk

    failing = Failing(first.outputs, bases=talk.bases, name="first")
    batches, report = await talk.batches(backends=[failing, talk.backend(name="second")])
    events = [event for batch in batches for event in batch]
    assert talk.host.made == [("docs", "search", {"q": "one"})]
    assert items_of(events) == (R("I look."), R("Now."), F("It is so."))
    assert (report.failovers, report.backend, len(batches) == 1) == (1, "second", whole)


async def test_a_backend_that_fails_after_tool_listing_is_replaced() -> None:
    talk = Talk([SEARCH, ANSWER])
    gone = talk.backend(failure=BackendUnavailable("gone"), name="gone")
    batches, report = await talk.batches(backends=[gone, talk.backend(name="other")])
    assert items_of([e for batch in batches for e in batch]) == (R("I look."), R("Now."), F("It is so."))
    assert report.backend == "other"
    assert talk.host.asked == ["docs"]


def test_every_reported_rule_is_documented() -> None:
    from unisono.core.recovery_rules import RULES
    from unisono.engine import steps
    from unisono.engine.server_tools import call_verdicts, tools

    reported = {
        *call_verdicts.REFUSALS,
        call_verdicts.NOT_REPEATED,
        tools.LEFT_OUT,
        steps.LATE_CALL,
        steps.ANALYSIS_ONLY,
    }
    assert reported <= RULES.keys()


async def test_a_server_description_is_declared_once() -> None:
    talk, about = Talk([ANSWER]), "Our\nproducts. <|end|>"
    await replace(talk, turn=replace(talk.turn, server_tools=ServerTools((replace(DOCS, description=about),)))).events()
    tokens = list(talk.bases[0].prompt.tokens)
    declared = ENCODING.decode(tokens)
    assert "// Our\n// products. <|end|>\n// \n// The tool search.\n" in declared
    assert "// The tool fetch.\n" in declared
    assert declared.count("Our") == 1
