"""Construction of the alerts about budgets and health, and of their webhook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Final

from unisono.alerts.rules import BudgetAlerts, HealthAlerts
from unisono.config import AlertSettings
from unisono.core.quotas import SHARED_TENANT
from unisono.core.state_store import Store
from unisono.routing.pool import RoutingPool
from unisono.store.health_monitor import Upkeep

if TYPE_CHECKING:
    from unisono.alerts.webhook import AlertWebhook

# Interval between two checks of backends and the store, in seconds.
CHECK_S: Final = 1.0


@dataclass(slots=True)
class Alerting:
    """Alerts and their webhook.

    `health` checks the backends and the store once and sends alerts; None if only budgets cause alerts.
    """

    webhook: AlertWebhook
    budgets: BudgetAlerts
    health: Callable[[], None] | None
    task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Check the health every `CHECK_S` seconds until `aclose` is called."""
        if self.health is not None:
            self.task = asyncio.create_task(_repeat(self.health), name="alerts about health")

    async def aclose(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.webhook.aclose()


async def _repeat(check: Callable[[], None]) -> None:
    while True:
        check()
        await asyncio.sleep(CHECK_S)


def build_alerts(
    settings: AlertSettings, pool: RoutingPool, store: Store, upkeep: Upkeep, count: Callable[[str, int], None]
) -> Alerting:
    """Build the alerts and their webhook.

    `count` is called with an outcome and the number of alerts that had this outcome, for the metrics.
    """
    # The webhook's HTTP client is imported only for alerts, because the import takes a tenth of the startup time.
    from unisono.alerts.webhook import AlertWebhook, WebhookOptions

    webhook, process = settings.webhook, token_hex(8)

    async def reserve(alert: str, for_s: float) -> bool:
        # Only one of the processes that share the store gets the lease and sends the alert. No process releases it.
        return await store.acquire(SHARED_TENANT, f"alert {alert}", f"{process} {token_hex(4)}", for_s) is not None

    options = WebhookOptions(
        url=webhook.url.get_secret_value(),
        headers={name: value.get_secret_value() for name, value in webhook.headers.items()},
        secret="" if webhook.secret is None else webhook.secret.get_secret_value(),
        timeout_s=webhook.timeout_s,
        retries=webhook.retries,
        repeat_s=settings.repeat_s,
    )
    sender = AlertWebhook(options, reserve, count)
    health = HealthAlerts(settings.down_after_s, sender, monotonic)

    def check() -> None:
        health.check(pool.status(), store_works=not upkeep.reason)

    budgets = BudgetAlerts(settings.budget_thresholds, sender)
    return Alerting(sender, budgets, check if settings.health else None)
