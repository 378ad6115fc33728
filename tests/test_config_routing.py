"""Routing settings: fallbacks, limits, reloads, and the figures of docs/routing.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.bootstrap.deployments import build_pool, routing_rules
from unisono.config import Config, ModelRegistry, parse
from unisono.core.fallback_models import FallbackModels
from unisono.errors import ConfigError
from unisono.routing.attempt_timeouts import MinTimeouts
from unisono.routing.circuit_breaker import MAX_COOLDOWN_S
from unisono.routing.deployment_choice import Strategy
from unisono.routing.failover_route import MAX_FAILED_ATTEMPTS
from unisono.routing.prefix_index import BLOCKS

PAGE = Path(__file__).parent.parent / "docs" / "routing.md"


def entry(name: str, **params: Any) -> dict[str, Any]:
    sections = {key: params.pop(key) for key in ("unisono", "model_info") if key in params}
    api_base = params.pop("api_base", f"http://{name}:1")
    return {"model_name": name, "litellm_params": {"model": "vllm/gpt-oss", "api_base": api_base, **params}, **sections}


def config(*entries: dict[str, Any], **sections: Any) -> Config:
    return parse({"model_list": list(entries), **sections}, {}).config


THREE = [entry("a"), entry("b"), entry("c")]

FALLBACKS: dict[str, tuple[dict[str, Any], dict[str, FallbackModels]]] = {
    "none": ({}, {}),
    "fallbacks of one model": (
        {"router_settings": {"fallbacks": [{"a": ["b", "c"]}]}},
        {"a": FallbackModels(("b", "c"))},
    ),
    "mutual fallbacks": (
        {"router_settings": {"fallbacks": [{"a": ["b"]}, {"b": ["a"]}]}},
        {"a": FallbackModels(("b",)), "b": FallbackModels(("a",))},
    ),
    "fallback to itself": ({"router_settings": {"fallbacks": [{"a": ["a", "b"]}]}}, {"a": FallbackModels(("b",))}),
    "fallback for all other models": (
        {"router_settings": {"fallbacks": [{"a": ["b"]}, {"*": ["c"]}]}},
        {"a": FallbackModels(("b",)), "b": FallbackModels(("c",))},
    ),
    "default fallbacks": (
        {"router_settings": {"fallbacks": [{"a": ["b"]}], "default_fallbacks": ["c"]}},
        {"a": FallbackModels(("b",)), "b": FallbackModels(("c",))},
    ),
    "context window fallbacks": (
        {"router_settings": {"context_window_fallbacks": [{"a": ["b"]}], "fallbacks": [{"a": ["c"]}]}},
        {"a": FallbackModels(("c",), ("b",))},
    ),
    "in litellm_settings": ({"litellm_settings": {"fallbacks": [{"a": ["b"]}]}}, {"a": FallbackModels(("b",))}),
    "router_settings override litellm_settings": (
        {"litellm_settings": {"fallbacks": [{"a": ["b"]}]}, "router_settings": {"fallbacks": [{"a": ["c"]}]}},
        {"a": FallbackModels(("c",))},
    ),
    "by alias": (
        {"router_settings": {"fallbacks": [{"x": ["y"]}], "model_group_alias": {"x": "a", "y": "b"}}},
        {"a": FallbackModels(("b",))},
    ),
}


@pytest.mark.parametrize(("sections", "expected"), FALLBACKS.values(), ids=FALLBACKS)
def test_fallbacks_resolve_to_groups(sections: dict[str, Any], expected: dict[str, FallbackModels]) -> None:
    assert ModelRegistry(config(*THREE, **sections)).fallback_models == expected


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mapping instead of a list": (
        {"router_settings": {"fallbacks": {"a": ["b"]}}},
        "router_settings.fallbacks: input should be a list",
    ),
    "name instead of a list": (
        {"litellm_settings": {"fallbacks": [{"a": "b"}]}},
        "litellm_settings.fallbacks[0].a: input should be a list",
    ),
    "unknown fallback": (
        {"router_settings": {"fallbacks": [{"a": ["b"]}, {"a": ["b", "z"]}]}},
        "router_settings.fallbacks[1].a[1]: unknown model `z`; use a `model_name` from `model_list`",
    ),
    "two lists for one model": (
        {"router_settings": {"fallbacks": [{"a": ["b"]}, {"a": ["c"]}]}},
        "router_settings.fallbacks[1].a: this is a second list for the model `a`; merge the two lists",
    ),
    "two lists, one by alias": (
        {"router_settings": {"fallbacks": [{"a": ["b"]}, {"x": ["c"]}], "model_group_alias": {"x": "a"}}},
        "router_settings.fallbacks[1].x: this is a second list for the model `a`; merge the two lists",
    ),
    "fallback of an unknown model": (
        {"litellm_settings": {"context_window_fallbacks": [{"z": ["a"]}]}},
        "litellm_settings.context_window_fallbacks[0].z: unknown model `z`; use a `model_name` from `model_list`",
    ),
    "unknown default fallback": (
        {"router_settings": {"default_fallbacks": ["a", "z"]}},
        "router_settings.default_fallbacks[1]: unknown model `z`; use a `model_name` from `model_list`",
    ),
}


@pytest.mark.parametrize(("sections", "message"), WRONG.values(), ids=WRONG)
def test_an_invalid_fallback_is_rejected_with_its_path(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ModelRegistry(config(*THREE, **sections))
    assert str(raised.value) == message


def test_an_unknown_routing_strategy_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^router_settings\.routing_strategy: "):
        config(router_settings={"routing_strategy": "fastest"})


SHARES: dict[str, tuple[int, int | None, int | None, tuple[int, int | None]]] = {
    "one process": (1, 8, 9000, (8, 9000)),
    "two processes": (2, 8, 9000, (4, 4500)),
    "more processes than slots": (16, 8, 9, (1, 1)),
}


@pytest.mark.parametrize(("share", "requests", "tokens", "expected"), SHARES.values(), ids=SHARES)
def test_processes_share_the_limits(
    share: int, requests: int | None, tokens: int | None, expected: tuple[int, int | None]
) -> None:
    settings = config(
        entry(
            "a",
            max_parallel_requests=requests,
            rpm=requests,
            tpm=tokens,
            order=2,
            weight=3,
            unisono={"max_tokens_in_flight": tokens},
        ),
        entry("b"),
        unisono={"max_queue": 10, "max_queue_per_key": 3},
    )
    pool = build_pool(settings, ModelRegistry(settings), share=share)
    terms = pool.members()["a"][0].terms
    assert (terms.max_requests, terms.max_tokens) == expected
    assert (terms.requests_per_minute, terms.tokens_per_minute) == (requests and expected[0], tokens and expected[1])
    assert (terms.order, terms.weight) == (2, 3)
    unbounded = pool.members()["b"][0].terms
    assert (unbounded.max_requests, unbounded.max_tokens) == (None, None)
    assert (unbounded.requests_per_minute, unbounded.tokens_per_minute) == (None, None)
    bounds = routing_rules(settings, share).bounds
    assert (bounds.length, bounds.per_owner) == (max(1, 10 // share), max(1, 3 // share))


def test_a_queue_length_of_zero_stays_zero() -> None:
    assert routing_rules(config(unisono={"max_queue": 0, "max_queue_per_key": 0}), 4).bounds.length == 0


RELOADED_ENTRIES: dict[str, tuple[dict[str, Any], bool]] = {
    "unchanged": (entry("a"), True),
    "weight": (entry("a", weight=5), True),
    "limits": (entry("a", max_parallel_requests=5), True),
    "rate limits": (entry("a", rpm=5, tpm=100), True),
    "id": (entry("a", model_info={"id": "other"}), True),
    "model name": (entry("new", api_base="http://a:1"), True),
    "address": (entry("a", api_base="http://elsewhere:1"), False),
    "API key": (entry("a", api_key="sk-other"), False),
    "context window": (entry("a", model_info={"max_input_tokens": 9}), False),
    "adapter settings": (entry("a", unisono={"backend": {"stream_interval": 3}}), False),
}


@pytest.mark.parametrize(("changed", "is_kept"), RELOADED_ENTRIES.values(), ids=RELOADED_ENTRIES)
async def test_a_reload_keeps_a_deployment_of_the_same_backend(changed: dict[str, Any], is_kept: bool) -> None:
    before, after = config(entry("a"), entry("b")), config(changed, entry("b"))
    old = build_pool(before, ModelRegistry(before))
    new = build_pool(after, ModelRegistry(after), keep=old)
    model = changed["model_name"]
    assert (new.members()[model][0] is old.members()["a"][0]) is is_kept
    assert new.members()["b"][0] is old.members()["b"][0]
    # Two entries of the same backend are two deployments.
    twice = config(entry("a"), entry("a"), entry("b"))
    identities = [id(live) for live in build_pool(twice, ModelRegistry(twice), keep=old).members()["a"]]
    assert len(set(identities)) == 2
    await new.aclose()
    await old.aclose()


def shared(name: str, deployment: str | None = None) -> dict[str, Any]:
    return entry(name, api_base="http://shared:1", model_info={"id": deployment})


# Entries of one server before and after a reload, and the index of the old entry that each new entry continues.
SHARED_SERVERS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], list[int | None]]] = {
    "added before": ([shared("a", "one")], [shared("b", "two"), shared("a", "one")], [None, 0]),
    "added before, without ids": ([shared("a")], [shared("b"), shared("a")], [None, 0]),
    "first removed": ([shared("a", "one"), shared("b", "two")], [shared("b", "two")], [1]),
    "first removed, without ids": ([shared("a"), shared("b")], [shared("b")], [1]),
    "same model name, swapped": (
        [shared("a", "one"), shared("a", "two")],
        [shared("a", "two"), shared("a", "one")],
        [1, 0],
    ),
    "model name moves to another id": ([shared("a", "one")], [shared("a", "two"), shared("b", "one")], [None, 0]),
    "renamed without ids": ([shared("a"), shared("b")], [shared("b"), shared("c")], [1, 0]),
    "both renamed": ([shared("a", "one"), shared("b", "two")], [shared("c", "two"), shared("d", "one")], [1, 0]),
}


@pytest.mark.parametrize(("before", "after", "expected"), SHARED_SERVERS.values(), ids=SHARED_SERVERS)
async def test_a_reload_keeps_the_deployment_of_each_entry_of_one_server(
    before: list[dict[str, Any]], after: list[dict[str, Any]], expected: list[int | None]
) -> None:
    settings, reloaded = config(*before), config(*after)
    old = build_pool(settings, ModelRegistry(settings))
    lives = [live for members in old.members().values() for live in members]
    new = build_pool(reloaded, ModelRegistry(reloaded), keep=old)
    kept = [live for members in new.members().values() for live in members]
    assert [lives.index(live) if live in lives else None for live in kept] == expected
    await new.aclose()
    await old.aclose()


def examples() -> list[str]:
    return [part.partition("```")[0] for part in PAGE.read_text().split("```yaml\n")[1:]]


def test_the_examples_of_the_page_load_without_warnings() -> None:
    assert examples()
    for text in examples():
        loaded = parse(yaml.safe_load(text), {})
        assert loaded.warnings == ()
        build_pool(loaded.config, ModelRegistry(loaded.config))


def test_the_figures_of_the_page_match_the_code() -> None:
    page = " ".join(PAGE.read_text().split())
    defaults = Config()
    assert f"default {defaults.num_retries} |" in page
    assert f"in a row that are allowed; default {defaults.router_settings.allowed_fails} |" in page
    assert f"seconds of the first cooldown; default {defaults.router_settings.cooldown_time:g} |" in page
    assert f"{BLOCKS:,} blocks" in page
    assert f"with a default of {MinTimeouts().first_token_s:g} seconds" in page
    assert MinTimeouts().first_token_s == MinTimeouts().silence_s
    assert MAX_COOLDOWN_S == 300
    assert MAX_FAILED_ATTEMPTS == 5
    for strategy in Strategy:
        assert f"`{strategy.value}`" in page
