"""What every Backend promises of a generation under a constraint: a server is asked in its own words, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.kinds import JOB, KINDS, ON_A_WIRE, Kind, collect, collect_until_failure
from tests.fakes import Refusal, constraints
from tests.fakes.constraints import Held
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    AnyJson,
    Constraint,
    FinishReason,
    JsonSchema,
    OneOf,
    Sampling,
)
from unisono.errors import BackendError, BackendOverloaded, ConstraintRefused, ContextTooLong

SCHEMA = {
    "type": "object",
    "properties": {"città": {"enum": ["日本", 'a"b\\c\n']}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["città"],
    "additionalProperties": False,
}
TEXTS = ("get_weather", 'a.b-c\\d"(x)|[y]\n', "日本 é", "a+b*{2}?^$/")
CONSTRAINTS: dict[str, Constraint] = {
    "json_schema": JsonSchema(SCHEMA),
    "a schema whose keywords need another way": JsonSchema({**SCHEMA, "minProperties": 1}),
    "json_object": AnyJson(),
    "choice": OneOf(TEXTS),
}
MEANT: dict[str, Held] = {
    "json_schema": Held(SCHEMA),
    "a schema whose keywords need another way": Held({**SCHEMA, "minProperties": 1}),
    "json_object": Held({"type": "object"}),
    "choice": Held(texts=TEXTS),
}

READERS: dict[str, Callable[[dict[str, Any]], Held | None]] = {
    "vllm": constraints.vllm,
    "sglang": constraints.sglang,
    "llamacpp": constraints.llamacpp,
    "mlx_server": lambda asked: None,
    "ollama raw": constraints.ollama,
    "ollama template": constraints.ollama,
}
"""How each server reads what it is asked."""
KEEPS = {
    "vllm": frozenset(CONSTRAINT_KINDS),
    "sglang": frozenset(CONSTRAINT_KINDS),
    "llamacpp": frozenset(CONSTRAINT_KINDS),
    "ollama raw": frozenset({"json_schema", "json_object"}),
}
"""What each kind claims; one that is not here, nothing."""

ASKED = [(name, case) for name in KINDS for case in CONSTRAINTS]
DONE = [(name, case) for name, case in ASKED if CONSTRAINTS[case].kind in KEEPS.get(name, ())]
NOT_DONE = [(name, case) for name, case in ASKED if (name, case) not in DONE]
MARKERS = {200003, 200005, 200006, 200007, 200008, 199999}


@pytest.mark.parametrize("name", KINDS)
async def test_a_kind_claims_what_its_examination_has_shown(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, _):
        assert (await backend.probe()).capabilities.constrain == KEEPS.get(name, frozenset())


@pytest.mark.parametrize(("name", "case"), DONE)
async def test_a_constraint_reaches_the_server_in_its_own_words(name: str, case: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    async with kind.serve(tmp_path) as (backend, fake):
        chunks = await collect(backend, replace(JOB, constraint=CONSTRAINTS[case]))
    assert kind.delivered(chunks) == kind.answer
    assert chunks[-1].finish is FinishReason.STOP
    assert READERS[name](fake.requests[0].json) == MEANT[case]


@pytest.mark.parametrize(("name", "case"), DONE)
async def test_markers_are_ruled_out_wherever_a_bias_is_taken(name: str, case: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    job = replace(JOB, constraint=CONSTRAINTS[case], sampling=Sampling(logit_bias={13225: 5.0}))
    async with kind.serve(tmp_path) as (backend, fake):
        await collect(backend, job)
    if kind.speaks.bias is None:
        return
    asked = kind.speaks.asked(fake.requests[0].json, "logit_bias")
    biased = {int(token): amount for token, amount in (asked.items() if isinstance(asked, dict) else asked)}
    assert biased == {13225: 5.0, **dict.fromkeys(MARKERS, -100.0)}


@pytest.mark.parametrize(("name", "case"), NOT_DONE)
async def test_who_cannot_constrain_refuses_and_asks_for_nothing(name: str, case: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, fake):
        with pytest.raises(ConstraintRefused, match=CONSTRAINTS[case].kind):
            await collect(backend, replace(JOB, constraint=CONSTRAINTS[case]))
        assert fake is None or fake.requests == []


@pytest.mark.parametrize("name", ON_A_WIRE)
async def test_without_a_constraint_nothing_is_sent_about_one(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, fake):
        await collect(backend)
    asked = fake.requests[0].json
    assert READERS[name](asked) is None
    assert not {"structured_outputs", "json_schema", "grammar", "regex", "ebnf", "format", "logit_bias"} & asked.keys()


@pytest.mark.parametrize("name", KEEPS)
async def test_a_schema_the_server_cannot_compile_is_a_refusal_of_the_constraint(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, _):
        job = replace(JOB, constraint=JsonSchema({"type": "nonsense"}))
        chunks, error = await collect_until_failure(backend, job)
        assert (chunks, type(error)) == ([], ConstraintRefused)
        assert KINDS[name].delivered(await collect(backend)) == KINDS[name].answer


FAILURES: dict[str, tuple[Refusal, type[Exception]]] = {
    "busy": (Refusal(503, b'{"error": "grammar queue full"}'), BackendOverloaded),
    "too long": (Refusal(400, b'{"error": {"message": "maximum context length is 4096"}}'), ContextTooLong),
    "something inside": (Refusal(500, b'{"error": "CUDA error"}'), BackendError),
    "the grammar, inside": (Refusal(500, b'{"error": "xgrammar: assertion failed"}'), ConstraintRefused),
    "the request": (Refusal(400, b'{"error": "no"}'), ConstraintRefused),
}


@pytest.mark.parametrize(("refusal", "raised"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("name", KEEPS)
async def test_only_what_may_be_about_the_constraint_is_blamed_on_it(
    name: str, refusal: Refusal, raised: type[Exception], tmp_path: Path
) -> None:
    async with KINDS[name].serve(tmp_path, script=lambda asked: refusal) as (backend, _):
        _, constrained = await collect_until_failure(backend, replace(JOB, constraint=AnyJson()))
        _, free = await collect_until_failure(backend)
    assert type(constrained) is raised
    assert not isinstance(free, ConstraintRefused)


async def test_a_vllm_whose_grammars_know_no_tags_is_asked_in_the_plain_way(tmp_path: Path) -> None:
    kind: Kind = KINDS["vllm"]
    async with kind.serve(tmp_path) as (backend, fake):
        fake.knows_tags = False
        chunks = await collect(backend, replace(JOB, constraint=JsonSchema(SCHEMA)))
    assert kind.delivered(chunks) == kind.answer
    assert [list(seen.json["structured_outputs"]) for seen in fake.requests] == [["structural_tag"], ["json"]]


async def test_white_space_has_a_bound_on_vllm(tmp_path: Path) -> None:
    async with KINDS["vllm"].serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, constraint=AnyJson()))
    assert '"max_whitespace_cnt":20' in fake.requests[0].json["structured_outputs"]["structural_tag"]
