"""Contract of every backend for constrained generations: constraint fields, or a refusal."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.kinds import HTTP_KINDS, JOB, KINDS, Kind, collect, collect_until_failure
from tests.fakes import Refusal, close_at, constraints, reset_at
from tests.fakes.constraints import Held
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    TEXT_KINDS,
    AnyJson,
    Constraint,
    FinishReason,
    Gbnf,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
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
    "json_schema with minProperties": JsonSchema({**SCHEMA, "minProperties": 1}),
    "json_object": AnyJson(),
    "choice": OneOf(TEXTS),
    "regex": Regex("[a-z]+"),
    "gbnf": Gbnf('root ::= "a" [b-c]+', 'start: "a" /[b-c]/+'),
    "lark": Lark('start: "a"+'),
}
EXPECTED: dict[str, Held] = {
    "json_schema": Held(SCHEMA),
    "json_schema with minProperties": Held({**SCHEMA, "minProperties": 1}),
    "json_object": Held({"type": "object"}),
    "choice": Held(texts=TEXTS),
    "regex": Held(regex="[a-z]+"),
    "gbnf": Held(gbnf='root ::= "a" [b-c]+'),
    "lark": Held(lark='start: "a"+'),
}
# llama.cpp has no regular expressions.
TRANSLATED = {("llamacpp", "regex"): Held(gbnf="root ::= [a-z]+")}

# Readers of the constraint in a request of each kind.
READERS: dict[str, Callable[[dict[str, Any]], Held | None]] = {
    "vllm": constraints.vllm,
    "sglang": constraints.sglang,
    "llamacpp": constraints.llamacpp,
    "mlx_server": lambda asked: None,
    "ollama raw": constraints.ollama,
    "ollama template": constraints.ollama,
}
# Constraint kinds that each backend kind claims; a missing kind claims none.
CLAIMED = {
    "vllm": frozenset((*CONSTRAINT_KINDS, *TEXT_KINDS)),
    "sglang": frozenset((*CONSTRAINT_KINDS, Regex.kind, Gbnf.kind)),
    "llamacpp": frozenset((*CONSTRAINT_KINDS, Regex.kind, Gbnf.kind)),
    "ollama raw": frozenset({"json_schema", "json_object"}),
}

COMBINATIONS = [(name, case) for name in KINDS for case in CONSTRAINTS]
SUPPORTED = [(name, case) for name, case in COMBINATIONS if CONSTRAINTS[case].kind in CLAIMED.get(name, ())]
UNSUPPORTED = [(name, case) for name, case in COMBINATIONS if (name, case) not in SUPPORTED]
MARKERS = {200003, 200005, 200006, 200007, 200008, 199999}


@pytest.mark.parametrize("name", KINDS)
async def test_probe_reports_the_supported_constraints(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, _):
        assert (await backend.probe()).capabilities.constrain == CLAIMED.get(name, frozenset())


@pytest.mark.parametrize(("name", "case"), SUPPORTED)
async def test_constraint_is_sent_in_the_fields_of_the_server(name: str, case: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    async with kind.serve(tmp_path) as (backend, fake):
        chunks = await collect(backend, replace(JOB, constraint=CONSTRAINTS[case]))
    assert kind.delivered(chunks) == kind.answer
    assert chunks[-1].finish is FinishReason.STOP
    assert READERS[name](fake.requests[0].json) == TRANSLATED.get((name, case), EXPECTED[case])


@pytest.mark.parametrize(("name", "case"), SUPPORTED)
async def test_constrained_request_bans_markers_if_logit_bias_is_supported(
    name: str, case: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    job = replace(JOB, constraint=CONSTRAINTS[case], sampling=Sampling(logit_bias={13225: 5.0}))
    async with kind.serve(tmp_path) as (backend, fake):
        await collect(backend, job)
    if kind.dialect.bias is None:
        return
    request_bias = kind.dialect.value(fake.requests[0].json, "logit_bias")
    biased = {
        int(token): amount
        for token, amount in (request_bias.items() if isinstance(request_bias, dict) else request_bias)
    }
    assert biased == {13225: 5.0, **dict.fromkeys(MARKERS, -100.0)}


@pytest.mark.parametrize(("name", "case"), UNSUPPORTED)
async def test_unsupported_constraint_is_refused_without_a_request(name: str, case: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, fake):
        with pytest.raises(ConstraintRefused, match=CONSTRAINTS[case].kind):
            await collect(backend, replace(JOB, constraint=CONSTRAINTS[case]))
        assert fake is None or fake.requests == []


@pytest.mark.parametrize("name", HTTP_KINDS)
async def test_unconstrained_request_has_no_constraint_fields(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, fake):
        await collect(backend)
    request = fake.requests[0].json
    assert READERS[name](request) is None
    assert (
        not {"structured_outputs", "json_schema", "grammar", "regex", "ebnf", "format", "logit_bias"} & request.keys()
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(.{1,30}){30}z$"},
        {"type": "object", "properties": {"a": {"items": {"anyOf": [{"pattern": "^(a|aa)+$"}]}}}},
    ],
    ids=["limited", "nested"],
)
async def test_llamacpp_is_not_sent_a_pattern_that_would_stop_it(schema: dict[str, Any], tmp_path: Path) -> None:
    async with KINDS["llamacpp"].serve(tmp_path) as (backend, fake):
        with pytest.raises(ConstraintRefused, match="pattern"):
            await collect(backend, replace(JOB, constraint=JsonSchema(schema)))
        assert fake.requests == []
        simple = JsonSchema({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"})
        await collect(backend, replace(JOB, constraint=simple))
        assert constraints.llamacpp(fake.requests[0].json) == Held(simple.schema)


@pytest.mark.parametrize("name", CLAIMED)
async def test_uncompilable_schema_raises_constraint_refused(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path) as (backend, _):
        job = replace(JOB, constraint=JsonSchema({"type": "nonsense"}))
        chunks, error = await collect_until_failure(backend, job)
        assert (chunks, type(error)) == ([], ConstraintRefused)
        assert KINDS[name].delivered(await collect(backend)) == KINDS[name].answer


FAILURES: dict[str, tuple[Refusal, type[Exception], Symptom | None]] = {
    "busy": (Refusal(503, b'{"error": "grammar queue full"}'), BackendOverloaded, Symptom.SERVER_ERROR),
    "upstream timeout": (Refusal(504, b'{"error": "upstream timed out"}'), BackendTimeout, Symptom.SERVER_ERROR),
    "prompt too long": (
        Refusal(400, b'{"error": {"message": "maximum context length is 4096"}}'),
        ContextTooLong,
        None,
    ),
    "wrong key": (Refusal(401, b'{"error": "no"}'), BackendUnavailable, None),
    "unknown model": (Refusal(404, b'{"error": "no such model"}'), BackendError, None),
    "internal error": (Refusal(500, b'{"error": "CUDA error"}'), ConstraintRefused, Symptom.SERVER_ERROR),
    "internal grammar error": (Refusal(500, b'{"error": "xgrammar: failed"}'), ConstraintRefused, Symptom.SERVER_ERROR),
    "internal error in a 200": (Refusal(200, b'{"error": {"message": "x"}}'), ConstraintRefused, Symptom.SERVER_ERROR),
    "bad request": (Refusal(400, b'{"error": "no"}'), ConstraintRefused, None),
}


@pytest.mark.parametrize(("refusal", "raised", "symptom"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("name", CLAIMED)
async def test_failure_before_the_first_token_is_attributed_to_the_constraint(
    name: str, refusal: Refusal, raised: type[Exception], symptom: Symptom | None, tmp_path: Path
) -> None:
    async with KINDS[name].serve(tmp_path, script=lambda request: refusal) as (backend, _):
        _, constrained_error = await collect_until_failure(backend, replace(JOB, constraint=AnyJson()))
        _, unconstrained_error = await collect_until_failure(backend)
    assert type(constrained_error) is raised
    assert getattr(constrained_error, "symptom", None) is symptom
    assert not isinstance(unconstrained_error, ConstraintRefused)


@pytest.mark.parametrize("fault", [reset_at(0), close_at(0)], ids=["RST", "FIN"])
@pytest.mark.parametrize("name", CLAIMED)
async def test_disconnect_before_the_first_token_raises_constraint_refused(
    name: str, fault: Any, tmp_path: Path
) -> None:
    async with KINDS[name].serve(tmp_path, faults=(fault,)) as (backend, fake):
        _, constrained_error = await collect_until_failure(backend, replace(JOB, constraint=JsonSchema(SCHEMA)))
        # A request that may have crashed the server is not repeated.
        assert len(fake.requests) == 1
        _, unconstrained_error = await collect_until_failure(backend)
    assert type(constrained_error) is ConstraintRefused
    assert constrained_error.symptom is Symptom.DISCONNECTED
    assert not isinstance(unconstrained_error, ConstraintRefused)


@pytest.mark.parametrize("name", CLAIMED)
async def test_disconnect_after_the_first_token_is_a_protocol_error(name: str, tmp_path: Path) -> None:
    async with KINDS[name].serve(tmp_path, per_chunk=1, delay_s=0.005, faults=(reset_at(3),)) as (backend, _):
        chunks, error = await collect_until_failure(backend, replace(JOB, constraint=AnyJson()))
    assert chunks
    assert type(error) is BackendProtocolError
    assert error.symptom is Symptom.DISCONNECTED


@pytest.mark.parametrize("name", CLAIMED)
async def test_failed_connection_of_a_constrained_request_is_unavailable(name: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        backend = KINDS[name].at(f"http://127.0.0.1:{reserved.getsockname()[1]}")
        _, error = await collect_until_failure(backend, replace(JOB, constraint=AnyJson()))
        await backend.aclose()
    assert type(error) is BackendUnavailable
    assert error.symptom is Symptom.NO_CONNECTION


async def test_llamacpp_refuses_an_expression_without_a_translation_and_sends_nothing(tmp_path: Path) -> None:
    async with KINDS["llamacpp"].serve(tmp_path) as (backend, fake):
        with pytest.raises(ConstraintRefused, match="regular expression"):
            await collect(backend, replace(JOB, constraint=Regex(r"(\w+\s?)*")))
        assert fake.requests == []


async def test_vllm_without_structural_tags_gets_a_plain_schema(tmp_path: Path) -> None:
    kind: Kind = KINDS["vllm"]
    async with kind.serve(tmp_path) as (backend, fake):
        fake.knows_tags = False
        chunks = await collect(backend, replace(JOB, constraint=JsonSchema(SCHEMA)))
    assert kind.delivered(chunks) == kind.answer
    assert [list(seen.json["structured_outputs"]) for seen in fake.requests] == [["structural_tag"], ["json"]]


async def test_vllm_constraint_limits_whitespace(tmp_path: Path) -> None:
    async with KINDS["vllm"].serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, constraint=AnyJson()))
    assert '"max_whitespace_cnt":20' in fake.requests[0].json["structured_outputs"]["structural_tag"]
