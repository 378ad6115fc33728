"""Assignment of the questions of an older server to the calls in progress on its connection.

A question belongs to the call in whose answer it arrives. Over stdio, SSE, and the HTTP stream of notifications, a
question does not name its call. Such a question waits until only one call is left that can have asked it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from mcp_types import ElicitRequestParams, ElicitResult

from unisono.core.tool_host import UserAction
from unisono.mcp.elicitation import MAX_MESSAGE_CHARACTERS, Dialogue

# Dialogue of the call that the running code sends. The SDK runs the handler of a message that arrives in the answer to
# a request in the context of this request.
DIALOGUE: Final[ContextVar[Dialogue | None]] = ContextVar("DIALOGUE", default=None)


@dataclass(slots=True, eq=False)
class _HeldQuestion:
    """Question of an unknown call.

    `caller` becomes the dialogue of the call, or None if the call stays unknown.
    """

    message: str
    candidates: list[Dialogue]
    caller: asyncio.Future[Dialogue | None]


@dataclass(slots=True, eq=False)
class RunningDialogues:
    """Dialogues of the calls in progress on one connection.

    After the first question that names no call, calls whose questions may be passed on to the user run one at a time.
    """

    _running: list[Dialogue] = field(default_factory=list)
    _held: list[_HeldQuestion] = field(default_factory=list)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _has_unknown_callers: bool = False

    @asynccontextmanager
    async def open(self, dialogue: Dialogue, until: float) -> AsyncIterator[None]:
        """Let `dialogue` answer the questions of the call that is sent while the context is open.

        Raises `TimeoutError` if other calls prevent the call until `until` (time of the event loop).
        """
        async with asyncio.timeout_at(until):
            while self._must_wait(dialogue):
                await self._ended.wait()
        self._running.append(dialogue)
        token = DIALOGUE.set(dialogue)
        try:
            yield
        finally:
            DIALOGUE.reset(token)
            self._running.remove(dialogue)
            self._settle()
            self._ended.set()
            self._ended = asyncio.Event()

    async def reply(self, params: ElicitRequestParams) -> ElicitResult:
        """Return the answer to a question of the server."""
        dialogue = DIALOGUE.get() or await self._caller(params.message)
        # A call that has ended cannot pass on a question.
        if dialogue is None or dialogue not in self._running:
            return ElicitResult(action=UserAction.CANCEL.value)
        return dialogue.reply(params)

    def _must_wait(self, dialogue: Dialogue) -> bool:
        return self._has_unknown_callers and any(dialogue.can_ask or each.can_ask for each in self._running)

    async def _caller(self, message: str) -> Dialogue | None:
        self._has_unknown_callers = True
        question = _HeldQuestion(message, self._running.copy(), asyncio.get_running_loop().create_future())
        self._held.append(question)
        self._settle()
        try:
            return await question.caller
        finally:
            if question in self._held:
                self._held.remove(question)

    def _settle(self) -> None:
        """Determine the calls of the held questions, as far as possible."""
        # Each running call may wait for the answer to its question, and then none of them ends.
        is_stuck = len(self._held) >= len(self._running) or not any(dialogue.can_ask for dialogue in self._running)
        for question in list(self._held):
            left = [dialogue for dialogue in question.candidates if dialogue in self._running]
            if len(left) > 1 and not is_stuck:
                continue
            self._held.remove(question)
            others = (dialogue for dialogue in question.candidates if dialogue not in left)
            # A call that was abandoned may have asked the question.
            is_certain = len(left) == 1 and all(dialogue.has_result for dialogue in others)
            for dialogue in () if is_certain else left:
                dialogue.unassigned.append(question.message[:MAX_MESSAGE_CHARACTERS])
            if not question.caller.done():
                question.caller.set_result(left[0] if is_certain else None)
