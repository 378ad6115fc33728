"""Events reduced to items and rules, for comparison with the expected values of a case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.harmony.recoveries import TOOLS, C, F, P, R
from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.harmony.channel_router import HarmonyRouter
from unisono.harmony.encoding import Encoding
from unisono.harmony.tool_declarations import plan_tools


def new_router(encoding: Encoding, **options: Any) -> HarmonyRouter:
    ids = iter(f"call_{n}" for n in range(1_000_000))
    return HarmonyRouter(encoding, plan_tools(TOOLS), lambda: next(ids), **options)


def route(encoding: Encoding, tokens: Sequence[int], reason: str = "stop", *, stop_hidden: bool = False) -> list[Event]:
    router = new_router(encoding)
    return router.feed(tokens) + router.end(FinishReason(reason), stop_hidden=stop_hidden)


def items_of(events: Sequence[Event]) -> tuple[R | P | F | C, ...]:
    found: list[R | P | F | C] = []
    for event in events:
        if isinstance(event, Closed):
            match event.item:
                case Reasoning():
                    found.append(R(event.text))
                case Text(phase=Phase.COMMENTARY):
                    found.append(P(event.text))
                case Text():
                    found.append(F(event.text))
                case ToolCall(name=name):
                    found.append(C(name, event.text))
    return tuple(found)


def rules_of(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the distinct rules in order of first occurrence."""
    return tuple(dict.fromkeys(event.rule for event in events if isinstance(event, Repaired)))


def check_lifecycle(events: Sequence[Event]) -> None:
    """Check the lifecycle of items.

    - Only one item is open at a time.
    - The text of a closed item is the concatenation of its deltas.
    - Indexes count up.
    """
    open_item, next_index, next_call = None, 0, 0
    texts: list[str] = []
    for event in events:
        match event:
            case Opened(item):
                assert open_item is None
                assert item.index == next_index
                if isinstance(item, ToolCall):
                    assert item.call_index == next_call
                    next_call += 1
                open_item, texts, next_index = item, [], next_index + 1
            case Delta(item, text):
                assert item == open_item
                assert text
                texts.append(text)
            case Closed(item, text):
                assert item == open_item
                assert "".join(texts) == text
                open_item = None
            case _:
                pass
    assert open_item is None
