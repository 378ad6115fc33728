"""Conversation cache: exact tokens of earlier turns of stateless conversations."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    Item,
    Phase,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Closed, HostedCall, Reasoning, Text, ToolCall
from unisono.engine.conversation_cache import ConversationCache

ASK = UserMessage("Weather in Paris?")
THOUGHT = Closed(Reasoning(0), "Use the tool.", (1, 2))
PREAMBLE = Closed(Text(1, Phase.COMMENTARY), "I look.", (3,))
CALL = Closed(ToolCall(2, 0, "call_1", "get_weather"), '{"location":"Paris"}', (4, 5))
EXACT = (
    AssistantReasoning("Use the tool.", (1, 2)),
    AssistantMessage("I look.", Phase.COMMENTARY, (3,)),
    AssistantCall("call_1", "get_weather", '{"location":"Paris"}', (4, 5)),
)
SENT_CALL = AssistantCall("call_1", "get_weather", '{"location":"Paris"}')
RESULT = ToolResult("call_1", "get_weather", "sunny")

SENT_BACK: dict[str, tuple[tuple[Item, ...], bool]] = {
    "the whole turn": (
        (AssistantReasoning("Use the tool."), AssistantMessage("I look.", Phase.COMMENTARY), SENT_CALL),
        True,
    ),
    "only the call": ((SENT_CALL,), True),
    "no reasoning": ((AssistantMessage("I look.", Phase.COMMENTARY), SENT_CALL), True),
    "other reasoning": ((AssistantReasoning("No."), SENT_CALL), False),
    "another preamble": ((AssistantMessage("I looked.", Phase.COMMENTARY), SENT_CALL), False),
    "the same arguments with other whitespace": ((replace(SENT_CALL, arguments='{ "location": "Paris" }'),), True),
    "other arguments": ((replace(SENT_CALL, arguments='{"location":"Rome"}'),), False),
    "truncated arguments": ((replace(SENT_CALL, arguments='{"location":"Paris"'),), False),
    "another name": ((replace(SENT_CALL, name="search"),), False),
    "another id": ((replace(SENT_CALL, call_id="call_2"),), False),
}


def conversation(*items: Item, date: str = "2026-01-01") -> Conversation:
    return Conversation(Preamble(date=date), items)


@pytest.mark.parametrize(("sent", "is_known"), SENT_BACK.values(), ids=SENT_BACK)
def test_a_turn_is_recognised_by_its_call_id_and_the_items_sent_back(sent: tuple[Item, ...], is_known: bool) -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, PREAMBLE, CALL])
    found = cache.recall("team", conversation(ASK, *sent, RESULT))
    assert found.items == (ASK, *(EXACT if is_known else sent), RESULT)


def test_a_call_is_recognised_with_numbers_in_double_precision() -> None:
    cache = ConversationCache()
    cache.record("team", [replace(CALL, text='{"wei":123456789012345678901234567890}')])
    sent = replace(SENT_CALL, arguments='{"wei":1.2345678901234568e29}')
    assert cache.recall("team", conversation(ASK, sent, RESULT)).items[1] == replace(
        EXACT[2], arguments='{"wei":123456789012345678901234567890}'
    )


# Arguments that the client sends back for `{"path":"a","all":true}`, and if they are those of the call.
SENT_ARGUMENTS = {
    '{"path":"a","all":true,"replace_all":false}': True,
    '{"all":true,"path":"a","limit":null,"note":"","more":[]}': True,
    '{"path":"a","all":true,"replace_all":true}': False,
    '{"path":"a","all":false}': False,
    '{"path":"a"}': False,
    '{"path":"","all":true}': False,
    "": False,
    "[]": False,
}


@pytest.mark.parametrize(("arguments", "is_known"), SENT_ARGUMENTS.items())
def test_a_call_is_recognised_with_defaults_that_the_client_added(arguments: str, is_known: bool) -> None:
    cache = ConversationCache()
    cache.record("team", [replace(CALL, text='{"path":"a","all":true}')])
    sent = replace(SENT_CALL, arguments=arguments)
    found = cache.recall("team", conversation(ASK, sent, RESULT)).items[1]
    assert found == (replace(EXACT[2], arguments='{"path":"a","all":true}') if is_known else sent)


@pytest.mark.parametrize("blank", ["", " "])
def test_a_call_without_arguments_is_recognised_if_the_client_sends_a_blank_text(blank: str) -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, replace(CALL, text="{}")])
    found = cache.recall("team", conversation(ASK, replace(SENT_CALL, arguments=blank), RESULT))
    assert found.items == (ASK, EXACT[0], replace(EXACT[2], arguments="{}"), RESULT)


def test_entries_are_separate_for_each_tenant() -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, PREAMBLE, CALL])
    sent = conversation(ASK, SENT_CALL, RESULT)
    assert cache.recall("other", sent) == sent


def test_an_answer_is_recognised_by_its_text() -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, Closed(Text(1, Phase.FINAL), "Sunny.", (7, 8))])
    found = cache.recall("team", conversation(ASK, AssistantMessage("Sunny."), UserMessage("Thanks")))
    assert found.items[1] == AssistantMessage("Sunny.", Phase.FINAL, (7, 8))
    other = conversation(ASK, AssistantMessage("Sunny. "), UserMessage("Thanks"))
    assert cache.recall("team", other) == other


MESSAGES = [PREAMBLE, THOUGHT, Closed(Text(2, Phase.FINAL), "Sunny.", (7, 8)), Closed(Text(3, Phase.FINAL), "!", (9,))]
JOINED: dict[str, tuple[str, tuple[Item, ...]]] = {
    "all messages": (
        "I look.\n\nSunny.\n\n!",
        (
            AssistantMessage("I look.", Phase.COMMENTARY, (3,)),
            AssistantMessage("Sunny.", Phase.FINAL, (7, 8)),
            AssistantMessage("!", Phase.FINAL, (9,)),
        ),
    ),
    "one message": ("Sunny.", (AssistantMessage("Sunny.", Phase.FINAL, (7, 8)),)),
    "another separator": ("I look.Sunny.!", (AssistantMessage("I look.Sunny.!"),)),
}


@pytest.mark.parametrize(("sent", "expected"), JOINED.values(), ids=JOINED)
def test_messages_sent_back_as_one_text_are_recognised(sent: str, expected: tuple[Item, ...]) -> None:
    cache = ConversationCache()
    cache.record("team", MESSAGES)
    recalled = cache.recall("team", conversation(ASK, AssistantMessage(sent), UserMessage("Thanks")))
    assert recalled.items == (ASK, *expected, UserMessage("Thanks"))


def test_a_call_is_recognised_by_several_messages_sent_back_as_one_text() -> None:
    cache = ConversationCache()
    second = Closed(Text(2, Phase.COMMENTARY), "In Paris.", (6,))
    cache.record("team", [PREAMBLE, second, CALL])
    sent = AssistantMessage("I look.\n\nIn Paris.", Phase.COMMENTARY)
    recalled = cache.recall("team", conversation(ASK, sent, SENT_CALL, RESULT))
    assert recalled.items[1:4] == (EXACT[1], AssistantMessage("In Paris.", Phase.COMMENTARY, (6,)), EXACT[2])


def test_each_of_several_calls_of_one_turn_is_found() -> None:
    cache = ConversationCache()
    second = Closed(ToolCall(3, 1, "call_2", "get_weather"), "{}", (6,))
    cache.record("team", [THOUGHT, PREAMBLE, CALL, second])
    sent_second = AssistantCall("call_2", "get_weather", "{}")
    found = cache.recall("team", conversation(ASK, SENT_CALL, RESULT, sent_second, ToolResult("call_2", "g", "x")))
    assert found.items[1:4] == EXACT
    assert found.items[5] == replace(sent_second, tokens=(6,))


AGAIN = Closed(Reasoning(3), "Now Rome.", (10,))
NEXT = Closed(Text(4, Phase.COMMENTARY), "And Rome.", (11,))
SECOND = Closed(ToolCall(5, 1, "call_2", "get_weather"), '{"location":"Rome"}', (12,))
EXACT_SECOND = (
    AssistantReasoning("Now Rome.", (10,)),
    AssistantMessage("And Rome.", Phase.COMMENTARY, (11,)),
    AssistantCall("call_2", "get_weather", '{"location":"Rome"}', (12,)),
)
BOTH_THOUGHTS = AssistantReasoning("Use the tool.Now Rome.")
BOTH_PREAMBLES = AssistantMessage("I look.\n\nAnd Rome.", Phase.COMMENTARY)
CHANGED = AssistantReasoning("Use the tool. Now Rome.")
SENT_SECOND, SECOND_RESULT = replace(EXACT_SECOND[2], tokens=()), ToolResult("call_2", "get_weather", "rain")
# Items that the client sends before two calls, and the items that are recalled up to the first and the second call.
PARALLEL_CALLS: dict[str, tuple[tuple[Item, ...], tuple[Item, ...], tuple[Item, ...]]] = {
    "all reasoning and preambles": ((BOTH_THOUGHTS, BOTH_PREAMBLES), EXACT, EXACT_SECOND),
    "all reasoning": ((BOTH_THOUGHTS,), EXACT, EXACT_SECOND),
    "all preambles": ((BOTH_PREAMBLES,), EXACT, EXACT_SECOND),
    "reasoning before the first call": ((AssistantReasoning("Use the tool."),), EXACT, EXACT_SECOND),
    "nothing": ((), EXACT, EXACT_SECOND),
    "changed reasoning": ((CHANGED,), (CHANGED, SENT_CALL), (SENT_SECOND,)),
    "changed reasoning and all preambles": (
        (CHANGED, BOTH_PREAMBLES),
        (CHANGED, BOTH_PREAMBLES, SENT_CALL),
        (SENT_SECOND,),
    ),
    "a part of the reasoning": (
        (AssistantReasoning("Use the tool.Now"),),
        (AssistantReasoning("Use the tool.Now"), SENT_CALL),
        (SENT_SECOND,),
    ),
}


@pytest.mark.parametrize(("texts", "first", "second"), PARALLEL_CALLS.values(), ids=PARALLEL_CALLS)
def test_no_text_appears_twice_if_a_message_with_several_calls_is_sent_back(
    texts: tuple[Item, ...], first: tuple[Item, ...], second: tuple[Item, ...]
) -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, PREAMBLE, CALL, AGAIN, NEXT, SECOND])
    sent = conversation(ASK, *texts, SENT_CALL, RESULT, SENT_SECOND, SECOND_RESULT)
    assert cache.recall("team", sent).items == (ASK, *first, RESULT, *second, SECOND_RESULT)


OTHER_CALLS: dict[str, tuple[AssistantCall, AssistantCall]] = {
    "the first call has other arguments": (replace(SENT_CALL, arguments="{}"), SENT_SECOND),
    "the first call has another id": (replace(SENT_CALL, call_id="call_x"), SENT_SECOND),
    "the second call has other arguments": (SENT_CALL, replace(SENT_SECOND, arguments="{}")),
    "the second call has another name": (SENT_CALL, replace(SENT_SECOND, name="search")),
    "the second call has another id": (SENT_CALL, replace(SENT_SECOND, call_id="call_x")),
    "the calls are in another order": (SENT_SECOND, SENT_CALL),
}


@pytest.mark.parametrize(("first", "second"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_a_message_with_a_changed_call_keeps_the_texts_that_the_client_sent(
    first: AssistantCall, second: AssistantCall
) -> None:
    cache = ConversationCache()
    third = Closed(ToolCall(7, 2, "call_3", "get_weather"), "{}", (14,))
    cache.record("team", [THOUGHT, PREAMBLE, CALL, AGAIN, NEXT, SECOND, Closed(Reasoning(6), "Now all.", (13,)), third])
    thoughts = AssistantReasoning("Use the tool.Now Rome.Now all.")
    sent = (ASK, thoughts, BOTH_PREAMBLES, first, RESULT, second, SECOND_RESULT, replace(SENT_CALL, call_id="call_3"))
    assert cache.recall("team", conversation(*sent)).items == sent
    sent = (*sent[:-1], AssistantCall("call_3", "get_weather", "{}"))
    assert cache.recall("team", conversation(*sent)).items == sent


@pytest.mark.parametrize("call_id", ["call_x", "call_1"])
def test_reasoning_is_restored_after_an_unknown_or_changed_call_with_reasoning(call_id: str) -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, CALL])
    cache.record("team", [AGAIN, SECOND])
    cache.record("team", [THOUGHT, Closed(ToolCall(1, 0, "call_3", "get_weather"), "{}", (12,))])
    other = (AssistantReasoning("Other."), AssistantCall(call_id, "get_weather", "{}"), ToolResult(call_id, "g", "x"))
    third, third_result = AssistantCall("call_3", "get_weather", "{}"), ToolResult("call_3", "g", "x")
    sent = conversation(ASK, *other, SENT_SECOND, SECOND_RESULT, third, third_result)
    second = (EXACT_SECOND[0], EXACT_SECOND[2], SECOND_RESULT)
    expected = (ASK, *other, *second, EXACT[0], replace(third, tokens=(12,)), third_result)
    assert cache.recall("team", sent).items == expected


def test_reasoning_is_restored_after_a_message_whose_reasoning_was_changed() -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, CALL])
    cache.record("team", [AGAIN, SECOND])
    sent = conversation(ASK, CHANGED, SENT_CALL, RESULT, ASK, SENT_SECOND, SECOND_RESULT)
    expected = (ASK, CHANGED, SENT_CALL, RESULT, ASK, EXACT_SECOND[0], EXACT_SECOND[2], SECOND_RESULT)
    assert cache.recall("team", sent).items == expected


LABEL = "builtin:browser"
FOUND = HostedCall(3, "call_h", "browser.search", LABEL, "search")
HOSTED = Closed(FOUND, '{"q":1}', (6, 7))
EXACT_HOSTED = AssistantCall("call_h", "browser.search", '{"q":1}', (6, 7))
SENT_HOSTED = replace(EXACT_HOSTED, tokens=())
PAGE = ToolResult("call_h", "browser.search", "a page")
NOW = Closed(Reasoning(4), "Now the weather.", (8,))
EXACT_NOW = AssistantReasoning("Now the weather.", (8,))
SERVER_TOOL_CALLS: dict[str, tuple[list[Closed], tuple[Item, ...], tuple[Item, ...]]] = {
    "before a client tool call": (
        [THOUGHT, HOSTED, NOW, CALL],
        (SENT_HOSTED, PAGE, SENT_CALL, RESULT),
        (EXACT[0], EXACT_HOSTED, PAGE, EXACT_NOW, EXACT[2], RESULT),
    ),
    "after a client tool call": (
        [THOUGHT, CALL, HOSTED],
        (SENT_CALL, RESULT, SENT_HOSTED, PAGE),
        (EXACT[0], EXACT[2], RESULT, EXACT_HOSTED, PAGE),
    ),
    "without a client tool call": ([THOUGHT, HOSTED], (SENT_HOSTED, PAGE), (EXACT[0], EXACT_HOSTED, PAGE)),
    "not sent back by the client": (
        [THOUGHT, HOSTED, NOW, CALL],
        (SENT_CALL, RESULT),
        (EXACT[0], EXACT_HOSTED, PAGE, EXACT_NOW, EXACT[2], RESULT),
    ),
}


@pytest.mark.parametrize(("output", "sent", "expected"), SERVER_TOOL_CALLS.values(), ids=SERVER_TOOL_CALLS)
def test_a_server_tool_call_appears_once_in_the_recalled_conversation(
    output: list[Closed], sent: tuple[Item, ...], expected: tuple[Item, ...]
) -> None:
    cache = ConversationCache()
    cache.record("team", output, results={"call_h": PAGE}, visible=[LABEL])
    assert cache.recall("team", conversation(ASK, *sent)).items == (ASK, *expected)


def test_an_incomplete_turn_is_not_cached() -> None:
    cache = ConversationCache()
    cache.record("team", [THOUGHT, Closed(Text(1, Phase.FINAL), "Sun", (), complete=False)])
    sent = conversation(ASK, AssistantMessage("Sun"), UserMessage("Go on"))
    assert cache.recall("team", sent) == sent


def test_a_conversation_keeps_its_first_date() -> None:
    cache = ConversationCache()
    answered = (ASK, AssistantMessage("Sunny."), UserMessage("And now?"))
    assert cache.recall("team", conversation(ASK, date="2026-01-01")).preamble.date == "2026-01-01"
    assert cache.recall("team", conversation(*answered, date="2026-01-02")).preamble.date == "2026-01-01"
    assert cache.recall("other", conversation(*answered, date="2026-01-02")).preamble.date == "2026-01-02"
    assert cache.recall("team", conversation(ASK, date="2026-01-03")).preamble.date == "2026-01-03"


def test_the_first_date_depends_on_where_the_instructions_end() -> None:
    cache = ConversationCache()
    cache.recall("team", Conversation(Preamble(date="2026-01-01", instructions="ab"), (UserMessage("c"),)))
    other = Conversation(Preamble(date="2026-01-02", instructions="a"), (UserMessage("bc"), AssistantMessage("Yes.")))
    assert cache.recall("team", other).preamble.date == "2026-01-02"


def test_a_conversation_without_generated_items_is_not_copied() -> None:
    cache = ConversationCache()
    begun = conversation(UserMessage("q"))
    assert cache.recall("a", begun) is begun
    assert cache.recall("a", replace(begun, reasoning_from=1)) == begun


def test_the_cache_is_bounded_and_evicts_the_oldest() -> None:
    cache = ConversationCache(max_bytes=100_000)
    for n in range(200):
        cache.record("team", [Closed(Text(0, Phase.FINAL), f"answer {n}", tuple(range(100)))])
    found = [
        n
        for n in range(200)
        if cache.recall("team", conversation(ASK, AssistantMessage(f"answer {n}"), ASK)).items[1]
        != AssistantMessage(f"answer {n}")
    ]
    assert found == list(range(200 - len(found), 200))
    assert 50 < len(found) <= 120
    assert cache.size <= 100_000


@pytest.mark.parametrize("count", [4, 40])
def test_the_cache_size_matches_its_memory_use(count: int) -> None:
    cache = ConversationCache(max_bytes=200_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(300):
            # Token ids as a backend sends them: each id is a separate object.
            thought, answer = (tuple(range(1_000 + n, 1_000 + n + count)) for _ in range(2))
            text = f"answer {n} " + "word " * count
            cache.record("team", [Closed(Reasoning(0), text, thought), Closed(Text(1, Phase.FINAL), text, answer)])
            cache.record("team", [Closed(ToolCall(2, 0, f"call_{n}", "look"), text, answer)])
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 150_000 < cache.size <= 200_000
    assert taken < 1.25 * cache.size
