"""What a run makes of a conversation before any backend is asked: its prompt's size, what is left out, and by whom."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.engine.scripted import ANSWER, ASKED, IDS, TEXT, THOUGHT, Line, Runner, Scripted, Stand, Step
from unisono.core.conversation import (
    AnswerForm,
    AssistantCall,
    AssistantMessage,
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
from unisono.engine.prompt import RenderedPrompt
from unisono.engine.request import GenerationReport, GenerationRequest, RequestFields
from unisono.engine.service import Engine
from unisono.errors import ContextTooLong, InvalidRequest
from unisono.harmony.encoding import Encoding, load_encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tools import ToolSet, plan_tools

WORDS = "one two three four five six seven eight nine ten "


def turns(count: int, *, words: int = 3) -> tuple[Item, ...]:
    """Turns of equal length, with a call in each of them, and a last question."""
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


LONG = replace(ASKED, items=turns(8))


def size_of(conversation: Conversation, encoding: Encoding) -> int:
    return len(Renderer(encoding).prompt(conversation, plan_tools(conversation.preamble.tools)))


async def run(encoding: Encoding, turn: GenerationRequest, told: Capabilities) -> tuple[Scripted, GenerationReport]:
    backend = Scripted(encoding, [Step(THOUGHT), Step("one<|return|>", FinishReason.STOP)], told)
    running = Runner(encoding, backend).engine.start(turn)
    async for _ in running:
        pass
    return backend, running.report


@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("left_out", [0, 1, 5, 7, 8])
async def test_as_few_oldest_turns_as_it_takes_are_left_out(
    left_out: int, told: Capabilities, encoding: Encoding
) -> None:
    kept = replace(LONG, items=LONG.items[4 * left_out :])
    context = size_of(kept, encoding) + 50
    turn = GenerationRequest("m", LONG, max_tokens=50, truncate=True)
    backend, report = await run(encoding, turn, replace(told, context=context))
    assert report.left_out == left_out
    first, second = (job.prompt for job in backend.jobs)
    assert list(first.tokens) == Renderer(encoding).prompt(kept, plan_tools(kept.preamble.tools))
    assert (first.text is not None) is (told is TEXT)
    # The answer's next step is opened behind the same prompt.
    begun = len(first.tokens) - len(encoding.encode_marked("<|start|>assistant"))
    assert list(second.tokens[:begun]) == list(first.tokens[:begun])


ROOMS: dict[str, tuple[int | None, int, int]] = {
    "a limit of its own": (50, 1_000, 50),
    "a limit above a quarter of the context": (900, 1_000, 250),
    "no limit in a small context": (None, 1_000, 250),
    "no limit in a large context": (None, 8_000, 1_024),
}


@pytest.mark.parametrize(("limit", "context", "wanted"), ROOMS.values(), ids=ROOMS)
async def test_an_answer_gets_room_where_turns_may_be_left_out(
    limit: int | None, context: int, wanted: int, encoding: Encoding
) -> None:
    conversation = replace(ASKED, items=turns(400, words=2))
    turn = GenerationRequest("m", conversation, max_tokens=limit, truncate=True)
    backend, report = await run(encoding, turn, replace(IDS, context=context))
    kept = len(backend.jobs[0].prompt.tokens)
    one = replace(conversation, items=conversation.items[4 * report.left_out - 4 :])
    assert kept <= context - wanted < size_of(one, encoding)


async def test_the_last_turn_stays_and_takes_what_room_there_is(encoding: Encoding) -> None:
    last = replace(LONG, items=LONG.items[-1:])
    turn = GenerationRequest("m", LONG, max_tokens=50, truncate=True, fields=RequestFields("input"))
    size = size_of(last, encoding)
    backend = Scripted(encoding, [Step("x", FinishReason.LENGTH)], replace(IDS, context=size + 1))
    running = Runner(encoding, backend).engine.start(turn)
    assert [batch async for batch in running]
    assert (running.report.left_out, backend.jobs[0].max_tokens) == (8, 1)
    full = Scripted(encoding, [Step("x")], replace(IDS, context=size))
    with pytest.raises(ContextTooLong) as refused:
        await anext(aiter(Runner(encoding, full).engine.start(turn)))
    assert refused.value.param == "input"
    assert f"resulted in {size} tokens" in refused.value.message
    assert full.jobs == []


async def test_nothing_is_left_out_unasked(encoding: Encoding) -> None:
    backend = Scripted(encoding, [Step(ANSWER)], replace(IDS, context=size_of(LONG, encoding)))
    with pytest.raises(ContextTooLong) as refused:
        await Runner(encoding, backend).ask(LONG)
    assert refused.value.param is None


async def test_what_was_left_out_of_an_answer_is_left_out_of_its_rest(encoding: Encoding) -> None:
    told = replace(IDS, context=size_of(replace(LONG, items=LONG.items[12:]), encoding) + 60)
    turn = GenerationRequest("m", LONG, max_tokens=50, truncate=True, seed="s")
    whole, report = await run(encoding, turn, told)
    backend = Scripted(encoding, [Step(ANSWER)], told)
    journal = encoding.encode_as_server(THOUGHT)
    resumed = Runner(encoding, backend).engine.start(replace(turn, journal=tuple(journal)))
    assert [batch async for batch in resumed]
    assert report.left_out == resumed.report.left_out == 3
    assert list(backend.jobs[0].prompt.tokens) == [*whole.jobs[0].prompt.tokens, *journal]


@pytest.mark.parametrize(
    "conversation", [ASKED, LONG, replace(ASKED, prefill="Once upon")], ids=["asked", "long", "open"]
)
async def test_counting_gives_the_size_of_the_prompt_that_is_sent(
    conversation: Conversation, encoding: Encoding
) -> None:
    backend = Scripted(encoding, [Step(THOUGHT + ANSWER)])
    runner = Runner(encoding, backend)
    counted = await runner.engine.count(GenerationRequest("m", conversation))
    assert backend.jobs == []
    await runner.ask(conversation)
    assert counted == len(backend.jobs[0].prompt.tokens)


FORM = AnswerForm("answer", {"type": "object"}, "", strict=True)
BEGUN: dict[str, Callable[[GenerationRequest], GenerationRequest]] = {
    "as it was counted": lambda turn: turn,
    "with another limit": lambda turn: replace(turn, max_tokens=7),
    "of another conversation": lambda turn: replace(turn, conversation=LONG),
    "in a form": lambda turn: replace(turn, form=FORM),
    "open": lambda turn: replace(turn, conversation=replace(ASKED, prefill="Once upon")),
    "behind what was said": lambda turn: replace(turn, seed="s", journal=tuple(IDS_OF_THOUGHT)),
}
IDS_OF_THOUGHT = load_encoding().encode_as_server(THOUGHT)


@pytest.mark.parametrize("told", [IDS, TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
async def test_a_turn_that_was_counted_begins_like_one_that_was_not(
    begun: Callable[[GenerationRequest], GenerationRequest], told: Capabilities, encoding: Encoding
) -> None:
    jobs, demands = [], []
    for counts in (False, True):
        backend = Scripted(encoding, [Step(ANSWER)] * 3, told)
        runner = Runner(encoding, backend)
        turn = GenerationRequest("m", ASKED, tenant="team")
        if counts:
            await runner.engine.count(turn)
        async for _ in runner.engine.start(begun(turn)):
            pass
        jobs.append([job.prompt for job in backend.jobs])
        demands.append(list(runner.pool.demands))
    assert jobs[0] == jobs[1]
    assert demands[0] == demands[1]


async def test_a_counted_prompt_is_not_rendered_again(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = GenerationRequest("m", ASKED)
    runner = Runner(encoding, Scripted(encoding, [Step(ANSWER)] * 2))
    rendered: list[Conversation] = []
    prompt = Renderer.prompt

    def counted(renderer: Renderer, conversation: Conversation, tools: ToolSet) -> list[int]:
        rendered.append(conversation)
        return prompt(renderer, conversation, tools)

    monkeypatch.setattr(Renderer, "prompt", counted)
    await runner.engine.count(turn)
    assert len(rendered) == 1
    async for _ in runner.engine.start(replace(turn, max_tokens=9)):
        pass
    assert len(rendered) == 1
    async for _ in runner.engine.start(replace(turn, conversation=replace(ASKED))):
        pass
    assert len(rendered) == 2


async def test_counted_prompts_are_dropped_with_their_request() -> None:
    table, turn = CountedPrompts(), GenerationRequest("m", ASKED)
    copy = replace(turn, max_tokens=9)
    table.record(turn, PreparedConversation(ASKED, plan_tools(()), rendered=RenderedPrompt(Prompt([1]), ())))
    del turn
    gc.collect()
    assert table.find(copy) is not None
    del copy
    gc.collect()
    assert len(table) == 0


async def test_counting_knows_what_the_model_really_said(encoding: Encoding) -> None:
    """The ids of an answer that is remembered are counted, whatever its text would come to."""
    backend = Scripted(encoding, [Step("<|channel|>final<|message|>one  two<|return|>"), Step(ANSWER)], per_chunk=1)
    runner = Runner(encoding, backend)
    await runner.ask(ASKED)
    asked = replace(ASKED, items=(*ASKED.items, AssistantMessage("one  two"), UserMessage("And?")))
    counted = await runner.engine.count(GenerationRequest("m", asked, tenant="team"))
    await runner.ask(asked)
    assert counted == len(backend.jobs[1].prompt.tokens)


WRONG = FunctionTool("two\nlines")
PLACES = {"tools.{index}.function": "tools.0.function.name", "tools.{index}": "tools.0.name"}


@pytest.mark.parametrize(("at", "param"), PLACES.items(), ids=PLACES)
async def test_a_refused_tool_is_named_where_the_client_wrote_it(at: str, param: str, encoding: Encoding) -> None:
    runner = Runner(encoding, Scripted(encoding, [Step(ANSWER)]))
    turn = GenerationRequest("m", Conversation(Preamble(tools=(WRONG,)), ASKED.items), fields=RequestFields(tool=at))
    for refused in (runner.engine.count(turn), anext(aiter(runner.engine.start(turn)))):
        with pytest.raises(InvalidRequest) as refusal:
            await refused
        assert refusal.value.param == param


async def test_a_dated_conversation_keeps_its_day_and_leaves_no_trace(encoding: Encoding) -> None:
    memory = ConversationCache()
    asked = Conversation(Preamble(date="2026-01-01"), ASKED.items)
    answered = replace(asked, items=(*asked.items, AssistantMessage("ok"), UserMessage("And?")))
    later = replace(answered, preamble=Preamble(date="2026-01-09"))
    assert memory.recall("team", asked, dated=True) == asked
    assert memory.recall("team", later).preamble.date == "2026-01-09"
    memory.recall("team", asked)
    assert memory.recall("team", later).preamble.date == "2026-01-01"
    assert memory.recall("team", later, dated=True) == later


@dataclass
class Noting(Line):
    """A pool that notes what it is asked."""

    asked: RouteRequest | None = None

    def route(self, ask: RouteRequest) -> Stand:
        self.asked = ask
        return super().route(ask)


async def test_a_turn_is_chosen_for_by_what_it_belongs_to(encoding: Encoding) -> None:
    pool = Noting([Scripted(encoding, [Step(ANSWER)])])
    engine = Engine(
        EngineDeps(
            encoding=encoding,
            renderer=Renderer(encoding),
            pool=pool,
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
        )
    )
    async for _ in engine.start(GenerationRequest("m", ASKED, sticky="conv_1", tenant="team")):
        pass
    assert pool.asked == RouteRequest("m", owner="team", sticky="conv_1")


@pytest.mark.parametrize("seed", ["", "a seed"], ids=["random", "derived"])
async def test_ids_of_calls_follow_from_the_seed(seed: str, encoding: Encoding) -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    runner = Runner(encoding, Scripted(encoding, [Step(call + "<|start|>assistant" + call)]))
    events = [event async for batch in runner.engine.start(GenerationRequest("m", ASKED, seed=seed)) for event in batch]
    made = [event.item.call_id for event in events if isinstance(event, Closed) and isinstance(event.item, ToolCall)]
    ids = DerivedIds(seed, "call")
    count = itertools.count()
    assert made == [ids("call_") if seed else f"call_{next(count)}" for _ in range(2)]
