"""What is remembered of stateless conversations, and when it is used."""

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
    "all of it": (
        (AssistantReasoning("Use the tool."), AssistantMessage("I look.", Phase.COMMENTARY), SENT_CALL),
        True,
    ),
    "only the call": ((SENT_CALL,), True),
    "no reasoning": ((AssistantMessage("I look.", Phase.COMMENTARY), SENT_CALL), True),
    "other reasoning": ((AssistantReasoning("No."), SENT_CALL), False),
    "another preamble": ((AssistantMessage("I looked.", Phase.COMMENTARY), SENT_CALL), False),
    "the same arguments in other bytes": ((replace(SENT_CALL, arguments='{ "location": "Paris" }'),), True),
    "other arguments": ((replace(SENT_CALL, arguments='{"location":"Rome"}'),), False),
    "arguments that are cut": ((replace(SENT_CALL, arguments='{"location":"Paris"'),), False),
    "another name": ((replace(SENT_CALL, name="search"),), False),
    "another id": ((replace(SENT_CALL, call_id="call_2"),), False),
}


def conversation(*items: Item, date: str = "2026-01-01") -> Conversation:
    return Conversation(Preamble(date=date), items)


@pytest.mark.parametrize(("sent", "known"), SENT_BACK.values(), ids=SENT_BACK)
def test_a_turn_is_recognised_by_its_call_and_what_the_client_sends_of_it(sent: tuple[Item, ...], known: bool) -> None:
    memory = ConversationCache()
    memory.record("team", [THOUGHT, PREAMBLE, CALL])
    found = memory.recall("team", conversation(ASK, *sent, RESULT))
    assert found.items == (ASK, *(EXACT if known else sent), RESULT)


def test_a_call_is_known_by_numbers_as_exact_as_other_readers_of_json_keep_them() -> None:
    memory = ConversationCache()
    memory.record("team", [replace(CALL, text='{"wei":123456789012345678901234567890}')])
    sent = replace(SENT_CALL, arguments='{"wei":1.2345678901234568e29}')
    assert memory.recall("team", conversation(ASK, sent, RESULT)).items[1] == replace(
        EXACT[2], arguments='{"wei":123456789012345678901234567890}'
    )


def test_another_tenant_finds_nothing() -> None:
    memory = ConversationCache()
    memory.record("team", [THOUGHT, PREAMBLE, CALL])
    asked = conversation(ASK, SENT_CALL, RESULT)
    assert memory.recall("other", asked) == asked


def test_an_answer_is_recognised_by_its_text() -> None:
    memory = ConversationCache()
    memory.record("team", [THOUGHT, Closed(Text(1, Phase.FINAL), "Sunny.", (7, 8))])
    found = memory.recall("team", conversation(ASK, AssistantMessage("Sunny."), UserMessage("Thanks")))
    assert found.items[1] == AssistantMessage("Sunny.", Phase.FINAL, (7, 8))
    other = conversation(ASK, AssistantMessage("Sunny. "), UserMessage("Thanks"))
    assert memory.recall("team", other) == other


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


@pytest.mark.parametrize(("sent", "found"), JOINED.values(), ids=JOINED)
def test_messages_sent_back_as_one_text_are_recognised(sent: str, found: tuple[Item, ...]) -> None:
    memory = ConversationCache()
    memory.record("team", MESSAGES)
    recalled = memory.recall("team", conversation(ASK, AssistantMessage(sent), UserMessage("Thanks")))
    assert recalled.items == (ASK, *found, UserMessage("Thanks"))


def test_a_call_is_recognised_by_several_messages_sent_back_as_one_text() -> None:
    memory = ConversationCache()
    second = Closed(Text(2, Phase.COMMENTARY), "In Paris.", (6,))
    memory.record("team", [PREAMBLE, second, CALL])
    sent = AssistantMessage("I look.\n\nIn Paris.", Phase.COMMENTARY)
    recalled = memory.recall("team", conversation(ASK, sent, SENT_CALL, RESULT))
    assert recalled.items[1:4] == (EXACT[1], AssistantMessage("In Paris.", Phase.COMMENTARY, (6,)), EXACT[2])


def test_several_calls_of_one_turn_are_found_one_by_one() -> None:
    memory = ConversationCache()
    second = Closed(ToolCall(3, 1, "call_2", "get_weather"), "{}", (6,))
    memory.record("team", [THOUGHT, PREAMBLE, CALL, second])
    sent_second = AssistantCall("call_2", "get_weather", "{}")
    found = memory.recall("team", conversation(ASK, SENT_CALL, RESULT, sent_second, ToolResult("call_2", "g", "x")))
    assert found.items[1:4] == EXACT
    assert found.items[5] == replace(sent_second, tokens=(6,))


