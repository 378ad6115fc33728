"""Records of requests: the facts of several generations in one record."""

from __future__ import annotations

from dataclasses import replace

from unisono.core.events import Repaired
from unisono.core.generation import Usage
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, SlotWait
from unisono.core.request_record import MAX_ENTRIES, RequestRecord, to_facts
from unisono.core.route_protocol import Attempt

REQUEST = RequestRecord(
    *("req_1", 1000.0, 2.0, "POST", "/v1/responses", 200, "", "team", "key", "name", "user", "asked"),
    notes=("seed",),
)
STARTED = GenerationStarted("req_1", "team", "key", "responses", "model", False, 1000.5)
FIRST = GenerationDone(
    STARTED,
    0.5,
    GenerationOutcome.FAILED,
    0.25,
    error="backend_unavailable",
    recoveries=("cut-header", "late-call"),
    repairs=(Repaired("unfinished-call", 3),),
    waits=(SlotWait(0.0, 0.125), SlotWait(0.25, 0.5)),
    tries=(Attempt("a", "backend_unavailable", "model-a"),),
    backend="a",
    usage_so_far=Usage(10, 2, 1, 4),
    cost=5,
)
SECOND = GenerationDone(
    replace(STARTED, at=1001.0),
    0.5,
    GenerationOutcome.COMPLETED,
    0.125,
    finish="stop",
    usage=Usage(20, 7, 3, 6),
    recoveries=("late-call",),
    tries=(Attempt("b", "", "model-b"),),
    backend="b",
    cost=7,
)


def test_a_request_without_generations_keeps_its_record() -> None:
    assert REQUEST.with_generations([]) is REQUEST


def test_generations_add_up_and_the_other_fields_stay() -> None:
    record = REQUEST.with_generations([FIRST, SECOND])
    added = {
        "error": "backend_unavailable",
        "served_model": "model-b",
        "deployment": "b",
        "attempts": (("a", "backend_unavailable"), ("b", "")),
        "input_tokens": 30,
        "cached_tokens": 10,
        "output_tokens": 9,
        "reasoning_tokens": 4,
        "first_token_s": 0.75,
        "waited_s": 0.375,
        "finish": "stop",
        "recoveries": ("cut-header", "late-call", "unfinished-call"),
        "cost": 12,
    }
    for name in RequestRecord._fields:
        assert getattr(record, name) == added.get(name, getattr(REQUEST, name)), name


def test_the_record_of_a_client_that_left_before_the_first_token() -> None:
    left = GenerationDone(STARTED, 0.5, GenerationOutcome.LEFT)
    record = REQUEST._replace(model="", error="own").with_generations([left])
    assert (record.model, record.error, record.finish) == ("model", "own", "left")
    assert (record.first_token_s, record.attempts, record.served_model) == (None, (), "")


def test_a_record_has_a_limited_number_of_attempts() -> None:
    done = replace(SECOND, tries=[Attempt(f"d{number}", "", f"m{number}") for number in range(2 * MAX_ENTRIES)])
    record = REQUEST.with_generations([done])
    assert len(record.attempts) == MAX_ENTRIES
    assert record.served_model == f"m{2 * MAX_ENTRIES - 1}"


def test_facts_have_the_fields_with_a_value_in_order_and_rounded_times() -> None:
    record = REQUEST._replace(at=1000.12345678, duration_s=0.0, status=0, waited_s=0.12345678, cost=1234567)
    record = record._replace(first_token_s=0.0, attempts=(("a", "backend_unavailable"), ("b", "")))
    assert list(to_facts(record).items()) == [
        ("id", "req_1"),
        ("at", 1000.123457),
        ("duration_s", 0.0),
        ("method", "POST"),
        ("route", "/v1/responses"),
        ("tenant", "team"),
        ("key", "key"),
        ("key_name", "name"),
        ("user", "user"),
        ("model", "asked"),
        ("attempts", [{"deployment": "a", "error": "backend_unavailable"}, {"deployment": "b"}]),
        ("waited_s", 0.123457),
        ("notes", ("seed",)),
        ("cost", 1.234567),
    ]
