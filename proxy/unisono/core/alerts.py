"""Alert for the operator, about a budget or about health."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TypeAlias

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    `id` is equal for equal alerts, so that they are sent once. `event` is its kind, `group` the kind of its subject.
    `facts` are further fields of the message.
    """

    id: str
    event: str
    group: str
    message: str
    facts: Mapping[str, Json] = field(default_factory=dict)


# Receiver of alerts. It returns at once and does not raise.
AlertSink: TypeAlias = Callable[[Alert], None]
