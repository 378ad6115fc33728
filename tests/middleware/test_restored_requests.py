"""Requests that the conversation cache completes before hooks check them."""

from __future__ import annotations

from dataclasses import replace

from tests.engine.scripted import ANSWER, Runner, Scripted, Step
from unisono.core.conversation import (
    AssistantCall,
    AssistantReasoning,
    Conversation,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Closed, Reasoning, ToolCall
from unisono.core.hooks import Changes, Hook, Request
from unisono.engine.journal import NOTED, JournalEntry, JournalWriter
from unisono.engine.request import GenerationReport, GenerationRequest, Resumption
from unisono.harmony.encoding import Encoding
from unisono.middleware.hook_gates import HookGate, NamedHook

SECRET = "The code is 55."
CALL = AssistantCall("call_1", "look", "{}")
REQUEST = GenerationRequest(
    "m",
    Conversation(Preamble(), (UserMessage("Hi"), CALL, ToolResult("call_1", "look", "k"))),
    resumption=Resumption(is_journal_stored=True),
)
OUTPUT = [Closed(Reasoning(0), SECRET, (1, 2)), Closed(ToolCall(1, 0, "call_1", "look"), "{}", (3, 4))]


class Masking(Hook):
    """Masks numbers in reasoning."""

    async def before(self, request: Request) -> Changes | None:
        return Changes(
            items=tuple(
                replace(item, text=item.text.replace("55", "*")) if isinstance(item, AssistantReasoning) else item
                for item in request.conversation.items
            )
        )


def gate_of(runner: Runner, hook: Hook) -> HookGate:
    gate = HookGate([NamedHook("hook", hook)], (), runner.engine.restore)
    gate.report = GenerationReport()
    return gate


async def test_a_resumed_response_has_the_restored_items_that_hooks_changed(encoding: Encoding) -> None:
    first, second = (Runner(encoding, Scripted(encoding, [Step(ANSWER)])) for _ in range(2))
    first.memory.record("", OUTPUT)
    admitted = await gate_of(first, Masking()).admit(REQUEST)
    assert admitted.conversation.items[1] == AssistantReasoning("The code is *.")
    # Unchanged items keep the tokens that the model generated.
    assert admitted.conversation.items[2] == replace(CALL, tokens=(3, 4))
    journal = JournalWriter()
    journal.add_entry(JournalEntry({NOTED: admitted.resumption.journal_note}))
    resumption = Resumption(is_journal_stored=True, journal=tuple(journal.numbers))
    # The result is the same in a process with the cache and in another process.
    for runner in (first, second):
        resumed = await gate_of(runner, Masking()).admit(replace(REQUEST, resumption=resumption))
        assert resumed.conversation.items == admitted.conversation.items
        assert (await runner.engine._deps.prepare(resumed, GenerationReport())).conversation == resumed.conversation


async def test_a_request_without_changes_needs_no_note(encoding: Encoding) -> None:
    runner = Runner(encoding, Scripted(encoding, [Step(ANSWER)]))
    admitted = await gate_of(runner, Masking()).admit(REQUEST)
    assert admitted.conversation.items is REQUEST.conversation.items
    assert admitted.resumption.journal_note is None


async def test_a_counted_prompt_is_not_rendered_again_after_the_check(encoding: Encoding) -> None:
    runner = Runner(encoding, Scripted(encoding, [Step(ANSWER)]))
    runner.memory.record("", OUTPUT)
    await runner.engine.count(REQUEST)
    for hook, is_kept in ((Hook, True), (Masking, False)):
        admitted = await gate_of(runner, type("Named", (hook,), {})()).admit(REQUEST)
        assert admitted.conversation.items[0:1] == REQUEST.conversation.items[0:1]
        assert (runner.engine._deps.counted_prompts.find(admitted) is not None) is is_kept
