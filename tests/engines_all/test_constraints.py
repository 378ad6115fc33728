"""Constrained generation through the adapters of every engine that supports it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark

from tests.e2e.test_vllm_examples import SQL_GRAMMAR
from tests.engines.demo_prompts import ENCODING, greedy, prompt_for
from tests.engines_all.engines import Running
from tests.schemas.suite import closed
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    END,
    FIRST_SPECIAL,
    STOP_TOKENS,
    AnyJson,
    Constraint,
    FinishReason,
    Gbnf,
    JsonSchema,
    OneOf,
    Regex,
    Sampling,
)
from unisono.core.ports import Backend
from unisono.errors import ConstraintRefused
from unisono.schemas import violation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("engine", ["vllm", "llamacpp", "mlx"], indirect=True),
]

FINAL = prompt_for("What is the weather in Paris?") + ENCODING.encode_marked("<|channel|>final<|message|>")
SHORT = {"type": "string", "maxLength": 10}


async def generated_text(backend: Backend, constraint: Constraint, sampling: Sampling | None = None) -> str:
    """Return the generated text. Check that its only special token is the stop token at the end."""
    job = replace(greedy(FINAL, 300), constraint=constraint, sampling=sampling or Sampling(temperature=0))
    chunks = [chunk async for chunk in backend.complete(job)]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert chunks[-1].finish is FinishReason.STOP
    assert tokens[-1] in STOP_TOKENS
    assert all(token < FIRST_SPECIAL for token in tokens[:-1])
    return ENCODING.decode(tokens[:-1])


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed(city=SHORT, days={"type": "integer", "minimum": 1, "maximum": 9}),
    "nested": closed(a=closed(b=closed(c={"type": "boolean"}))),
    "enum and unicode": closed(città={"enum": ["日本", "🙂", 'a"b\\c\n']}),
    "anyOf": closed(item={"anyOf": [closed(kind={"const": "user"}, ok={"type": "boolean"}), {"type": "null"}]}),
    "references": {
        **closed(one={"$ref": "#/$defs/x"}, two={"$ref": "#/$defs/x"}),
        "$defs": {"x": closed(n={"enum": [1, 2]})},
    },
    "arrays": closed(xs={"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}),
    "pattern": closed(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_output_satisfies_the_schema(backend: Backend, schema: dict[str, Any]) -> None:
    assert violation(schema, await generated_text(backend, JsonSchema(schema))) is None


async def test_the_any_json_constraint_gives_an_object(backend: Backend) -> None:
    assert isinstance(json.loads(await generated_text(backend, AnyJson())), dict)


@pytest.mark.parametrize("text", ["get_weather", 'a.b-c\\d"(x)|[y]\n', "日本 é 🙂"], ids=ascii)
async def test_a_choice_of_texts_gives_one_of_them_exactly(backend: Backend, text: str) -> None:
    assert await generated_text(backend, OneOf((text,))) == text
    assert await generated_text(backend, OneOf((text, "other"))) in (text, "other")


EXPRESSIONS = (
    "Paris|London|",
    r"[a-z0-9.]{1,20}@\w{6,10}\.com\n",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8}){0,2}",
    r"[^\s\d]{3}",
    r"[\s\S]{4}",
    "日本🙂[é-ü]",
    r'"\\\[a\]\x41',
)


@pytest.mark.parametrize("pattern", EXPRESSIONS)
async def test_a_regular_expression_is_matched_as_a_whole(backend: Backend, pattern: str) -> None:
    assert re.fullmatch(pattern, await generated_text(backend, Regex(pattern)))


async def test_a_grammar_of_vllms_documentation_is_followed(backend: Backend) -> None:
    text = await generated_text(backend, Gbnf(SQL_GRAMMAR, gbnf_to_lark(SQL_GRAMMAR)))
    column, number = "col_[12] ", "[12] "
    assert re.fullmatch(f"SELECT {column} from table_[12]  where {column}= {number}", text)


async def test_a_constraint_excludes_a_marker_with_a_high_bias(backend: Backend) -> None:
    eager = Sampling(temperature=0, logit_bias={END: 100.0})
    assert violation(SCHEMAS["flat"], await generated_text(backend, JsonSchema(SCHEMAS["flat"]), eager)) is None


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/$defs/x"}], ids=["unknown type", "missing reference"]
)
async def test_an_invalid_schema_is_rejected_and_the_engine_continues(backend: Backend, schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintRefused):
        await generated_text(backend, JsonSchema(schema))
    assert await generated_text(backend, OneOf(("yes",))) == "yes"


async def test_the_probe_reports_every_kind_of_constraint(engine: Running, backend: Backend) -> None:
    assert (await backend.probe()).capabilities.constrain >= frozenset((*CONSTRAINT_KINDS, Regex.kind, Gbnf.kind))
