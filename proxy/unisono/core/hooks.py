"""Hooks: operator code that sees every request before rendering and every answer at its end.

A hook is an object that implements the `Hook` protocol. It is found by its entry point (`unisono.hooks`) and runs only
if the configuration names it. It may refuse a request, change the model's input, and annotate the answer. The client's
input is stored as sent: when a conversation continues, hooks see it again, whole and in the client's version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Protocol, TypeAlias

from unisono.core.conversation import Conversation, Effort, Item, Json
from unisono.core.events import Closed
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason, Sampling, Usage

# Annotation of an answer by a hook: in the `unisono` object, at `hooks.<name>`. Plain JSON, a few thousand characters
# at most. The annotations of `before` and `after` are merged key by key.
Annotation: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Request:
    """Generation request as hooks see it.

    `model` is the group's name after aliases. `surface` is `chat`, `responses`, `messages` or `completions`. `key` is
    the public id of a virtual key, empty for the master key. `conversation` is the whole conversation with earlier
    turns, as earlier hooks changed it; a raw prompt (`completions`) is one user message. `whole` means that nothing is
    emitted before the answer is complete.
    """

    request_id: str
    tenant: str
    key: str
    model: str
    surface: str
    conversation: Conversation
    sampling: Sampling
    whole: bool = False
    # Tags of the virtual key.
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that a hook requests; None leaves a value unchanged.

    `items` replaces all items of the conversation. An item that was not in it before loses its exact tokens, because
    they would still carry the old content.
    """

    items: tuple[Item, ...] | None = None
    instructions: str | None = None
    effort: Effort | None = None
    sampling: Sampling | None = None
    annotation: Annotation | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Finished answer: all items in order, reasoning and calls included.

    `recoveries` are the names of the recovery rules that were applied.
    """

    items: tuple[Closed, ...]
    reason: FinishReason
    usage: Usage
    recoveries: tuple[str, ...] = ()


class Hook(Protocol):
    """Hook interface; a class that inherits it may omit methods.

    Many requests call a hook concurrently. It may take time up to its deadline, but must never block the event loop.
    With `holds_answers`, no part of an item is emitted before `check_item` has seen the item.
    """

    holds_answers: bool = False

    async def before(self, request: Request) -> Changes | None:
        """Check or change a request before rendering.

        Called once per request, and again only if a response is restarted before any of it was stored. Raises
        `unisono.errors.Refused` to refuse the request.
        """
        return None

    async def check_item(self, request: Request, item: Closed) -> str | None:
        """Check a complete item of an answer before any of it is emitted.

        Called for each item in order if `holds_answers` is True. Return the text that replaces the item's text, None to
        keep it. A replaced item loses its exact tokens. Raises `unisono.errors.Refused` to end the answer with that
        error; earlier items may be emitted already. The text of a pass-through answer cannot be replaced.
        """
        return None

    async def after(self, request: Request, answer: Answer) -> Annotation | None:
        """Check or annotate an answer when it is generated but its end is not yet emitted.

        Called a second time if a gateway process dies at that moment. Raises `unisono.errors.Refused` to withhold a
        `whole` answer. The client already has most of any other answer, so the refusal becomes an annotation.
        """
        return None

    async def aclose(self) -> None:
        """Close the hook; no more calls follow."""
        return


class HookFactory(Protocol):
    """Object registered in the entry point, usually the hook class.

    `options` are the hook's configured settings except `timeout_s` and `fail`. A key that the hook does not read is
    reported as unknown. The call accesses neither network nor disk. Raises `ConfigError` with a message that begins
    with the key.
    """

    def __call__(self, options: Mapping[str, object]) -> Hook: ...
