"""Hooks: operator code that sees every request before rendering and every answer at its end.

A hook is an object that implements the `Hook` protocol. It is found by its entry point (`unisono.hooks`) and runs only
if the configuration names it. It may refuse a request, change the model's input, and annotate the answer. The client's
input is stored as the client sent it. When a conversation continues, hooks therefore see the whole conversation again,
without their earlier changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Protocol, TypeAlias

from unisono.core.conversation import Conversation, Effort, Item, Json
from unisono.core.events import Closed
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason, Sampling, Usage

# Annotation of an answer by a hook. It appears in the `unisono` object of the answer, at `hooks.<name>`. It is plain
# JSON of at most a few thousand characters. The annotations of `before` and `after` are merged key by key.
Annotation: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Request:
    """Generation request as hooks see it.

    `model` is the name of the model group, after alias resolution. `surface` is `chat`, `responses`, `messages` or
    `completions`. `key` is the public id of a virtual key, empty for the master key. `conversation` is the whole
    conversation including earlier turns, with the changes of the hooks that ran before. A raw prompt (`completions`)
    appears as one user message. `whole`: nothing is emitted before the answer is complete.
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

    `items` replaces all items of the conversation. If an item was not in the conversation before, its exact tokens are
    discarded, because they may represent the content before the change.
    """

    items: tuple[Item, ...] | None = None
    instructions: str | None = None
    effort: Effort | None = None
    sampling: Sampling | None = None
    annotation: Annotation | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Finished answer: all items in order, including reasoning and calls.

    `recoveries` are the names of the recovery rules that were applied.
    """

    items: tuple[Closed, ...]
    reason: FinishReason
    usage: Usage
    recoveries: tuple[str, ...] = ()


class Hook(Protocol):
    """Hook interface; a class that inherits it may omit methods.

    Many requests call a hook concurrently. A call may take time up to the hook's time limit, but must never block the
    event loop. With `holds_answers`, no part of an item is emitted before `check_item` has accepted the item.
    """

    holds_answers: bool = False

    async def before(self, request: Request) -> Changes | None:
        """Check or change a request before rendering.

        Called once per request. Called again only if the gateway starts a response over because nothing of it was
        stored. Raise `unisono.errors.Refused` to refuse the request.
        """
        return None

    async def check_item(self, request: Request, item: Closed) -> str | None:
        """Check a complete item of an answer before any of it is emitted.

        Called for each item in order if `holds_answers` is True. Return a text that replaces the text of the item, or
        None for no change. The exact tokens of a replaced item are discarded. Raise `unisono.errors.Refused` to end the
        answer with that error; earlier items may have been emitted already. The text of a pass-through answer cannot be
        replaced.
        """
        return None

    async def after(self, request: Request, answer: Answer) -> Annotation | None:
        """Check or annotate a complete answer before its last event is emitted.

        Called a second time if the process of the gateway dies during this call. Raise `unisono.errors.Refused` to
        withhold a `whole` answer. If the answer is streamed, the client already has most of it, so the refusal only
        becomes an annotation.
        """
        return None

    async def aclose(self) -> None:
        """Close the hook; no more calls follow."""
        return


class HookFactory(Protocol):
    """Object registered in the entry point, usually the hook class.

    `options` are the hook's configured settings except `timeout_s` and `fail`. A key that the hook does not read is
    reported as unknown. The call must not access network or disk. It raises `ConfigError` if a setting is invalid; the
    message begins with the key of the setting.
    """

    def __call__(self, options: Mapping[str, object]) -> Hook: ...
