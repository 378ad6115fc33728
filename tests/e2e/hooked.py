"""Hooks for tests, installed like those of any package: by entry points of a distribution."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.core.conversation import AssistantMessage, UserMessage
from unisono.core.events import Text
from unisono.core.hooks import Annotation, Answer, Changes, Hook, Request
from unisono.errors import Refused

# Calls of `hearing`: name, request and answer.
CALLS: list[tuple[str, Request, Answer | None]] = []

SECRET = "what only the operator may read"


class NoThanks(Refused):
    status, code = 403, "no_thanks"


class NotARefusal(Refused):
    status, type = 500, "server_error"


class Hearing(Hook):
    """Adds annotations with the answer and its usage."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.says = str(options.get("says", "heard"))

    async def before(self, request: Request) -> Changes | None:
        CALLS.append(("before", request, None))
        return Changes(annotation={"before": self.says})

    async def after(self, request: Request, answer: Answer) -> Annotation | None:
        CALLS.append(("after", request, answer))
        texts = [closed.text for closed in answer.items if isinstance(closed.item, Text)]
        return {"after": texts[-1] if texts else None, "used": answer.usage.completion_tokens}


class Replacing(Hook):
    """Replaces a word in all messages and in the instructions."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.word, self.other = str(options["word"]), str(options["other"])

    async def before(self, request: Request) -> Changes | None:
        conversation = request.conversation
        items = tuple(
            replace(item, text=item.text.replace(self.word, self.other))
            if isinstance(item, UserMessage | AssistantMessage)
            else item
            for item in conversation.items
        )
        return Changes(
            items=items,
            instructions=conversation.preamble.instructions.replace(self.word, self.other),
            sampling=replace(request.sampling, temperature=0.25, logit_bias={17: 1.5}),
        )


async def _refuses() -> None:
    raise NoThanks("Not here.", param="input")


async def _refuses_with_a_surrogate() -> None:
    raise NoThanks("Not \ud83d.", param="input.\ud83d")


async def _raises() -> None:
    raise RuntimeError(SECRET)


async def _sleeps() -> None:
    await asyncio.sleep(30)


async def _cancels() -> None:
    raise asyncio.CancelledError


async def _exits() -> None:
    raise SystemExit(SECRET)


async def _interrupts() -> None:
    raise KeyboardInterrupt(SECRET)


async def _refuses_with_status_500() -> None:
    raise NotARefusal(SECRET)


async def _succeeds() -> None:
    """Does not fail; only the annotation is invalid."""


WAYS = {
    "refuses": _refuses,
    "refuses with a lone surrogate": _refuses_with_a_surrogate,
    "raises": _raises,
    "sleeps": _sleeps,
    "cancels": _cancels,
    "exits": _exits,
    "interrupts": _interrupts,
    "refuses with status 500": _refuses_with_status_500,
}
SAYS: dict[str, Any] = {
    "annotation is not JSON": {"a": object()},
    "annotation is NaN": {"a": float("nan")},
    "annotation number is too large": {"a": 2**80},
    "annotation has a lone surrogate": {"a": "\ud83d"},
    "annotation is too large": {"a": "x" * 20_000},
}


class Failing(Hook):
    """Fails in the call `at` by one of `WAYS`, or returns one of the invalid `SAYS`."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.at, self.way = str(options["at"]), str(options["way"])

    async def before(self, request: Request) -> Changes | None:
        if self.at != "before":
            return None
        await WAYS.get(self.way, _succeeds)()
        return Changes(annotation=SAYS.get(self.way))

    async def after(self, request: Request, answer: Answer) -> Annotation | None:
        if self.at == "after":
            await WAYS.get(self.way, _succeeds)()
            return dict(SAYS[self.way])
        return None


class Garbling(Hook):
    """Returns changes that are invalid."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.changes = {
            "items": Changes(items=("Hi",)),  # type: ignore[arg-type]
            "sampling": Changes(sampling=0.5),  # type: ignore[arg-type]
            "effort": Changes(effort="endless"),  # type: ignore[arg-type]
            "not changes": "Hi",
        }[str(options["what"])]

    async def before(self, request: Request) -> Changes | None:
        return self.changes  # type: ignore[return-value]


class Waiting(Hook):
    """Delays every request until a file exists, and creates a second file when it is called."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.file = Path(str(options["file"]))

    async def before(self, request: Request) -> Changes | None:
        CALLS.append(("before", request, None))
        self.file.with_suffix(".reached").touch()
        while not self.file.exists():
            await asyncio.sleep(0.01)
        return None


class Unmakeable(Hook):
    """Raises in its constructor."""

    def __init__(self, options: Mapping[str, object]) -> None:
        raise SystemExit("no licence")


class Halved:
    """Has only one method of the protocol."""

    def __init__(self, options: Mapping[str, object]) -> None:
        del options

    async def before(self, request: Request) -> Changes | None:
        return None


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Install these hooks, and `points` (names and import paths) in addition."""
    entry_points = {
        kind.__name__.lower(): f"{__name__}:{kind.__name__}" for kind in (Hearing, Replacing, Failing, Garbling)
    }
    entry_points |= {"halved": f"{__name__}:Halved", "gone": "no_such_package:Hook"}
    entry_points["unmakeable"] = f"{__name__}:Unmakeable"
    info = folder / "hooks_of_the_tests-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hooks-of-the-tests\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in (entry_points | points).items()]
    (info / "entry_points.txt").write_text("\n".join(["[unisono.hooks]", *lines, ""]))
    monkeypatch.syspath_prepend(str(folder))
    CALLS.clear()
