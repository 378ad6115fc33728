"""The tool loop: calls the gateway makes itself, and the answer that goes on behind them."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.hosting import ANSWER, DOCS, ENCODING, FILES, SEARCH, Servers, Talk, call, calls_of, tool
from tests.engine.scripted import ASKED, IDS, TEXT
from tests.harmony.fold import items_of
from tests.harmony.recoveries import C, F, P, R
from tests.threads import Threads
from unisono.core.conversation import AnswerForm, AssistantCall, FunctionTool, ToolResult, UserMessage
from unisono.core.events import Closed, Event, Finished, HostedCall, Listed, Listing, Opened, Ran, ToolCall
from unisono.core.generation import Capabilities, FinishReason
from unisono.core.tools import ToolOutcome
from unisono.engine.deps import EngineDeps
from unisono.engine.interventions.requirements import UNMET_FORM
from unisono.engine.journal import must_be_kept
from unisono.engine.request import ApprovalDecision, ServerTools
from unisono.engine.service import Engine
from unisono.errors import (
    BackendUnavailable,
    ToolServerNotAllowed,
    ToolServerUnavailable,
    UnisonoError,
    UnsupportedValue,
)


def hosting(talk: Talk, **more: Any) -> Talk:
    """The talk with more said of what it hosts."""
    assert talk.turn.server_tools is not None
    return replace(talk, turn=replace(talk.turn, server_tools=replace(talk.turn.server_tools, **more)))


def result_tokens(name: str, text: str) -> list[int]:
    marked = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{text}<|end|>"
    return ENCODING.encode_marked(marked)


# -- one call


@pytest.mark.parametrize("told", [IDS, replace(IDS, stop_visible=False), TEXT], ids=["ids", "ids, stop hidden", "text"])
@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
async def test_a_call_is_made_and_the_answer_goes_on_behind_its_result(told: Capabilities, per_chunk: int) -> None:
    talk = Talk([SEARCH, ANSWER], told=told, per_chunk=per_chunk)
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


async def test_every_step_begins_behind_all_that_was_said_before_token_for_token() -> None:
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
        said = [*before, *ENCODING.encode_as_server(steps[step])]
        assert after[: len(said)] == said
    assert items_of(events) == (P("I look."), R("I look."), F("Well"), R("Ah"), R("Now."), F("It is so."))


async def test_a_call_is_shown_before_it_is_made_and_made_when_more_is_asked_for() -> None:
    talk = Talk([SEARCH, ANSWER], per_chunk=1000)
    run = talk.engine().start(talk.turn)
    batches = aiter(run)
    seen: list[list[Event]] = []
    while not (seen and must_be_kept(seen[-1])):
        seen.append(await anext(batches))
    assert talk.host.made == []
    [opened, _, closed] = seen[-1]
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


async def test_what_is_counted() -> None:
    talk = Talk([SEARCH, call("docs__fetch"), ANSWER])
    events, _ = await talk.events()
    usage = events[-1].usage  # type: ignore[union-attr]
    generated = [ENCODING.encode_as_server(step) for step in talk.outputs]
    results = result_tokens("docs__search", "search of one") + result_tokens("docs__fetch", "fetch of ")
    assert usage.prompt_tokens == len(talk.bases[0].prompt.tokens)
    assert usage.completion_tokens == sum(map(len, generated))
    assert usage.tool_output_tokens == len(results)


async def test_all_steps_together_keep_to_max_tokens() -> None:
    size = len(ENCODING.encode_as_server(SEARCH))
    talk = Talk([SEARCH, ANSWER])
    talk = replace(talk, turn=replace(talk.turn, max_tokens=size + 5))
    await talk.events()
    assert [job.max_tokens for job in talk.bases] == [size + 5, 5]


async def test_no_token_is_left_behind_a_call() -> None:
    talk = Talk([SEARCH, ANSWER])
    talk = replace(talk, turn=replace(talk.turn, max_tokens=len(ENCODING.encode_as_server(SEARCH))))
    events, _ = await talk.events()
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert len(talk.bases) == 1
    assert events[-1].reason is FinishReason.LENGTH  # type: ignore[union-attr]


async def test_a_client_that_never_saw_the_hosted_call_continues_behind_it() -> None:
    """It sends back its own call alone, and the model reads again all that it read before."""
    talk = Talk([SEARCH, call("f", thought="Now f."), ANSWER])
    engine = talk.engine()
    events = [event async for batch in engine.start(talk.turn) for event in batch]
    [called] = [event for event in events if isinstance(event, Closed) and isinstance(event.item, ToolCall)]
    assert isinstance(called.item, ToolCall)
    sent = (AssistantCall(called.item.call_id, "f", "{}"), ToolResult(called.item.call_id, "f", "done"))
    later = replace(talk.turn, conversation=replace(ASKED, items=(*ASKED.items, *sent)))
    assert [batch async for batch in engine.start(later)]
    [*_, before, after] = [list(base.prompt.tokens) for base in talk.bases]
    said = [*before, *ENCODING.encode_as_server(call("f", thought="Now f."))]
    assert after == [*said, *result_tokens("f", "done"), *ENCODING.encode_marked("<|start|>assistant")]


async def test_an_answer_that_never_came_is_opened_behind_results_too() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|return|>"
    talk = Talk([SEARCH, thought, "It is so.<|return|>"])
    events, report = await talk.events()
    assert items_of(events) == (R("I look."), R("Hm."), F("It is so."))
    assert report.recoveries == ["analysis-only"]
    approved = decided(Talk([thought, "It is so.<|return|>"]), ApprovalDecision("call_old", "mcpr_1", True))
    events, report = await approved.events()
    assert items_of(events) == (R("Hm."), F("It is so."))


async def test_a_result_that_leaves_no_room_ends_the_answer() -> None:
    talk = Talk([SEARCH, ANSWER], Servers(answer=lambda *_: ToolOutcome("long " * 5000)))
    talk = replace(talk, told=replace(IDS, context=4000))
    events, _ = await talk.events()
    assert len(calls_of(events)) == len(talk.bases) == 1
    assert events[-1].reason is FinishReason.LENGTH  # type: ignore[union-attr]
    # Where another deployment has the room, it goes on there.
    small = talk.backend(bases=talk.bases)
    batches, report = await talk.batches(backends=[small, talk.backend(told=IDS, name="large")])
    assert items_of([e for batch in batches for e in batch])[-1] == F("It is so.")
    assert report.backend == "large"


# -- lists


def listings(events: list[Event]) -> list[tuple[str, list[str], str | None]]:
    return [(e.item.server, [each.name for each in e.tools], e.error) for e in events if isinstance(e, Listed)]


async def test_servers_are_listed_in_their_order_unless_the_client_knows_them() -> None:
    talk = hosting(Talk([ANSWER]), servers=(FILES, DOCS))
    events, _ = await talk.events()
    assert events[0] == Opened(Listing(0, "files"))
    assert listings(events) == [("files", ["delete"], None), ("docs", ["search", "fetch"], None)]
    known = hosting(talk, announced=frozenset({"files"}))
    events, _ = await known.events()
    assert events[0] == Opened(Listing(0, "docs"))
    assert listings(events) == [("docs", ["search", "fetch"], None)]
    # What is told and what the model knows are two things.
    assert list(talk.bases[0].prompt.tokens) == list(known.bases[0].prompt.tokens)


async def test_hosted_tools_stand_behind_the_clients_own_and_never_take_their_names() -> None:
    mine = FunctionTool("docs__search", "My own.", {"type": "object", "properties": {}})
    preamble = replace(ASKED.preamble, tools=(mine,))
    talk = Talk([call("docs__search") + "<|start|>"])
    talk = replace(talk, turn=replace(talk.turn, conversation=replace(ASKED, preamble=preamble)))
    events, _ = await talk.events()
    assert items_of(events) == (C("docs__search", "{}"),)
    assert talk.host.made == []
    declared = ENCODING.decode(list(talk.bases[0].prompt.tokens))
    names = [line.split()[1] for line in declared.splitlines() if line.startswith("type ")]
    assert names[0] == "docs__search"
    assert names[1].startswith("docs_search_")
    assert names[2] == "docs__fetch"


async def test_a_server_that_cannot_list_its_tools_is_gone_without() -> None:
    talk = Talk([ANSWER], Servers({"docs": ToolServerUnavailable("not there"), "files": (tool("files", "delete"),)}))
    events, _ = await hosting(talk, servers=(DOCS, FILES)).events()
    assert listings(events) == [("docs", [], "not there"), ("files", ["delete"], None)]
    assert items_of(events) == (R("Now."), F("It is so."))


REFUSALS: dict[str, tuple[UnisonoError, bool]] = {
    "a server that is needed": (ToolServerUnavailable("not there"), False),
    "a server that may not be reached, needed or not": (ToolServerNotAllowed("no"), True),
}


@pytest.mark.parametrize(("refusal", "optional"), REFUSALS.values(), ids=REFUSALS)
async def test_a_turn_ends_with_the_error_of(refusal: UnisonoError, optional: bool) -> None:
    talk = hosting(Talk([ANSWER], Servers({"docs": refusal})), optional=optional)
    with pytest.raises(type(refusal)):
        await talk.batches()
    assert talk.bases == []


async def test_all_servers_are_asked_at_once() -> None:
    class Slow(Servers):
        async def list_tools(self, *args: Any, **more: Any) -> Any:
            listed = await super().list_tools(*args, **more)
            async with asyncio.timeout(2):
                while len(self.asked) < 2:
                    await asyncio.sleep(0)
            return listed

    events, _ = await hosting(Talk([ANSWER], Slow()), servers=(DOCS, FILES)).events()
    assert len(listings(events)) == 2


async def test_a_tool_that_cannot_be_declared_is_left_out_and_the_others_are_not() -> None:
    odd = replace(tool("docs", "odd"), schema={"type": "object", "properties": {"a\nb": {"type": "string"}}})
    talk = Talk([call("docs__odd"), ANSWER], Servers({"docs": (odd, tool("docs", "search"))}))
    events, report = await talk.events()
    assert report.recoveries == ["tool-left-out", "unknown-tool"]
    assert calls_of(events) == [("docs", "odd", "There is no tool 'docs__odd'. There is: docs__search.")]
    assert talk.host.made == []


async def test_an_engine_without_a_host_refuses_what_it_cannot_run() -> None:
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


async def test_hosted_tools_count_in_a_prompt() -> None:
    talk = Talk([ANSWER])
    await talk.events()
    assert await talk.engine().count(talk.turn) == len(talk.bases[0].prompt.tokens)


async def test_what_was_listed_holds_for_the_whole_turn() -> None:
    class Changing(Servers):
        async def call(self, *args: Any, **more: Any) -> Any:
            self.offered = {"docs": ()}
            return await super().call(*args, **more)

    talk = Talk([SEARCH, call("docs__fetch"), ANSWER], Changing())
    events, _ = await talk.events()
    assert calls_of(events) == [("docs", "search", "search of one"), ("docs", "fetch", "fetch of ")]
    assert talk.host.asked == ["docs"]


# -- calls of two kinds


async def test_hosted_calls_are_run_and_those_of_the_client_are_handed_back() -> None:
    both = call("f").removesuffix("<|call|>") + "<|end|><|start|>assistant" + SEARCH
    talk = Talk([both])
    events, _ = await talk.events()
    assert items_of(events) == (C("f"), R("I look."))
    assert calls_of(events) == [("docs", "search", "search of one")]
    assert len(talk.bases) == 1
    assert events[-1].reason is FinishReason.STOP  # type: ignore[union-attr]


async def test_one_call_at_a_time_is_one_of_the_client() -> None:
    first, second = call("f").removesuffix("<|call|>"), SEARCH.removesuffix("<|call|>")
    talk = Talk([f"{second}<|end|><|start|>assistant{first}<|end|><|start|>assistant{call('a')}"])
    talk = replace(talk, turn=replace(talk.turn, parallel_calls=False))
    events, _ = await talk.events()
    assert items_of(events) == (R("I look."), C("f"))
    assert calls_of(events) == [("docs", "search", "search of one")]


@pytest.mark.parametrize("per_chunk", [1, 1000])
async def test_a_hosted_call_is_held_where_the_clients_are_shown_as_they_come(per_chunk: int) -> None:
    talk = Talk([SEARCH, call("f", '{"a":1}')], per_chunk=per_chunk)
    talk = replace(talk, turn=replace(talk.turn, hold_calls=False))
    events, _ = await talk.events()
    assert items_of(events) == (R("I look."), C("f", '{"a":1}'))
    assert calls_of(events) == [("docs", "search", "search of one")]


async def test_calls_of_one_step_are_run_in_order_each_behind_the_result_before() -> None:
    both = SEARCH.removesuffix("<|call|>") + "<|end|><|start|>assistant" + call("docs__fetch", '{"q":"two"}')
    talk = Talk([both, ANSWER], per_chunk=1000)
    events, _ = await talk.events()
    shown = [event for event in events if isinstance(event, Ran | Closed) and isinstance(event.item, HostedCall)]
    assert [(type(e).__name__, e.item.tool) for e in shown if isinstance(e.item, HostedCall)] == [
        ("Closed", "search"),
        ("Ran", "search"),
        ("Closed", "fetch"),
        ("Ran", "fetch"),
    ]
    assert "search of one" in (last := ENCODING.decode(list(talk.bases[1].prompt.tokens)))
    assert "fetch of two" in last


async def test_a_hosted_call_nobody_may_make_is_thought() -> None:
    talk = Talk([call("docs__search"), "It is so.<|return|>"])
    talk = replace(talk, turn=replace(talk.turn, calls_allowed=False))
    events, _ = await talk.events()
    assert items_of(events) == (R("{}"), F("It is so."))
    assert talk.host.made == []


async def test_a_call_behind_which_the_client_stopped_the_answer_is_not_made() -> None:
    output = SEARCH.removesuffix("<|call|>") + "<|end|><|start|>assistant<|channel|>final<|message|>so STOP<|return|>"
    talk = Talk([output])
    talk = replace(talk, turn=replace(talk.turn, stop=("STOP",)))
    events, _ = await talk.events()
    assert items_of(events) == (R("I look."), F("so "))
    assert talk.host.made == []


# -- approval


async def test_a_call_that_needs_approval_is_shown_and_handed_back() -> None:
    talk = hosting(Talk([call("files__delete", '{"q":"x"}')]), servers=(FILES,))
    events, report = await talk.events()
    assert calls_of(events) == [("files", "delete", "?")]
    assert talk.host.made == []
    assert report.recoveries == []
    assert not any(isinstance(event, Ran) for event in events)


FORM = AnswerForm("city", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
HANDED: dict[str, tuple[str, str]] = {
    "a request for approval": (call("files__delete", '{"q":"x"}'), ""),
    "a call of the client": (call("get_weather", '{"city":"Paris"}'), ""),
    "nothing": (ANSWER, UNMET_FORM),
}


@pytest.mark.parametrize(("output", "unmet"), HANDED.values(), ids=HANDED)
async def test_a_form_is_not_missed_in_what_is_handed_back(output: str, unmet: str) -> None:
    talk = hosting(Talk([output]), servers=(FILES,))
    talk = replace(talk, turn=replace(talk.turn, form=FORM, disabled_rules=frozenset({"regenerated-answer"})))
    _, report = await talk.events()
    assert report.unmet == unmet


WAITING = AssistantCall("call_old", "files__delete", '{"q":"x"}')
ASKED_FOR = replace(ASKED, items=(*ASKED.items, WAITING))


def decided(talk: Talk, *decisions: ApprovalDecision) -> Talk:
    talk = replace(talk, turn=replace(talk.turn, conversation=ASKED_FOR))
    return hosting(talk, servers=(FILES,), decisions=decisions)


async def test_what_was_approved_is_run_before_anything_is_generated() -> None:
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


async def test_what_was_not_approved_is_not_run_and_the_model_is_told() -> None:
    talk = decided(Talk([ANSWER]), ApprovalDecision("call_old", "mcpr_1", False, "Too risky."))
    events, _ = await talk.events()
    assert talk.host.made == []
    assert calls_of(events) == []
    assert "The user did not approve this call. Too risky.<|end|><|start|>assistant" in ENCODING.decode(
        list(talk.bases[0].prompt.tokens)
    )


VOID: dict[str, Servers] = {
    "the tool is gone": Servers({"files": ()}),
    "the server is gone": Servers({"files": ToolServerUnavailable("gone")}),
}


@pytest.mark.parametrize("host", VOID.values(), ids=VOID)
async def test_an_approval_is_void_when(host: Servers) -> None:
    talk = decided(Talk([ANSWER], host), ApprovalDecision("call_old", "mcpr_1", True))
    events, report = await talk.events()
    [(server, name, told)] = calls_of(events)
    assert (server, name) == ("files", "delete")
    assert "not available" in told
    assert talk.host.made == []
    assert report.recoveries == ["approval-void"]
    assert told in ENCODING.decode(list(talk.bases[0].prompt.tokens))


async def test_an_approval_of_a_server_that_the_turn_does_not_host_is_void() -> None:
    talk = hosting(decided(Talk([ANSWER]), ApprovalDecision("call_old", "mcpr_1", True)), servers=(DOCS,))
    events, report = await talk.events()
    assert talk.host.made == []
    assert report.recoveries == ["approval-void"]
    assert [(server, name) for server, name, _ in calls_of(events)] == [("files", "delete")]


async def test_a_decision_about_nothing_changes_nothing() -> None:
    answered = replace(
        ASKED_FOR, items=(*ASKED_FOR.items, ToolResult("call_old", "files__delete", "gone"), UserMessage("?"))
    )
    talk = decided(
        Talk([ANSWER]), ApprovalDecision("call_old", "mcpr_1", True), ApprovalDecision("call_other", "mcpr_2", True)
    )
    talk = replace(talk, turn=replace(talk.turn, conversation=answered))
    events, _ = await talk.events()
    assert (talk.host.made, calls_of(events)) == ([], [])


# -- arguments


@pytest.mark.parametrize(("length", "in_threads"), [(10_000, 0), (20_000, 2)])
async def test_long_arguments_are_read_once_and_in_a_thread(length: int, in_threads: int) -> None:
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    texts = ["".join(map(str, range(first, length)))[:length] for first in (1, 2)]
    talk = Talk([*(call("docs__search", f'{{"q":"{text}"}}') for text in texts), ANSWER])
    events, _ = await talk.events()
    assert len(calls_of(events)) == 2
    assert [name for name in threads.begun if name == "ToolRound.parse_next"] == ["ToolRound.parse_next"] * in_threads


# -- what goes wrong


def failing(name: str, arguments: object) -> ToolOutcome:
    return ToolOutcome("The disk is full.", is_error=True)


def lost(name: str, arguments: object) -> ToolOutcome:
    return ToolOutcome("No answer.", is_error=True, outcome_unknown=True)


FAULTS: dict[str, tuple[str, Servers, str, str]] = {
    "arguments that are no JSON": (call("docs__search", "{q"), Servers(), "not a JSON object", "bad-tool-arguments"),
    "arguments that are no object": (
        call("docs__search", "[1]"),
        Servers(),
        "another JSON value",
        "bad-tool-arguments",
    ),
    "half a character": (call("docs__search", '{"q":"\\ud800"}'), Servers(), "surrogate pair", "bad-tool-arguments"),
    "endless nesting": (
        call("docs__search", '{"q":' + "[" * 9000),
        Servers(),
        "not a JSON object",
        "bad-tool-arguments",
    ),
    "no number": (call("docs__search", '{"q":1e999}'), Servers(), "1e999 is out of range", "bad-tool-arguments"),
    "a tool its server does not have": (call("docs__write"), Servers(), "docs__search, docs__fetch", "unknown-tool"),
    "a name made up": (call("made_up"), Servers(), "There is: docs__search", "unknown-tool"),
    "a tool that fails": (SEARCH, Servers(answer=failing), "The disk is full.", ""),
    "an answer that never came": (SEARCH, Servers(answer=lost), "No answer.", "call-not-repeated"),
}


@pytest.mark.parametrize(("step", "host", "told", "rule"), FAULTS.values(), ids=FAULTS)
async def test_the_model_reads_what_went_wrong_and_goes_on(step: str, host: Servers, told: str, rule: str) -> None:
    host = replace(host, made=[])
    talk = Talk([step, ANSWER], host)
    talk.turn = replace(talk.turn, disabled_rules=frozenset({"repetition"}))
    events, report = await talk.events()
    [ran] = [event for event in events if isinstance(event, Ran)]
    assert ran.outcome.is_error
    assert told in ran.text_for_model
    assert told in ENCODING.decode(list(talk.bases[1].prompt.tokens))
    assert report.recoveries == ([rule] if rule else [])
    assert items_of(events)[-1] == F("It is so.")
    assert (host.made == []) is (rule in ("bad-tool-arguments", "unknown-tool"))


async def test_a_refusal_of_the_host_is_told_to_the_model() -> None:
    def refuse(name: str, arguments: object) -> ToolOutcome:
        raise ToolServerNotAllowed("not from here")

    events, _ = await Talk([SEARCH, ANSWER], Servers(answer=refuse)).events()
    assert calls_of(events) == [("docs", "search", "not from here")]


async def test_a_tool_without_arguments_may_be_called_with_nothing() -> None:
    talk = Talk([call("docs__search", ""), ANSWER])
    await talk.events()
    assert talk.host.made == [("docs", "search", {})]


def other(n: int) -> str:
    return call("docs__search", f'{{"q":"{n}"}}')


BOUNDS: dict[str, tuple[list[str], dict[str, Any], int, list[str]]] = {
    "three faults in a row": (
        [call("made_up"), call("docs__search", "?"), call("made_up")], {}, 0,
        ["unknown-tool", "bad-tool-arguments", "tools-ended"],
    ),
    "the same call again and again": ([SEARCH] * 4, {}, 2, ["repeated-call", "tools-ended"]),
    "the calls of the turn": ([other(1), other(2), other(3)], {"max_calls": 2}, 2, ["call-limit", "tools-ended"]),
    "no calls at all": ([other(1)], {"max_calls": 0}, 0, ["call-limit", "tools-ended"]),
    "no time": ([other(1)], {"total_s": 0.0}, 0, ["tool-deadline", "tools-ended"]),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "bound", "made", "rules"), BOUNDS.values(), ids=BOUNDS)
async def test_calling_ends_with(steps: list[str], bound: dict[str, Any], made: int, rules: list[str]) -> None:
    talk = hosting(Talk([*steps, "It is so.<|return|>"]), **bound)
    events, report = await talk.events()
    assert len(talk.host.made) == made
    assert report.recoveries == rules
    assert len(calls_of(events)) == len(steps)
    assert items_of(events) == (*(R("I look."),) * steps.count(SEARCH), F("It is so."))
    opened = ENCODING.encode_marked("<|start|>assistant<|channel|>final<|message|>")
    assert list(talk.bases[-1].prompt.tokens)[-len(opened) :] == opened


async def test_a_turn_pauses_behind_so_many_rounds_and_does_not_answer() -> None:
    talk = hosting(Talk([SEARCH, other(2), "never asked for"]), pause_after=2)
    events, report = await talk.events()
    assert isinstance(events[-1], Finished)
    assert (events[-1].paused, events[-1].reason, report.recoveries, report.unmet) == (True, FinishReason.STOP, [], "")
    assert isinstance(events[-2], Ran)
    assert (len(talk.bases), len(talk.host.made)) == (2, 2)


async def test_a_turn_that_may_pause_does_so_when_its_time_is_over() -> None:
    talk = hosting(Talk([other(1), "never asked for"]), pause_after=9, total_s=0.0)
    events, report = await talk.events()
    assert isinstance(events[-1], Finished)
    assert (events[-1].paused, report.recoveries, talk.host.made) == (True, ["tool-deadline"], [])
    assert "may be made again" in calls_of(events)[0][2]


async def test_a_turn_that_may_pause_answers_when_its_calls_are_used_up() -> None:
    talk = hosting(Talk([other(1), other(2), "It is so.<|return|>"]), pause_after=2, max_calls=1)
    events, report = await talk.events()
    assert isinstance(events[-1], Finished)
    assert (events[-1].paused, report.recoveries) == (False, ["call-limit", "tools-ended"])


async def test_arguments_spelled_otherwise_are_the_same_and_another_call_between_is_not() -> None:
    twice = [call("docs__search", '{"q":"1","r":2}'), call("docs__search", '{ "r": 2, "q": "1" }')]
    talk = Talk([*twice, twice[0], call("docs__fetch"), *twice, ANSWER])
    events, report = await talk.events()
    assert len(talk.host.made) == 5
    assert "made before" in calls_of(events)[2][2]
    assert report.recoveries == ["repeated-call"]


async def test_faults_that_are_mended_do_not_add_up() -> None:
    talk = Talk([step for n in range(3) for step in (call("made_up"), call("made_up"), other(n))] + [ANSWER])
    events, report = await talk.events()
    assert len(talk.host.made) == 3
    assert report.recoveries == ["unknown-tool"]
    assert items_of(events)[-1] == F("It is so.")


async def test_a_call_behind_an_opened_answer_is_neither_run_nor_shown() -> None:
    talk = hosting(Talk([other(1), "It is so.<|end|><|start|>assistant" + other(2)]), max_calls=0)
    events, report = await talk.events()
    assert items_of(events) == (F("It is so."),)
    assert len(calls_of(events)) == 1
    assert report.recoveries == ["call-limit", "tools-ended", "late-call"]
    assert talk.host.made == []


async def test_an_answer_that_was_given_is_not_opened_again() -> None:
    step = other(1).removesuffix("<|call|>") + "<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"
    talk = hosting(Talk([step]), max_calls=0)
    events, _ = await talk.events()
    assert items_of(events) == (F("So."),)
    assert len(talk.bases) == 1


async def test_a_call_is_given_up_when_the_time_is_over() -> None:
    class Deaf(Servers):
        async def call(self, *args: Any, deadline: float | None = None, **more: Any) -> Any:
            assert deadline is not None
            await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
            return ToolOutcome("Too late.", is_error=True)

    talk = hosting(Talk([other(1), "It is so.<|return|>"], Deaf()), total_s=0.05)
    events, report = await talk.events()
    assert calls_of(events) == [("docs", "search", "Too late.")]
    assert report.recoveries == ["tool-deadline", "tools-ended"]
    assert items_of(events) == (F("It is so."),)


# -- leaving, and other backends


async def test_leaving_cancels_the_call_that_is_made() -> None:
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
    assert talk.host.left == ["search"]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
async def test_another_backend_goes_on_behind_tools_that_were_run(whole: bool) -> None:
    talk = Talk([SEARCH, ANSWER])
    talk = replace(talk, turn=replace(talk.turn, whole=whole))
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


async def test_a_backend_that_is_gone_before_it_said_anything_is_replaced_though_tools_were_listed() -> None:
    talk = Talk([SEARCH, ANSWER])
    gone = talk.backend(failure=BackendUnavailable("gone"), name="gone")
    batches, report = await talk.batches(backends=[gone, talk.backend(name="other")])
    assert items_of([e for batch in batches for e in batch]) == (R("I look."), R("Now."), F("It is so."))
    assert report.backend == "other"
    assert talk.host.asked == ["docs"]


def test_every_rule_that_is_reported_is_documented() -> None:
    from unisono.core.recovery_rules import RULES
    from unisono.engine import steps
    from unisono.engine.server_tools import policy, tools

    reported = {*policy.REFUSALS, policy.NOT_REPEATED, tools.LEFT_OUT, steps.LATE_CALL, steps.ANALYSIS_ONLY}
    assert reported <= RULES.keys()


async def test_the_model_is_told_once_what_a_server_is() -> None:
    talk, about = Talk([ANSWER]), "Our\nproducts. <|end|>"
    await replace(talk, turn=replace(talk.turn, server_tools=ServerTools((replace(DOCS, description=about),)))).events()
    tokens = list(talk.bases[0].prompt.tokens)
    declared = ENCODING.decode(tokens)
    assert "// Our\n// products. <|end|>\n// \n// The tool search.\n" in declared
    assert "// The tool fetch.\n" in declared
    assert declared.count("Our") == 1
