"""Hook with its settings: the requests that it applies to, its timeout, and its failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeAlias, TypeVar

from unisono.core.frozen import dataclass
from unisono.core.hooks import Hook
from unisono.errors import HookFailed, Refused

# Exceptions that are a failure of a hook. SystemExit is included because a hook must not end the process and all its
# streams. A real Ctrl-C raises nothing here, because the server handles the signal.
FAULTS: Final = (Exception, SystemExit, KeyboardInterrupt)

T = TypeVar("T")

# Callback for each failed call of a hook. Its arguments are the hook's name and the name of the called method.
Failed: TypeAlias = Callable[[str, str], None]

log = logging.getLogger("unisono.hooks")


@dataclass(frozen=True, slots=True)
class NamedHook:
    """Hook with its settings; if `open` is True, a failure of the hook is ignored."""

    name: str
    hook: Hook
    timeout_s: float = 5.0
    open: bool = False
    failed: Failed | None = None
    # A guardrail applies to all requests (`is_default`), or only to those that name it or are for one of `models`.
    is_default: bool = True
    models: frozenset[str] = frozenset()

    def applies_to(self, models: Collection[str], requested: Collection[str]) -> bool:
        """Return whether the hook applies to a request.

        `models` are the models that the request names, and `requested` the guardrails that the request names.
        """
        return self.is_default or not self.models.isdisjoint(models) or self.name in requested

    async def call(self, call: str, request_id: str, answering: Awaitable[T]) -> T | None:
        """Await the hook's result, within the hook's timeout; return None on an ignored failure.

        `call` is the name of the called method, such as `before`, for the log. Raises `Refused` if the hook refuses the
        request or the answer, and `HookFailed` if the hook fails and is mandatory.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                return await answering
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # An awaitable of the hook was cancelled, not the request.
            failure: BaseException = error
        except Refused as refusal:
            if 400 <= refusal.status < 500:
                raise
            failure = refusal
        except FAULTS as error:
            failure = error
        about = {"hook": self.name, "call": call, "request_id": request_id, "fail": "open" if self.open else "closed"}
        log.error("a hook failed", extra=about, exc_info=failure)
        if self.failed is not None:
            self.failed(self.name, call)
        if not self.open:
            raise HookFailed(f"The gateway's hook '{self.name}' failed. The operator finds the reason in the log.")
        return None

    @property
    def holds_answers(self) -> bool:
        """True if the hook checks every item of an answer before the item is emitted."""
        return bool(getattr(self.hook, "holds_answers", False))

    @property
    def checks_answers(self) -> bool:
        """True if the hook implements `after`."""
        return type(self.hook).after is not Hook.after
