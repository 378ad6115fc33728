"""Preparation of a conversation: prompt size, truncation, counting and route request."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.engine.scripted import ANSWER, CONVERSATION, IDS, TEXT, THOUGHT, Line, LineRoute, Runner, Scripted, Step
from unisono.core.conversation import (
    SUMMARY_HEADING,
    AnswerForm,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    FunctionTool,
    Item,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Closed, ToolCall
from unisono.core.generation import Capabilities, FinishReason, Prompt
from unisono.core.ids import DerivedIds
from unisono.core.route_protocol import RouteRequest
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import CountedPrompts, EngineDeps, PreparedConversation
from unisono.engine.generation import Engine
from unisono.engine.prompt import RenderedPrompt
from unisono.engine.request import (
    AnswerOptions,
    GenerationReport,
    GenerationRequest,
    PromptOptions,
    RequestFields,
    RequestOrigin,
    Resumption,
    RoutingOptions,
)
from unisono.engine.truncation import SHORTENED, truncate
from unisono.errors import ContextTooLong, InvalidRequest
from unisono.harmony.encoding import Encoding, load_encoding
from unisono.harmony.render import PromptPlan, Renderer
from unisono.harmony.tool_declarations import ToolSet, plan_tools

WORDS = "one two three four five six seven eight nine ten "


def turns(count: int, *, words: int = 3) -> tuple[Item, ...]:
    """Return turns of equal length, each with a call, and a last question."""
    items: list[Item] = []
    for n in range(count):
        call = AssistantCall(f"call_{n}", "f", "{}")
        items += (
            UserMessage(WORDS * words),
            call,
            ToolResult(call.call_id, "f", "x"),
            AssistantMessage(f"Answer {n}."),
        )
    return (*items, UserMessage("Last?"))


LONG = replace(CONVERSATION, items=turns(8))


def size_of(conversation: Conversation, encoding: Encoding) -> int:
    return len(Renderer(encoding).prompt(conversation, plan_tools(conversation.preamble.tools)))


async def run(
    encoding: Encoding, request: GenerationRequest, capabilities: Capabilities
) -> tuple[Scripted, GenerationReport]:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one<|return|>", FinishReason.STOP)], capabilities)
    stream = Runner(encoding, backend).engine.start(request)
    async for _ in stream:
        pass
    return backend, stream.report


@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("left_out", [0, 1, 3, 4, 5, 7, 20, 31, 32])
async def test_truncation_drops_the_fewest_oldest_items(
    left_out: int, capabilities: Capabilities, encoding: Encoding
) -> None:
    remaining = replace(LONG, items=LONG.items[left_out:])
    context = size_of(remaining, encoding) + 50
    request = GenerationRequest("m", LONG, answer=AnswerOptions(max_tokens=50), prompt=PromptOptions(truncate=True))
    backend, report = await run(encoding, request, replace(capabilities, context=context))
    assert report.facts.left_out == left_out
    first, second = (job.prompt for job in backend.jobs)
    assert list(first.tokens) == Renderer(encoding).prompt(remaining, plan_tools(remaining.preamble.tools))
    assert (first.text is not None) is (capabilities is TEXT)
    # The next step of the answer begins after the same prompt.
    prefix_length = len(first.tokens) - len(encoding.encode_marked("<|start|>assistant"))
    assert list(second.tokens[:prefix_length]) == list(first.tokens[:prefix_length])


ROOM_FOR_ANSWER: dict[str, tuple[int | None, int, int]] = {
    "limit below a quarter of the context": (50, 1_000, 50),
    "limit above a quarter of the context": (900, 1_000, 250),
    "no limit, small context": (None, 1_000, 250),
    "no limit, large context": (None, 8_000, 1_024),
}


@pytest.mark.parametrize(("limit", "context", "room"), ROOM_FOR_ANSWER.values(), ids=ROOM_FOR_ANSWER)
async def test_truncation_leaves_room_for_the_answer(
    limit: int | None, context: int, room: int, encoding: Encoding
) -> None:
    conversation = replace(CONVERSATION, items=turns(400, words=2))
    request = GenerationRequest(
        "m", conversation, answer=AnswerOptions(max_tokens=limit), prompt=PromptOptions(truncate=True)
    )
    backend, report = await run(encoding, request, replace(IDS, context=context))
    prompt_tokens = len(backend.jobs[0].prompt.tokens)
    # A call and its result are dropped together.
    dropped = conversation.items[: report.facts.left_out]
    unit = 2 if isinstance(dropped[-1], ToolResult) else 1
    with_one_more_unit = replace(conversation, items=conversation.items[len(dropped) - unit :])
    assert prompt_tokens <= context - room < size_of(with_one_more_unit, encoding)


async def test_the_last_message_is_never_dropped(encoding: Encoding) -> None:
    last = replace(LONG, items=LONG.items[-1:])
    request = GenerationRequest(
        "m",
        LONG,
        answer=AnswerOptions(max_tokens=50),
        prompt=PromptOptions(truncate=True, fields=RequestFields("input")),
    )
    size = size_of(last, encoding)
    backend = Scripted(encoding, [Step("x", FinishReason.LENGTH)], replace(IDS, context=size + 1))
    stream = Runner(encoding, backend).engine.start(request)
    assert [batch async for batch in stream]
    assert (stream.report.facts.left_out, backend.jobs[0].max_tokens) == (32, 1)
    full = Scripted(encoding, [Step("x")], replace(IDS, context=size))
    with pytest.raises(ContextTooLong) as raised:
        await anext(aiter(Runner(encoding, full).engine.start(request)))
    assert raised.value.param == "input"
    assert f"resulted in {size} tokens" in raised.value.message
    assert full.jobs == []


TASK = UserMessage("The task. " + WORDS)


def work(count: int, *, words: int = 10) -> tuple[Item, ...]:
    """Return the calls of one long turn, each with its reasoning and its result."""
    return tuple(
        item
        for n in range(count)
        for item in (
            AssistantReasoning(f"Thought {n}."),
            AssistantCall(f"call_{n}", "f", f'{{"n":{n}}}'),
            ToolResult(f"call_{n}", "f", f"Found {n}. {WORDS * words}"),
        )
    )


async def shortened(
    encoding: Encoding, items: tuple[Item, ...], context: int, *, for_summary: bool = False
) -> tuple[str, GenerationReport]:
    """Return the prompt for `items` in a context window of `context` tokens, and the report."""
    options = PromptOptions(truncate=True, for_summary=for_summary)
    request = GenerationRequest("m", replace(CONVERSATION, items=items), AnswerOptions(max_tokens=20), prompt=options)
    backend, report = await run(encoding, request, replace(IDS, context=context))
    return encoding.decode(backend.jobs[0].prompt.tokens), report


ASK = UserMessage("Sum up our conversation.")


@pytest.mark.parametrize("for_summary", [False, True], ids=["truncation", "summary"])
async def test_a_long_turn_keeps_its_task_and_its_newest_calls(for_summary: bool, encoding: Encoding) -> None:
    old = (UserMessage("The old task."), *work(2), AssistantMessage("Done."))
    summary = UserMessage(SUMMARY_HEADING + "The summary.")
    end = (ASK,) if for_summary else ()
    kept = (summary, TASK, *work(12)[18:], *end)
    context = size_of(replace(CONVERSATION, items=kept), encoding) + 20
    prompt, report = await shortened(encoding, (*old, summary, TASK, *work(12), *end), context, for_summary=for_summary)
    assert (report.facts.left_out, report.facts.shortened) == (len(old) + 18, 0)
    assert prompt == encoding.decode(
        Renderer(encoding).prompt(replace(CONVERSATION, items=kept), plan_tools(CONVERSATION.preamble.tools))
    )


@pytest.mark.parametrize("position", ["task", "result", "arguments", "both"])
async def test_a_summary_shortens_texts_that_are_too_long_alone(position: str, encoding: Encoding) -> None:
    # The bytes of each of these two characters belong to several tokens.
    long = "Begin. " + "\U0001f9ff\u0bf8 word " * 3_000 + "End."
    task = UserMessage("The task. " + (long if position in ("task", "both") else ""))
    call = AssistantCall("c", "f", long if position == "arguments" else "{}")
    result = ToolResult("c", "f", "The result. " + (long if position in ("result", "both") else ""))
    prompt, report = await shortened(
        encoding, (UserMessage("Old."), AssistantMessage("Old."), task, call, result, ASK), 2_000, for_summary=True
    )
    count = 2 if position == "both" else 1
    assert (report.facts.left_out, report.facts.shortened) == (2, count)
    assert [prompt.count(text) for text in ("The task. ", "The result. ", ASK.text)] == [1, 1, 1]
    assert [prompt.count(text) for text in ("Begin.", SHORTENED, "End.")] == [count] * 3
    assert "\ufffd" not in prompt
    # The prompt fills the window, except the room for the answer.
    assert 1_850 <= len(encoding.encode_marked(prompt)) <= 1_980


async def test_truncation_never_shortens_a_text(encoding: Encoding) -> None:
    with pytest.raises(ContextTooLong):
        await shortened(encoding, (TASK, *work(2, words=100)), 1_000)


@pytest.mark.parametrize("for_summary", [False, True], ids=["truncation", "summary"])
async def test_a_conversation_that_fits_is_rendered_once(
    for_summary: bool, encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Conversation] = []
    prompt = Renderer.prompt

    def counted(renderer: Renderer, conversation: Conversation, tools: ToolSet, plan: PromptPlan | None) -> list[int]:
        rendered.append(conversation)
        return prompt(renderer, conversation, tools, plan)

    monkeypatch.setattr(Renderer, "prompt", counted)
    renderer, tools = Renderer(encoding), plan_tools(LONG.preamble.tools)
    fitted = await truncate(renderer, LONG, tools, 100_000, for_summary=for_summary)
    assert fitted.conversation is LONG
    assert rendered == [LONG]


async def test_a_long_conversation_is_rejected_without_truncation(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(ANSWER)], replace(IDS, context=size_of(LONG, encoding)))
    with pytest.raises(ContextTooLong) as raised:
        await Runner(encoding, backend).ask(LONG)
    assert raised.value.param is None


async def test_a_resumed_answer_drops_the_same_items(encoding: Encoding) -> None:
    capabilities = replace(IDS, context=size_of(replace(LONG, items=LONG.items[12:]), encoding) + 50)
    request = GenerationRequest(
        "m",
        LONG,
        answer=AnswerOptions(max_tokens=50),
        prompt=PromptOptions(truncate=True),
        resumption=Resumption(seed="s"),
    )
    first, report = await run(encoding, request, capabilities)
    backend = Scripted(encoding, [Step(ANSWER)], capabilities)
    journal = encoding.encode_as_server(THOUGHT)
    resumed = Runner(encoding, backend).engine.start(
        replace(request, resumption=replace(request.resumption, journal=tuple(journal)))
    )
    assert [batch async for batch in resumed]
    assert report.facts.left_out == resumed.report.facts.left_out == 12
    assert list(backend.jobs[0].prompt.tokens) == [*first.jobs[0].prompt.tokens, *journal]


@pytest.mark.parametrize(
    "conversation", [CONVERSATION, LONG, replace(CONVERSATION, prefill="Once upon")], ids=["short", "long", "prefilled"]
)
async def test_count_returns_the_size_of_the_sent_prompt(conversation: Conversation, encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(THOUGHT + ANSWER)])
    runner = Runner(encoding, backend)
    counted = await runner.engine.count(GenerationRequest("m", conversation))
    assert backend.jobs == []
    await runner.ask(conversation)
    assert counted == len(backend.jobs[0].prompt.tokens)


FORM = AnswerForm("answer", {"type": "object"}, "", strict=True)
CHANGES: dict[str, Callable[[GenerationRequest], GenerationRequest]] = {
    "unchanged": lambda request: request,
    "another limit": lambda request: replace(request, answer=replace(request.answer, max_tokens=7)),
    "another conversation": lambda request: replace(request, conversation=LONG),
    "response format": lambda request: replace(request, answer=replace(request.answer, form=FORM)),
    "prefill": lambda request: replace(request, conversation=replace(CONVERSATION, prefill="Once upon")),
    "journal": lambda request: replace(
        request, resumption=replace(request.resumption, seed="s", journal=tuple(IDS_OF_THOUGHT))
    ),
}
IDS_OF_THOUGHT = load_encoding().encode_as_server(THOUGHT)


@pytest.mark.parametrize("capabilities", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_counting_a_request_does_not_change_its_prompt(
    change: Callable[[GenerationRequest], GenerationRequest], capabilities: Capabilities, encoding: Encoding
) -> None:
    jobs, demands = [], []
    for is_counted in (False, True):
        backend = Scripted(encoding, [Step(ANSWER)] * 3, capabilities)
        runner = Runner(encoding, backend)
        request = GenerationRequest("m", CONVERSATION, origin=RequestOrigin(tenant="team"))
        if is_counted:
            await runner.engine.count(request)
        async for _ in runner.engine.start(change(request)):
            pass
        jobs.append([job.prompt for job in backend.jobs])
        demands.append(list(runner.pool.demands))
    assert jobs[0] == jobs[1]
    assert demands[0] == demands[1]


async def test_a_counted_prompt_is_not_rendered_again(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    request = GenerationRequest("m", CONVERSATION)
    runner = Runner(encoding, Scripted(encoding, [Step(ANSWER)] * 2))
    rendered: list[Conversation] = []
    prompt = Renderer.prompt

    def counted(renderer: Renderer, conversation: Conversation, tools: ToolSet, plan: PromptPlan | None) -> list[int]:
        rendered.append(conversation)
        return prompt(renderer, conversation, tools, plan)

    monkeypatch.setattr(Renderer, "prompt", counted)
    await runner.engine.count(request)
    assert len(rendered) == 1
    async for _ in runner.engine.start(replace(request, answer=replace(request.answer, max_tokens=9))):
        pass
    assert len(rendered) == 1
    async for _ in runner.engine.start(replace(request, conversation=replace(CONVERSATION))):
        pass
    assert len(rendered) == 2


async def test_counted_prompts_are_dropped_with_their_request() -> None:
    counted_prompts, request = CountedPrompts(), GenerationRequest("m", CONVERSATION)
    copy = replace(request, answer=replace(request.answer, max_tokens=9))
    counted_prompts.record(
        request, PreparedConversation(CONVERSATION, plan_tools(()), rendered=RenderedPrompt(Prompt([1]), ()))
    )
    del request
    gc.collect()
    assert counted_prompts.find(copy) is not None
    del copy
    gc.collect()
    assert len(counted_prompts) == 0


async def test_counting_uses_cached_tokens_of_earlier_answers(encoding: Encoding) -> None:
    # The cached token ids are counted, although their text would be tokenised differently.
    backend = Scripted(encoding, [Step("<|channel|>final<|message|>one  two<|return|>"), Step(ANSWER)], per_chunk=1)
    runner = Runner(encoding, backend)
    await runner.ask(CONVERSATION)
    continued = replace(CONVERSATION, items=(*CONVERSATION.items, AssistantMessage("one  two"), UserMessage("And?")))
    counted = await runner.engine.count(GenerationRequest("m", continued, origin=RequestOrigin(tenant="team")))
    await runner.ask(continued)
    assert counted == len(backend.jobs[1].prompt.tokens)


INVALID_TOOL = FunctionTool("two\nlines")
TOOL_FIELDS = {"tools.{index}.function": "tools.0.function.name", "tools.{index}": "tools.0.name"}


@pytest.mark.parametrize(("tool_field", "param"), TOOL_FIELDS.items(), ids=TOOL_FIELDS)
async def test_an_invalid_tool_is_reported_at_its_request_field(
    tool_field: str, param: str, encoding: Encoding
) -> None:
    runner = Runner(encoding, Scripted(encoding, [Step(ANSWER)]))
    request = GenerationRequest(
        "m",
        Conversation(Preamble(tools=(INVALID_TOOL,)), CONVERSATION.items),
        prompt=PromptOptions(fields=RequestFields(tool=tool_field)),
    )
    for call in (runner.engine.count(request), anext(aiter(runner.engine.start(request)))):
        with pytest.raises(InvalidRequest) as raised:
            await call
        assert raised.value.param == param


async def test_a_dated_conversation_keeps_its_date_and_is_not_cached(encoding: Encoding) -> None:
    cache = ConversationCache()
    conversation = Conversation(Preamble(date="2026-01-01"), CONVERSATION.items)
    answered = replace(conversation, items=(*conversation.items, AssistantMessage("ok"), UserMessage("And?")))
    later = replace(answered, preamble=Preamble(date="2026-01-09"))
    assert cache.recall("team", conversation, dated=True) == conversation
    assert cache.recall("team", later).preamble.date == "2026-01-09"
    cache.recall("team", conversation)
    assert cache.recall("team", later).preamble.date == "2026-01-01"
    assert cache.recall("team", later, dated=True) == later


@dataclass
class RecordingPool(Line):
    """Pool that records the last route request."""

    request: RouteRequest | None = None

    def route(self, ask: RouteRequest) -> LineRoute:
        self.request = ask
        return super().route(ask)


async def test_the_route_request_has_model_tenant_and_sticky_key(encoding: Encoding) -> None:
    pool = RecordingPool([Scripted(encoding, [Step(ANSWER)])])
    engine = Engine(
        EngineDeps(
            encoding=encoding,
            renderer=Renderer(encoding),
            pool=pool,
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
        )
    )
    async for _ in engine.start(
        GenerationRequest(
            "m", CONVERSATION, routing=RoutingOptions(sticky="conv_1"), origin=RequestOrigin(tenant="team")
        )
    ):
        pass
    assert pool.request == RouteRequest("m", owner="team", sticky="conv_1")


@pytest.mark.parametrize("seed", ["", "a seed"], ids=["random", "derived"])
async def test_call_ids_are_derived_from_the_seed(seed: str, encoding: Encoding) -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    runner = Runner(encoding, Scripted(encoding, [Step(call + "<|start|>assistant" + call)]))
    events = [
        event
        async for batch in runner.engine.start(GenerationRequest("m", CONVERSATION, resumption=Resumption(seed=seed)))
        for event in batch
    ]
    call_ids = [
        event.item.call_id for event in events if isinstance(event, Closed) and isinstance(event.item, ToolCall)
    ]
    ids = DerivedIds(seed, "call")
    count = itertools.count()
    assert call_ids == [ids("call_") if seed else f"call_{next(count)}" for _ in range(2)]