LABEL = "builtin:browser"
FOUND = HostedCall(3, "call_h", "browser.search", LABEL, "search")
HOSTED = Closed(FOUND, '{"q":1}', (6, 7))
EXACT_HOSTED = AssistantCall("call_h", "browser.search", '{"q":1}', (6, 7))
SENT_HOSTED = replace(EXACT_HOSTED, tokens=())
PAGE = ToolResult("call_h", "browser.search", "a page")
NOW = Closed(Reasoning(4), "Now the weather.", (8,))
EXACT_NOW = AssistantReasoning("Now the weather.", (8,))
RAN: dict[str, tuple[list[Closed], tuple[Item, ...], tuple[Item, ...]]] = {
    "before the client's call": (
        [THOUGHT, HOSTED, NOW, CALL],
        (SENT_HOSTED, PAGE, SENT_CALL, RESULT),
        (EXACT[0], EXACT_HOSTED, PAGE, EXACT_NOW, EXACT[2], RESULT),
    ),
    "behind it": (
        [THOUGHT, CALL, HOSTED],
        (SENT_CALL, RESULT, SENT_HOSTED, PAGE),
        (EXACT[0], EXACT[2], RESULT, EXACT_HOSTED, PAGE),
    ),
    "and nothing else": ([THOUGHT, HOSTED], (SENT_HOSTED, PAGE), (EXACT[0], EXACT_HOSTED, PAGE)),
    "unseen by this client": (
        [THOUGHT, HOSTED, NOW, CALL],
        (SENT_CALL, RESULT),
        (EXACT[0], EXACT_HOSTED, PAGE, EXACT_NOW, EXACT[2], RESULT),
    ),
}


@pytest.mark.parametrize(("said", "sent", "found"), RAN.values(), ids=RAN)
def test_a_call_of_the_gateway_that_the_client_sends_back_stands_there_once(
    said: list[Closed], sent: tuple[Item, ...], found: tuple[Item, ...]
) -> None:
    memory = ConversationCache()
    memory.record("team", said, results={"call_h": PAGE}, visible=[LABEL])
    assert memory.recall("team", conversation(ASK, *sent)).items == (ASK, *found)


def test_a_cut_turn_is_not_remembered() -> None:
    memory = ConversationCache()
    memory.record("team", [THOUGHT, Closed(Text(1, Phase.FINAL), "Sun", (), complete=False)])
    asked = conversation(ASK, AssistantMessage("Sun"), UserMessage("Go on"))
    assert memory.recall("team", asked) == asked


def test_a_conversation_keeps_its_first_day() -> None:
    memory = ConversationCache()
    answered = (ASK, AssistantMessage("Sunny."), UserMessage("And now?"))
    assert memory.recall("team", conversation(ASK, date="2026-01-01")).preamble.date == "2026-01-01"
    assert memory.recall("team", conversation(*answered, date="2026-01-02")).preamble.date == "2026-01-01"
    assert memory.recall("other", conversation(*answered, date="2026-01-02")).preamble.date == "2026-01-02"
    assert memory.recall("team", conversation(ASK, date="2026-01-03")).preamble.date == "2026-01-03"


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = ConversationCache(max_bytes=100_000)
    for n in range(200):
        memory.record("team", [Closed(Text(0, Phase.FINAL), f"answer {n}", tuple(range(100)))])
    kept = [
        n
        for n in range(200)
        if memory.recall("team", conversation(ASK, AssistantMessage(f"answer {n}"), ASK)).items[1]
        != AssistantMessage(f"answer {n}")
    ]
    assert kept == list(range(200 - len(kept), 200))
    assert 50 < len(kept) <= 120
    assert memory.size <= 100_000


@pytest.mark.parametrize("count", [4, 40])
def test_its_size_is_the_memory_that_it_takes(count: int) -> None:
    memory = ConversationCache(max_bytes=200_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(300):
            # Ids as a backend sends them: every one an object of its own.
            thought, answer = (tuple(range(1_000 + n, 1_000 + n + count)) for _ in range(2))
            text = f"answer {n} " + "word " * count
            memory.record("team", [Closed(Reasoning(0), text, thought), Closed(Text(1, Phase.FINAL), text, answer)])
            memory.record("team", [Closed(ToolCall(2, 0, f"call_{n}", "look"), text, answer)])
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 150_000 < memory.size <= 200_000
    assert taken < 1.25 * memory.size
