"""Options of the gateway in forms: fallbacks, retries, tags, guardrails and the end user."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import Refusal
from tests.fakes.openai_modes import FakeModes
from tests.passthrough.test_other_modes import model
from tests.passthrough.test_passing_chat import served
from tests.passthrough.test_transcriptions import MODE, USUAL, Part, form, listening, parts_of, send

FALLBACKS: dict[str, tuple[Part, ...]] = {
    "JSON": (("fallbacks", None, b'["spare"]'),),
    "objects": (("fallbacks", None, b'[{"model": "spare"}]'),),
    "names of a list": (("fallbacks[]", None, b"spare"),),
}


@pytest.mark.parametrize("parts", FALLBACKS.values(), ids=FALLBACKS)
async def test_a_form_chooses_its_fallback(parts: tuple[Part, ...]) -> None:
    async with (
        FakeModes(Refusal(500, b"{}")) as broken,
        FakeModes() as works,
        served(
            model(broken.url, MODE), model(works.url, MODE, name="spare"), router_settings={"num_retries": 0}
        ) as running,
    ):
        failed = await send(running)
        answer = await send(running, [*USUAL, *parts])
    assert failed.status >= 500
    assert answer.status == 200
    assert answer.headers["x-unisono-backend"] == "vllm-2"
    [seen] = works.requests
    assert sorted(parts_of(seen)) == sorted([("model", None, b"bge"), *USUAL[1:]])


async def test_a_form_forbids_fallbacks_and_retries() -> None:
    settings = {"num_retries": 2, "fallbacks": [{"other": ["spare"]}]}
    async with (
        FakeModes(Refusal(500, b"{}")) as broken,
        FakeModes() as works,
        served(model(broken.url, MODE), model(works.url, MODE, name="spare"), router_settings=settings) as running,
    ):
        parts: list[Part] = [("num_retries", None, b"0"), ("disable_fallbacks", None, b"true")]
        answer = await send(running, [*USUAL, *parts])
    assert answer.status >= 500
    assert (len(broken.requests), len(works.requests)) == (1, 0)


TAGS: dict[str, tuple[tuple[Part, ...], list[Part]]] = {
    "a list": ((("tags[]", None, b"quiet"),), []),
    "JSON": ((("tags", None, b'["quiet"]'),), []),
    "metadata": ((("metadata", None, b'{"tags": ["quiet"]}'),), []),
    "names in metadata": (
        (("metadata[tags][]", None, b"quiet"), ("metadata[a]", None, b"b")),
        [("metadata", None, b'{"a": "b"}')],
    ),
}


@pytest.mark.parametrize(("parts", "left"), TAGS.values(), ids=TAGS)
async def test_tags_of_a_form_choose_the_deployment(parts: tuple[Part, ...], left: list[Part]) -> None:
    async with (
        FakeModes() as usual,
        FakeModes() as quiet,
        served(
            model(usual.url, MODE, tags=["default"]),
            model(quiet.url, MODE, tags=["quiet"]),
            router_settings={"enable_tag_filtering": True},
        ) as running,
    ):
        assert (await send(running)).status == 200
        assert (await send(running, [*USUAL, *parts])).status == 200
    assert len(usual.requests) == 1
    assert sorted(parts_of(quiet.requests[0])) == sorted([("model", None, b"bge"), *USUAL[1:], *left])


async def test_other_metadata_is_forwarded_unchanged() -> None:
    parts: list[Part] = [("metadata", None, b'{"a":  1}'), ("metadata[b]", None, b"c")]
    for part in parts:
        async with listening() as (running, fake):
            assert (await send(running, [*USUAL, part])).status == 200
        assert part in parts_of(fake.requests[0])


async def test_fields_for_the_gateway_are_not_forwarded() -> None:
    parts: list[Part] = [("tags", None, b"x"), ("unisono", None, b'{"run_tools": false}')]
    async with listening() as (running, fake):
        assert (await send(running, [*USUAL, *parts])).status == 200
    assert {name for name, *_ in parts_of(fake.requests[0])}.isdisjoint({"tags", "unisono"})


BAD: dict[str, tuple[tuple[Part, ...], str]] = {
    "no list": ((("fallbacks", None, b"spare"),), "fallbacks"),
    "an unknown model": ((("fallbacks[]", None, b"nobody"),), "fallbacks.0"),
    "a number": ((("num_retries", None, b"many"),), "num_retries"),
    "a flag": ((("disable_fallbacks", None, b"yes"),), "disable_fallbacks"),
    "a file": ((("fallbacks", "a.json", b"[]"),), "fallbacks"),
    "tags in a file": ((("tags", "a.json", b"[]"),), "tags"),
    "a guardrail": ((("guardrails", None, b'["nobody"]'),), "guardrails"),
    "a guardrail in metadata": ((("metadata[guardrails][]", None, b"nobody"),), "metadata.guardrails"),
    "twice": ((("fallbacks", None, b"[]"), ("fallbacks", None, b"[]")), "fallbacks"),
    "two forms": ((("fallbacks", None, b"[]"), ("fallbacks[a]", None, b"x")), "fallbacks"),
    "lists of lists": ((("metadata[a][][]", None, b"x"),), "metadata"),
    "deep": ((("metadata[a][b][c][d]", None, b"x"),), "metadata"),
    "a mock": ((("mock_response", None, b"x"),), "mock_response"),
}


@pytest.mark.parametrize(("parts", "param"), BAD.values(), ids=BAD)
async def test_an_invalid_option_is_named(parts: tuple[Part, ...], param: str) -> None:
    async with listening() as (running, fake):
        answer = await send(running, body=form(*USUAL, *parts))
    expected = 404 if answer.body["error"]["code"] == "model_not_found" else 400
    assert (answer.status, answer.body["error"]["param"]) == (expected, param), answer.raw
    assert not fake.requests


async def test_the_end_user_of_a_form_is_known_and_forwarded() -> None:
    settings: dict[str, Any] = {"general_settings": {"enforce_user_param": True}}
    async with FakeModes() as fake, served(model(fake.url, MODE), **settings) as running:
        missing = await send(running)
        answer = await send(running, [*USUAL, ("user", None, b"ann")])
    assert (missing.status, missing.body["error"]["param"]) == (400, "user")
    assert answer.status == 200
    assert ("user", None, b"ann") in parts_of(fake.requests[0])
