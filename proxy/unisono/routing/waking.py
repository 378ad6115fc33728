"""Waking of sleeping backends: all requests that wait for a backend share one wake-up call."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from unisono.core.generation import Capabilities
from unisono.errors import BackendUnavailable, UnisonoError
from unisono.routing.circuit_breaker import BreakerFailure, kind_of

if TYPE_CHECKING:
    from unisono.routing.deployment import LiveDeployment

log = logging.getLogger(__name__)

# Seconds between two probes of a backend that is waking up.
PROBE_EVERY_S: Final = 0.5
# Seconds after a failed wake-up until the next attempt.
RETRY_AFTER_S: Final = 30.0


class Waking:
    """Wake-up of one deployment, shared by all requests that wait for the deployment."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Capabilities] | None = None
        self._failed_at = float("-inf")

    async def capabilities(self, live: LiveDeployment) -> Capabilities:
        """Return the capabilities of a deployment; wake the deployment first if it is unreachable.

        Raises a BackendError if the probe fails and no attempt to wake the deployment is possible, or if the deployment
        does not become ready in time after such an attempt.
        """
        try:
            return await live.capabilities()
        except UnisonoError as error:
            # A server that loads its model is reachable but not ready. Requests then wait for the wake-up in progress.
            if kind_of(error) is None or (self._task is None and not self._can_wake(live, error)):
                raise
        if self._task is None:
            self._task = asyncio.create_task(self._wake(live), name=f"wake {live.name}")
        # Shielded: a client that disconnects must not end the wake-up that others wait for.
        return await asyncio.shield(self._task)

    def _can_wake(self, live: LiveDeployment, error: UnisonoError) -> bool:
        """Return whether `error` means that the deployment sleeps, and it may be woken now."""
        has_just_failed = live.clock() - self._failed_at < RETRY_AFTER_S
        return live.terms.wake is not None and kind_of(error) is BreakerFailure.UNREACHABLE and not has_just_failed

    async def _wake(self, live: LiveDeployment) -> Capabilities:
        rules = live.terms.wake
        assert rules is not None
        log.info("waking backend", extra={"backend": live.name})
        last: UnisonoError | None = None
        try:
            async with asyncio.timeout(rules.timeout_s):
                await rules.call()
                while True:
                    try:
                        return (await live.check()).capabilities
                    except UnisonoError as error:
                        # A server that is starting may fail in any way. Only an unfit server, or one that rejects the
                        # probe, ends the wake-up, because waiting does not help.
                        if kind_of(error) is None:
                            raise
                        last = error
                    await asyncio.sleep(PROBE_EVERY_S)
        except UnisonoError as error:
            self._failed_at = live.clock()
            log.warning("backend not woken", extra={"backend": live.name, "reason": error.message})
            raise
        except (TimeoutError, OSError) as error:
            self._failed_at = live.clock()
            reason = str(error) or ("timeout" if last is None else f"timeout; last probe: {last.message}")
            log.warning("backend not woken", extra={"backend": live.name, "reason": reason})
            raise BackendUnavailable(f"The backend {live.name} did not wake up; try again later.") from None
        finally:
            self._task = None

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
