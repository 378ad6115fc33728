"""Hooks: code of the operator's that sees every turn before it is rendered and when it is over.

A hook is an object behind one Protocol, found by its entry point (`unisono.hooks`) and run only where the configuration
names it. It may refuse a turn, change what the model reads, and say something beside the answer. What a client sent is
kept as it was sent: a conversation that goes on is shown to hooks again, whole and as the client knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from unisono.core.conversation import Conversation, Effort, Item, Json
from unisono.core.events import Closed
from unisono.core.generation import FinishReason, Sampling, Usage

Annotation: TypeAlias = Mapping[str, Json]
"""What a hook says beside an answer: in the `unisono` object, at `hooks.<name>`. Plain JSON, a few thousand characters
at most; what `before` and `after` say is put together, key by key."""


@dataclass(frozen=True, slots=True)
class Request:
    """A turn that is asked for. `model` is the group's name after aliases, `surface` is `chat`, `responses`,
    `messages` or `completions`, and `key` the public id of a virtual key, empty for the master key. `conversation` is
    all of it, what earlier turns said included, as earlier hooks left it; a raw prompt (`completions`) is one message
    of the user's. `whole` says that nothing is shown before the answer is over."""

    request_id: str
    tenant: str
    key: str
    model: str
    surface: str
    conversation: Conversation
    sampling: Sampling
    whole: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    """Those of the virtual key."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a hook wants otherwise; None leaves it as it is. `items` are all of the conversation's; one that is not an
    item of before loses its exact tokens, since they would say what it said before."""

    items: tuple[Item, ...] | None = None
    instructions: str | None = None
    effort: Effort | None = None
    sampling: Sampling | None = None
    annotation: Annotation | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a turn: everything that was said, thoughts and calls too, in order. `recoveries` are names of rules
    by which it was mended."""

    items: tuple[Closed, ...]
    reason: FinishReason
    usage: Usage
    recoveries: tuple[str, ...] = ()


class Hook(Protocol):
    """Either method may be left out by a class that inherits this one. A hook is asked by many turns at once. It may
    take its time, up to its deadline, but never hold the event loop."""

    async def before(self, request: Request) -> Changes | None:
        """Called once for a turn, before anything is rendered: again only when a response is begun anew because nothing
        of it was there yet. Raises `unisono.errors.Refused` to refuse the turn."""
        return None

    async def after(self, request: Request, answer: Answer) -> Annotation | None:
        """Called when everything was generated and the end is not told yet; a second time where a gateway dies at just
        that moment. Raises `unisono.errors.Refused` to keep a `whole` answer from its client; of any other the client
        has most already, and the refusal is an annotation."""
        return None

    async def aclose(self) -> None:
        """No more turns come."""
        return


class HookFactory(Protocol):
    """What the entry point holds, usually the class itself. `options` is what the configuration says of the hook
    besides `timeout_s` and `fail`; a key that is not looked at is reported as one nobody knows. Touches neither network
    nor disk. Raises `ConfigError` that begins with the key."""

    def __call__(self, options: Mapping[str, object]) -> Hook: ...
