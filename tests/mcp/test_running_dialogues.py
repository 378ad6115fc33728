"""Questions that do not name their calls: their assignment, and the order of the calls on such a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from mcp_types import ElicitRequestFormParams, ElicitRequestParams

from unisono.mcp.elicitation import Dialogue, note_of
from unisono.mcp.running_dialogues import RunningDialogues

QUESTION = ElicitRequestFormParams(message="When?", requested_schema={"type": "object", "properties": {}})


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


class _Calls:
    """Calls on one connection, each in a task of its own. A call ends when it is told to."""

    def __init__(self) -> None:
        self.dialogues = RunningDialogues()
        self._tasks: dict[Dialogue, tuple[asyncio.Task[None], asyncio.Event]] = {}

    async def begin(self, *, can_ask: bool = True) -> Dialogue:
        dialogue, end = Dialogue(None, can_ask=can_ask), asyncio.Event()

        async def run() -> None:
            async with self.dialogues.open(dialogue, soon()):
                await end.wait()
                dialogue.has_result = True

        self._tasks[dialogue] = asyncio.create_task(run()), end
        await asyncio.sleep(0)
        return dialogue

    async def end(self, dialogue: Dialogue, *, is_abandoned: bool = False) -> None:
        task, end = self._tasks.pop(dialogue)
        if is_abandoned:
            task.cancel()
        else:
            end.set()
        await asyncio.gather(task, return_exceptions=True)

    async def ask(self, question: ElicitRequestParams = QUESTION) -> asyncio.Task[str]:
        async def action() -> str:
            return (await self.dialogues.reply(question)).action

        task = asyncio.create_task(action())
        await asyncio.sleep(0)
        return task


@asynccontextmanager
async def connection() -> AsyncIterator[_Calls]:
    calls = _Calls()
    yield calls
    for dialogue in list(calls._tasks):
        await calls.end(dialogue)


async def test_a_question_waits_for_the_other_call() -> None:
    async with connection() as calls:
        asking, other = await calls.begin(), await calls.begin()
        reply = await calls.ask()
        assert not reply.done()
        await calls.end(other)
        assert await reply == "cancel"
        assert (asking.is_waiting(), note_of(asking), note_of(other)) == (True, "", "")


async def test_the_question_of_an_abandoned_call_goes_to_no_other_call() -> None:
    async with connection() as calls:
        asking, other = await calls.begin(), await calls.begin()
        reply = await calls.ask()
        await calls.end(asking, is_abandoned=True)
        assert await reply == "cancel"
        assert not other.is_waiting()
        assert "may belong to another call, so it was not passed on: When?" in note_of(other)


async def test_as_many_questions_as_calls_are_cancelled() -> None:
    async with connection() as calls:
        running = [await calls.begin() for _ in range(3)]
        replies = [await calls.ask() for _ in range(2)]
        assert not any(reply.done() for reply in replies)
        replies.append(await calls.ask())
        assert [await reply for reply in replies] == ["cancel"] * 3
        for dialogue in running:
            assert not dialogue.is_waiting()
            assert note_of(dialogue).count("When?") == 3


async def test_a_question_without_a_call_is_cancelled() -> None:
    assert (await RunningDialogues().reply(QUESTION)).action == "cancel"


async def test_a_question_that_the_server_withdraws_is_forgotten() -> None:
    async with connection() as calls:
        first, second = await calls.begin(), await calls.begin()
        (await calls.ask()).cancel()
        await asyncio.sleep(0)
        await calls.end(second)
        assert (first.is_waiting(), note_of(first)) == (False, "")


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
async def test_a_call_that_may_be_asked_runs_alone(first: bool, second: bool, waits: bool) -> None:
    async with connection() as calls:
        await calls.end(await calls.begin())
        await calls.dialogues.reply(QUESTION)
        running = await calls.begin(can_ask=first)
        if waits:
            with pytest.raises(TimeoutError):
                async with calls.dialogues.open(Dialogue(None, can_ask=second), soon(0.01)):
                    pytest.fail("the call ran beside another one")
        else:
            async with calls.dialogues.open(Dialogue(None, can_ask=second), soon()):
                pass
        await calls.end(running)
        async with calls.dialogues.open(Dialogue(None, can_ask=second), soon()):
            pass


async def test_calls_that_cannot_be_asked_do_not_wait_for_each_other() -> None:
    async with connection() as calls:
        running = [await calls.begin(can_ask=False) for _ in range(2)]
        reply = await calls.ask()
        assert await asyncio.wait_for(reply, 1) == "cancel"
        assert all("When?" in note_of(dialogue) for dialogue in running)
