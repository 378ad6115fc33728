"""What every Backend promises of a generation under a constraint: a server is asked in its own words, or not at all."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.kinds import JOB, KINDS, ON_A_WIRE, Kind, collect, collect_until_failure
from tests.fakes import Refusal, close_at, constraints, reset_at
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
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
    ConstraintRefused,
    ContextTooLong,
    Symptom,
)

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


FAILURES: dict[str, tuple[Refusal, type[Exception], Symptom | None]] = {
    "busy": (Refusal(503, b'{"error": "grammar queue full"}'), BackendOverloaded, Symptom.SERVER_ERROR),
    "too slow": (Refusal(504, b'{"error": "upstream timed out"}'), BackendTimeout, Symptom.SERVER_ERROR),
    "too long": (Refusal(400, b'{"error": {"message": "maximum context length is 4096"}}'), ContextTooLong, None),
    "a wrong key": (Refusal(401, b'{"error": "no"}'), BackendUnavailable, None),
    "a wrong model": (Refusal(404, b'{"error": "no such model"}'), BackendError, None),
    "something inside": (Refusal(500, b'{"error": "CUDA error"}'), ConstraintRefused, Symptom.SERVER_ERROR),
    "the grammar, inside": (Refusal(500, b'{"error": "xgrammar: failed"}'), ConstraintRefused, Symptom.SERVER_ERROR),
    "inside, in 200": (Refusal(200, b'{"error": {"message": "x"}}'), ConstraintRefused, Symptom.SERVER_ERROR),
    "the request": (Refusal(400, b'{"error": "no"}'), ConstraintRefused, None),
}


@pytest.mark.parametrize(("refusal", "raised", "symptom"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("name", KEEPS)
async def test_a_failure_before_the_first_token_is_blamed_on_the_constraint_unless_it_cannot_be(
    name: str, refusal: Refusal, raised: type[Exception], symptom: Symptom | None, tmp_path: Path
) -> None:
    async with KINDS[name].serve(tmp_path, script=lambda asked: refusal) as (backend, _):
        _, constrained = await collect_until_failure(backend, replace(JOB, constraint=AnyJson()))
        _, free = await collect_until_failure(backend)
    assert type(constrained) is raised
    assert getattr(constrained, "symptom", None) is symptom
    assert not isinstance(free, ConstraintRefused)


@pytest.mark.parametrize("fault", [reset_at(0), close_at(0)], ids=["RST", "FIN"])
@pytest.mark.parametrize("name", KEEPS)
async def test_a_connection_that_breaks_before_the_first_token_is_blamed_on_the_constraint(
    name: str, fault: Any, tmp_path: Path
) -> None:
    async with KINDS[name].serve(tmp_path, faults=(fault,)) as (backend, fake):
        _, constrained = await collect_until_failure(backend, replace(JOB, constraint=JsonSchema(SCHEMA)))
        # What may have killed a server is not sent to it again.
        assert len(fake.requests) == 1
        _, free = await collect_until_failure(backend)
    assert type(constrained) is ConstraintRefused
    assert constrained.symptom is Symptom.DISCONNECTED
    assert not isinstance(free, ConstraintRefused)


@pytest.mark.parametrize("name", KEEPS)
async def test_a_connection_that_breaks_later_is_not_blamed_on_the_constraint(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path, per_chunk=1, delay_s=0.005, faults=(reset_at(3),)) as (backend, _):
        chunks, error = await collect_until_failure(backend, replace(JOB, constraint=AnyJson()))
    assert chunks
    assert type(error) is BackendProtocolError
    assert error.symptom is Symptom.DISCONNECTED


@pytest.mark.parametrize("name", KEEPS)
async def test_a_connection_that_is_not_made_is_not_blamed_on_the_constraint(name: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        backend = KINDS[name].at(f"http://127.0.0.1:{free.getsockname()[1]}")
        _, error = await collect_until_failure(backend, replace(JOB, constraint=AnyJson()))
        await backend.aclose()
    assert type(error) is BackendUnavailable
    assert error.symptom is Symptom.NO_CONNECTION


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
