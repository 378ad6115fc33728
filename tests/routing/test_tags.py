"""Tag-based routing with LiteLLM's rules, and the routing that a request chooses."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.routing.doubles import REQUEST, REQUIREMENTS, Clock, live_of
from unisono.core.fallback_models import FallbackModels
from unisono.core.route_protocol import FailoverRoute, RequestedRouting, RouteRequest
from unisono.errors import BackendUnavailable, UnsupportedValue
from unisono.routing.deployment_choice import Strategy
from unisono.routing.group import RoutingRules
from unisono.routing.pool import RoutingPool
from unisono.routing.tags import TagRules

# Tags of the deployments, by name.
TEAMS = {"a": {"team-a"}, "b": {"team-b", "eu"}, "ab": {"team-a", "eu"}, "plain": set()}
WITH_DEFAULT = {"a": {"team-a"}, "d": {"default"}, "de": {"default", "eu"}}
ANY, ALL = TagRules(), TagRules(match_any=False)

CASES: dict[str, tuple[TagRules, dict[str, set[str]], list[str], str]] = {
    "no tags, no default": (ANY, TEAMS, [], "a b ab plain"),
    "no tags": (ANY, WITH_DEFAULT, [], "d de"),
    "one tag": (ANY, TEAMS, ["team-a"], "a ab"),
    "any of two": (ANY, TEAMS, ["team-a", "eu"], "a b ab"),
    "all of two": (ALL, TEAMS, ["team-a", "eu"], "ab"),
    "all of two that no deployment has": (ALL, TEAMS, ["team-a", "team-b"], ""),
    "unknown tag": (ANY, WITH_DEFAULT, ["other"], "d de"),
    "unknown tag, no default": (ANY, TEAMS, ["other"], ""),
    "unknown tag beside a known one": (ANY, WITH_DEFAULT, ["other", "team-a"], "a"),
    "the default tag itself": (ANY, WITH_DEFAULT, ["default"], "d de"),
    "excluded": (ANY, TEAMS, ["!eu"], "a plain"),
    "excluded among the default": (ANY, WITH_DEFAULT, ["!eu"], "d"),
    "all excluded": (ANY, WITH_DEFAULT, ["!default"], ""),
    "wanted and excluded": (ANY, TEAMS, ["team-a", "!eu"], "a"),
    "a known tag does not lead to the default": (ANY, WITH_DEFAULT, ["team-a", "!team-a"], ""),
    "required": (ANY, TEAMS, ["&eu"], "b ab"),
    "required and wanted": (ANY, TEAMS, ["&eu", "team-a"], "ab"),
    "required, unknown": (ANY, WITH_DEFAULT, ["&other"], ""),
}


@pytest.mark.parametrize(("rules", "deployments", "requested", "expected"), CASES.values(), ids=CASES)
def test_deployments_are_selected_by_tags(
    rules: TagRules, deployments: dict[str, set[str]], requested: list[str], expected: str
) -> None:
    assert rules.select([*deployments.items()], requested) == expected.split()


async def pool_of(
    groups: dict[str, dict[str, set[str]]],
    rules: RoutingRules,
    fallback_models: dict[str, FallbackModels] | None = None,
) -> RoutingPool:
    clock = Clock()
    terms: Any = {
        model: [live_of(name, clock, tags=frozenset(tags)) for name, tags in members.items()]
        for model, members in groups.items()
    }
    pool = RoutingPool(terms, rules, fallback_models=fallback_models, clock=clock)
    await pool.wait_for_probes(5)
    return pool


async def attempts_of(route: FailoverRoute) -> list[str]:
    """Return the deployments of a route whose attempts all fail."""
    names: list[str] = []
    with suppress(BackendUnavailable):
        while len(names) < 20:
            with await route.next_slot(REQUIREMENTS) as slot:
                names.append(slot.deployment.name)
                slot.failed(BackendUnavailable("gone"))
    return names


def asking(**routing: Any) -> RouteRequest:
    return replace(REQUEST, requested=RequestedRouting(**routing))


@pytest.mark.parametrize("strategy", Strategy)
async def test_requests_with_a_tag_share_its_deployments(strategy: Strategy) -> None:
    """Deployments that a tag rules out must not stop the alternation among the others."""
    pool = await pool_of({"m": TEAMS}, RoutingRules(strategy=strategy, tags=ANY))
    counts: Counter[str] = Counter()
    for _ in range(10):
        with await pool.route(asking(tags=("team-a",))).next_slot(REQUIREMENTS) as slot:
            counts[slot.deployment.name] += 1
    assert counts.keys() <= {"a", "ab"}
    assert strategy is Strategy.PREFIX_AWARE or counts == {"a": 5, "ab": 5}


async def test_a_failure_never_leads_to_a_deployment_without_the_tag() -> None:
    pool = await pool_of({"m": TEAMS}, RoutingRules(num_retries=9, tags=ANY))
    names = await attempts_of(pool.route(asking(tags=("team-a",))))
    assert sorted(names) == ["a", "ab"]


async def test_fallbacks_are_filtered_by_tags_too() -> None:
    groups = {"m": {"m1": {"x"}}, "n": {"n1": {"y"}, "n2": {"x"}}, "o": {"o1": {"z"}}}
    pool = await pool_of(groups, RoutingRules(num_retries=0, tags=ANY), {"m": FallbackModels(("o", "n"))})
    names = await attempts_of(pool.route(asking(tags=("x",))))
    assert names == ["m1", "n2"]
    # The own deployments have not the tag, those of a fallback have.
    with await pool.route(asking(tags=("z",))).next_slot(REQUIREMENTS) as slot:
        assert slot.deployment.name == "o1"


async def test_tags_that_no_deployment_has_are_an_error() -> None:
    pool = await pool_of({"m": TEAMS}, RoutingRules(tags=ANY))
    with pytest.raises(UnsupportedValue, match="`an alias of m`") as caught:
        pool.route(asking(tags=("other",), model="an alias of m"))
    assert caught.value.param == "tags"


async def test_tags_select_nothing_unless_the_operator_wants_it() -> None:
    pool = await pool_of({"m": TEAMS}, RoutingRules())
    assert pool.route(asking(tags=("other",)))


FALLBACKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "configured": ({}, ["m1", "n1"]),
    "chosen": ({"fallbacks": ("o", "n")}, ["m1", "o1", "n1"]),
    "the model itself": ({"fallbacks": ("m", "o")}, ["m1", "o1"]),
    "none": ({"fallbacks": ()}, ["m1"]),
    "disabled": ({"fallbacks": ("o",), "no_fallbacks": True}, ["m1"]),
    "no retries": ({"num_retries": 0, "fallbacks": ("o",)}, ["m1", "o1"]),
}


@pytest.mark.parametrize(("routing", "expected"), FALLBACKS.values(), ids=FALLBACKS)
async def test_a_request_chooses_its_fallbacks(routing: dict[str, Any], expected: list[str]) -> None:
    groups: dict[str, dict[str, set[str]]] = {"m": {"m1": set()}, "n": {"n1": set()}, "o": {"o1": set()}}
    pool = await pool_of(groups, RoutingRules(), {"m": FallbackModels(("n",))})
    names = await attempts_of(pool.route(asking(**routing)))
    assert names == expected


@pytest.mark.parametrize(("chosen", "attempts"), [(None, 2), (0, 1), (1, 2), (3, 4)])
async def test_a_request_chooses_its_number_of_retries(chosen: int | None, attempts: int) -> None:
    pool = await pool_of({"m": {name: set() for name in "abcdef"}}, RoutingRules(num_retries=1))
    names = await attempts_of(pool.route(asking(num_retries=chosen)))
    assert len(names) == attempts
