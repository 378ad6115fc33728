"""Alerts for the operator, about budgets and about the health of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TypeAlias

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    `event` is the kind of the alert, and `group` the kind of object that the alert is about. `facts` are further fields
    of the message. After an alert, other alerts with the same `id` are suppressed until the time `once_until`, in
    seconds since 1970. If `once_until` is None, they are suppressed for the configured interval.
    """

    id: str
    event: str
    group: str
    message: str
    facts: Mapping[str, Json] = field(default_factory=dict)
    once_until: float | None = None


# Receiver of alerts. It returns immediately and raises no exception.
AlertSink: TypeAlias = Callable[[Alert], None]
