"""Plans: what is taken, and what is said of one that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.errors import ConfigError
from unisono.simulation import BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan, parse

ONE = {"name": "a", "prefill_tps": 1000, "decode_tps": 50}

TAKEN: dict[str, tuple[dict[str, Any], SimulationPlan]] = {
    "the least there is": ({"backends": [ONE]}, SimulationPlan((BackendPlan("a", 1000.0, 50.0),))),
    "everything": (
        {
            "backends": [
                {
                    **ONE,
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
    "nothing, said": (
        {"backends": [{**ONE, "max_parallel_requests": None}], "traffic": {"burst": None}},
        SimulationPlan((BackendPlan("a", 1000.0, 50.0),)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "plan"), TAKEN.values(), ids=TAKEN)
def test_a_plan_is_what_is_written_and_the_defaults(data: dict[str, Any], plan: SimulationPlan) -> None:
    assert parse(data) == plan


def one(**fields: Any) -> dict[str, Any]:
    return {"backends": [{**ONE, **fields}]}


REFUSED: dict[str, tuple[Any, str]] = {
    "no mapping": ([], "plan: must be a mapping of names to values"),
    "no backends": ({}, "backends: required field is missing"),
    "an empty list of them": ({"backends": []}, "backends: must have at least one backend"),
    "backends that are no list": ({"backends": {"a": ONE}}, "backends: must be a list"),
    "a backend that is text": ({"backends": ["a"]}, "backends[0]: must be a mapping of names to values"),
    "an unknown field": ({**one(), "reqests": 1}, "reqests: unknown field; known fields are backends, traffic"),
    "an unknown field inside": (one(speed=1), "backends[0].speed: unknown field"),
    "a field left out": (
        {"backends": [{"name": "a", "prefill_tps": 1}]},
        "backends[0].decode_tps: required field is missing",
    ),
    "text for a number": (one(prefill_tps="1000"), "backends[0].prefill_tps: must be a number, not '1000'"),
    "a part for a whole": (one(count=1.5), "backends[0].count: must be a whole number, not 1.5"),
    "true for a number": (one(weight=True), "backends[0].weight: must be a whole number, not True"),
    "a number for true": (one(prefix_cache=1), "backends[0].prefix_cache: must be true or false"),
    "nothing where something has to be": (one(max_batch=None), "backends[0].max_batch: must be a whole number"),
    "too little": (one(decode_tps=0), "backends[0].decode_tps: must be from 0.1 to 1e+09, not 0"),
    "too much": ({**one(), "requests": 10**9}, "requests: must be from 1 to 1e+06, not 1000000000"),
    "not a number": ({**one(), "traffic": {"rate": float("nan")}}, "traffic.rate: must be from 1e-06"),
    "no name": (one(name=""), "backends[0].name: must be a non-empty string"),
    "a name that is a number": (one(name=7), "backends[0].name: must be a non-empty string"),
    "a name twice": ({"backends": [ONE, ONE]}, "backends[1].name: 'a' is already the name of another backend"),
    "too many": (
        {"backends": [{**ONE, "count": 1024}, {**ONE, "name": "b"}]},
        "backends: must not exceed 1024 backends",
    ),
    "an unknown strategy": (
        {**one(), "strategies": ["best"]},
        "strategies[0]: unknown strategy 'best'; must be one of prefix-aware",
    ),
    "no strategy": ({**one(), "strategies": []}, "strategies: must have at least one strategy"),
    "strategies that are text": ({**one(), "strategies": "least-busy"}, "strategies: must be a list"),
    "an outage without a time": (one(down=[{"for_s": 3}]), "backends[0].down[0].at_s: required field is missing"),
    "a burst without a length": (
        {**one(), "traffic": {"burst": {"for_s": 0}}},
        "traffic.burst.for_s: must be from 0.001",
    ),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_named_by_its_path(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data)
    assert str(caught.value).startswith(message)


def test_a_full_batch_is_never_slower_than_one_answer_alone() -> None:
    for batch in (1, 2, 8, 256):
        backend = BackendPlan("a", 1000.0, 50.0, max_batch=batch)
        assert backend.decode_total >= 50.0
        assert backend.decode_total <= 50.0 * batch
