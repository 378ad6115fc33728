"""Simulation plans: parsing, defaults and errors."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.errors import ConfigError
from unisono.simulation import BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan, parse

BACKEND = {"name": "a", "prefill_tps": 1000, "decode_tps": 50}

VALID: dict[str, tuple[dict[str, Any], SimulationPlan]] = {
    "only required fields": ({"backends": [BACKEND]}, SimulationPlan((BackendPlan("a", 1000.0, 50.0),))),
    "all fields": (
        {
            "backends": [
                {
                    **BACKEND,
                    "decode_total_tps": 900.5,
                    "max_batch": 8,
                    "cache_tokens": 0,
                    "prefix_cache": False,
                    "count": 3,
                    "weight": 2,
                    "order": 1,
                    "max_parallel_requests": 4,
                    "max_tokens_in_flight": 9000,
                    "rpm": 60,
                    "tpm": 90000,
                    "down": [{"at_s": 1}, {"at_s": 50, "for_s": 0.5}],
                }
            ],
            "traffic": {
                "rate": 1,
                "burst": {"every_s": 10, "for_s": 1, "times": 0},
                "keys": 2,
                "visible": 1,
                "sticky": True,
            },
            "requests": 5,
            "max_queue": 0,
            "queue_timeout_s": 0,
            "strategies": ["least-busy"],
            "seed": 0,
        },
        SimulationPlan(
            (
                BackendPlan(
                    "a", 1000.0, 50.0, 900.5, 8, 0, False, 3, 2, 1, 4, 9000, 60, 90000, (Outage(1.0), Outage(50.0, 0.5))
                ),
            ),
            TrafficPlan(rate=1.0, burst=Burst(10.0, 1.0, 0.0), sticky=True, keys=2, visible=1.0),
            5,
            0,
            0.0,
            ("least-busy",),
            0,
        ),
    ),
    "explicit null": (
        {"backends": [{**BACKEND, "max_parallel_requests": None}], "traffic": {"burst": None}},
        SimulationPlan((BackendPlan("a", 1000.0, 50.0),)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "plan"), VALID.values(), ids=VALID)
def test_a_plan_has_its_own_values_and_defaults(data: dict[str, Any], plan: SimulationPlan) -> None:
    assert parse(data) == plan


def backend_with(**fields: Any) -> dict[str, Any]:
    return {"backends": [{**BACKEND, **fields}]}


INVALID: dict[str, tuple[Any, str]] = {
    "no mapping": ([], "plan: must be a mapping of names to values"),
    "no backends": ({}, "backends: required field is missing"),
    "an empty list of backends": ({"backends": []}, "backends: must have at least one backend"),
    "backends as a mapping": ({"backends": {"a": BACKEND}}, "backends: must be a list"),
    "a backend as text": ({"backends": ["a"]}, "backends[0]: must be a mapping of names to values"),
    "an unknown field": (
        {**backend_with(), "reqests": 1},
        "reqests: unknown field; known fields are backends, traffic",
    ),
    "an unknown field of a backend": (backend_with(speed=1), "backends[0].speed: unknown field"),
    "a missing field": (
        {"backends": [{"name": "a", "prefill_tps": 1}]},
        "backends[0].decode_tps: required field is missing",
    ),
    "text for a number": (backend_with(prefill_tps="1000"), "backends[0].prefill_tps: must be a number, not '1000'"),
    "a fraction for a whole number": (backend_with(count=1.5), "backends[0].count: must be a whole number, not 1.5"),
    "true for a number": (backend_with(weight=True), "backends[0].weight: must be a whole number, not True"),
    "a number for true": (backend_with(prefix_cache=1), "backends[0].prefix_cache: must be true or false"),
    "null for a required value": (backend_with(max_batch=None), "backends[0].max_batch: must be a whole number"),
    "a number that is too small": (
        backend_with(decode_tps=0),
        "backends[0].decode_tps: must be from 0.1 to 1e+09, not 0",
    ),
    "a number that is too large": (
        {**backend_with(), "requests": 10**9},
        "requests: must be from 1 to 1e+06, not 1000000000",
    ),
    "not a number": ({**backend_with(), "traffic": {"rate": float("nan")}}, "traffic.rate: must be from 1e-06"),
    "an empty name": (backend_with(name=""), "backends[0].name: must be a non-empty string"),
    "a number as a name": (backend_with(name=7), "backends[0].name: must be a non-empty string"),
    "a duplicate name": (
        {"backends": [BACKEND, BACKEND]},
        "backends[1].name: 'a' is already the name of another backend",
    ),
    "too many backends": (
        {"backends": [{**BACKEND, "count": 1024}, {**BACKEND, "name": "b"}]},
        "backends: must not exceed 1024 backends",
    ),
    "an unknown strategy": (
        {**backend_with(), "strategies": ["best"]},
        "strategies[0]: unknown strategy 'best'; must be one of prefix-aware",
    ),
    "an empty list of strategies": (
        {**backend_with(), "strategies": []},
        "strategies: must have at least one strategy",
    ),
    "strategies as text": ({**backend_with(), "strategies": "least-busy"}, "strategies: must be a list"),
    "an outage without a time": (
        backend_with(down=[{"for_s": 3}]),
        "backends[0].down[0].at_s: required field is missing",
    ),
    "a burst without a length": (
        {**backend_with(), "traffic": {"burst": {"for_s": 0}}},
        "traffic.burst.for_s: must be from 0.001",
    ),
}


@pytest.mark.parametrize(("data", "message"), INVALID.values(), ids=INVALID)
def test_an_error_begins_with_the_path_of_the_field(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data)
    assert str(caught.value).startswith(message)


def test_a_full_batch_is_never_slower_than_a_single_request() -> None:
    for batch in (1, 2, 8, 256):
        backend = BackendPlan("a", 1000.0, 50.0, max_batch=batch)
        assert backend.decode_total >= 50.0
        assert backend.decode_total <= 50.0 * batch
