"""Descriptions of images by a vision model: content, cache, limits and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.api.scripted import ScriptedTurns, Step
from unisono.api.image_descriptions import (
    MAX_CONCURRENT,
    MAX_DESCRIPTION_CHARS,
    MAX_NEW_IMAGES,
    RETRY_AFTER_S,
    DescriptionCache,
    ImageDescriber,
    ImageDescription,
    VisionRequest,
)
from unisono.core.access import Caller
from unisono.core.events import Passed
from unisono.core.quotas import KeyLimits
from unisono.errors import BackendUnavailable, LimitReached

Json = dict[str, Any]
VISION = VisionRequest("vl", Caller("team"), "req_1")


def image(data: str = "AA==") -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def completion(content: Any, **choice: Any) -> list[Step]:
    return [[Passed({"choices": [{"message": {"role": "assistant", "content": content}, **choice}]})]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def urls_of(service: ScriptedTurns) -> list[str]:
    """Return the addresses that the vision model got, in order."""
    bodies: list[Any] = [turn.passthrough.body for turn in service.turns if turn.passthrough is not None]
    return [body["messages"][0]["content"][1]["image_url"]["url"] for body in bodies]


PARTS: dict[str, tuple[Json, str | None]] = {
    # case: (part, address for the vision model, None for none)
    "chat": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "data:image/png;base64,AA=="),
    "chat, short": ({"type": "image_url", "image_url": "https://a.example/b.png"}, "https://a.example/b.png"),
    "responses": ({"type": "input_image", "image_url": "http://a.example/b.png"}, "http://a.example/b.png"),
    "messages": (image(), "data:image/png;base64,AA=="),
    "messages, address": ({"type": "image", "source": {"type": "url", "url": "HTTPS://a/b"}}, "HTTPS://a/b"),
    "a file of the server": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, None),
    "other data": ({"type": "image_url", "image_url": {"url": "data:text/html,a"}}, None),
    "a file id": ({"type": "input_image", "file_id": "file_1"}, None),
    "a stored file": ({"type": "image", "source": {"type": "file", "file_id": "file_1"}}, None),
    "a number": ({"type": "image_url", "image_url": 7}, None),
    "nothing": ({"type": "image"}, None),
}


@pytest.mark.parametrize(("part", "url"), PARTS.values(), ids=PARTS)
async def test_the_vision_model_gets_the_address_unchanged(part: Json, url: str | None) -> None:
    service = ScriptedTurns(completion("A dot."))
    described = (await ImageDescriber(service).describe({"a": part}, VISION))["a"]
    assert urls_of(service) == ([] if url is None else [url])
    assert (described.text, bool(described.problem)) == (("A dot.", False) if url else ("", True))


CONTENT: dict[str, tuple[list[Step], str]] = {
    # case: (answer of the vision model, description)
    "text": (completion("A red square."), "A red square."),
    "several lines": (completion(" A red\n\nsquare.\t"), "A red square."),
    "reasoning in the text": (completion("<think>Hm.</think>A red square."), "A red square."),
    "lone surrogate": (completion("A \ud800 square."), "A \ufffd square."),
    "very long": (completion("a" * 9_000), "a" * MAX_DESCRIPTION_CHARS + "…"),
    "empty": (completion(" \n"), ""),
    "no text": (completion(None), ""),
    "a list": (completion([{"type": "text", "text": "A"}]), ""),
    "filtered": (completion("I cannot", finish_reason="content_filter"), ""),
    "refused": ([[Passed({"choices": [{"message": {"content": "No.", "refusal": "No."}}]})]], ""),
    "no message": ([[Passed({"choices": [{}]})]], ""),
    "no choice": ([[Passed({"choices": []})]], ""),
    "no body": ([[]], ""),
    "failure": ([BackendUnavailable("It is gone.")], ""),
    "limit of the key": ([LimitReached("Too many.")], ""),
    "fault": ([ValueError("a fault")], ""),
}


@pytest.mark.parametrize(("answer", "text"), CONTENT.values(), ids=CONTENT)
async def test_any_answer_gives_a_description_or_a_problem(answer: Sequence[Step], text: str) -> None:
    described = (await ImageDescriber(ScriptedTurns(answer)).describe({"a": image()}, VISION))["a"]
    assert (described.text, bool(described.problem)) == (text, not text)


async def test_an_image_is_described_once_per_tenant_and_model() -> None:
    service = ScriptedTurns(completion("One."), completion("Two."), completion("Three."))
    describer = ImageDescriber(service)
    first = await describer.describe({"a": image(), "b": image()}, VISION)
    assert [each.text for each in first.values()] == ["One.", "One."]
    assert await describer.describe({"a": image(), "b": image()}, VISION) == first
    assert len(service.runs) == 1
    other = VisionRequest("vl", Caller("other"), "req_2")
    assert (await describer.describe({"a": image()}, other))["a"].text == "Two."
    assert (await describer.describe({"a": image()}, VisionRequest("vl-2", Caller("team"))))["a"].text == "Three."
    assert {turn.origin.tenant for turn in service.turns} == {"team", "other"}
    assert service.turns[0].origin.request_id == "req_1-image"


async def test_concurrent_requests_agree_on_one_description() -> None:
    service = ScriptedTurns([0.02, *completion("Slow.")], completion("Fast."))
    describer = ImageDescriber(service)
    slow, fast = await asyncio.gather(
        describer.describe({"a": image()}, VISION), describer.describe({"a": image()}, VISION)
    )
    assert slow == fast == {"a": ImageDescription("Fast.")}


async def test_a_slow_image_does_not_hold_up_the_others() -> None:
    service = ScriptedTurns(completion("New."), [60.0])
    describer = ImageDescriber(service, timeout_s=0.05)
    described = await describer.describe({"old": image("BB=="), "new": image("AA==")}, VISION)
    assert described["new"].text == "New."
    assert described["old"].problem == "the images were not described within 0.05 s"
    assert [run.closed for run in service.runs] == [1, 1]


async def test_a_failed_image_is_tried_again_later() -> None:
    clock = Clock()
    service = ScriptedTurns([BackendUnavailable("It is gone.")], completion("A dot."))
    describer = ImageDescriber(service, DescriptionCache(clock=clock))
    for now, text, requests in ((0.0, "", 1), (RETRY_AFTER_S - 1, "", 1), (RETRY_AFTER_S, "A dot.", 2)):
        clock.now = now
        assert (await describer.describe({"a": image()}, VISION))["a"].text == text
        assert len(service.runs) == requests


async def test_a_count_asks_no_vision_model() -> None:
    service = ScriptedTurns(completion("A dot."))
    describer = ImageDescriber(service)
    counting = VisionRequest("vl", Caller("team"), can_ask=False)
    assert (await describer.describe({"a": image()}, counting))["a"].problem
    assert service.runs == []
    await describer.describe({"a": image()}, VISION)
    assert (await describer.describe({"a": image()}, counting))["a"].text == "A dot."


async def test_only_the_newest_of_many_new_images_are_described() -> None:
    service = ScriptedTurns(completion("A dot."))
    images = {f"{number}": image(f"{number:04}") for number in range(MAX_NEW_IMAGES + 5)}
    described = await ImageDescriber(service).describe(images, VISION)
    assert [bool(each.text) for each in described.values()] == [False] * 5 + [True] * MAX_NEW_IMAGES


class CountingService(ScriptedTurns):
    """Service that measures how many of its streams run at the same time."""

    def __init__(self) -> None:
        super().__init__([0.01, *completion("A dot.")])
        self.running = self.maximum = 0

    def start(self, turn: Any) -> Any:
        run = super().start(turn)
        self.running += 1
        self.maximum = max(self.maximum, self.running)
        close = run.aclose

        async def closed() -> None:
            self.running -= 1
            await close()

        run.aclose = closed  # type: ignore[method-assign]
        return run


@pytest.mark.parametrize(("limit", "expected"), [(None, MAX_CONCURRENT), (1, 1), (2, 2), (9, MAX_CONCURRENT)])
async def test_the_images_of_a_request_are_described_with_bounded_concurrency(limit: int | None, expected: int) -> None:
    service = CountingService()
    caller = Caller("team", "key", limits=KeyLimits(max_parallel=limit))
    images: Mapping[str, Json] = {f"{number}": image(f"{number:04}") for number in range(8)}
    await ImageDescriber(service).describe(images, VisionRequest("vl", caller))
    assert service.maximum == expected


def test_the_cache_keeps_the_most_recent_descriptions() -> None:
    cache = DescriptionCache(capacity=2)
    for name in ("a", "b"):
        cache.put(name.encode(), ImageDescription(name))
    assert cache.get(b"a")
    cache.put(b"c", ImageDescription("c"))
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    cache.put(b"c", ImageDescription("another"))
    assert cache.get(b"c") == ImageDescription("c")
