"""Requests of vLLM's documentation of structured outputs through a gateway, on every engine."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from jsonschema import Draft202012Validator

from tests.e2e.gateway import Gateway, message_of
from tests.e2e.test_vllm_examples import CAR_SCHEMA, EXAMPLES, PEOPLE_SCHEMA
from tests.engines_all.engines import Running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

TEXTS = {
    "choice": "positive|negative",
    "guided_choice": "positive|negative",
    # The stop string cuts off the line break.
    "regex": r"\w+@\w+\.com",
    "guided_regex with a stop string": r"\w+@\w+\.com",
    "guided_regex": r"[a-z0-9.]{1,20}@\w{6,10}\.com\n",
    "grammar": "SELECT col_[12]  from table_[12]  where col_[12] = [12] ",
    "guided_grammar": "SELECT col_[12]  from table_[12]  where col_[12] = [12] ",
}


def has_the_form(name: str, text: str) -> bool:
    if name in TEXTS:
        return re.fullmatch(TEXTS[name], text) is not None
    schema = PEOPLE_SCHEMA if name.startswith("reasoning") else CAR_SCHEMA
    return Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_gives_an_answer_of_its_form_or_a_declared_failure(
    engine: Running, site: Gateway, name: str, stream: bool
) -> None:
    question, fields, _, _ = EXAMPLES[name]
    messages = [{"role": "user", "content": question}]
    async with asyncio.timeout(120):
        # A small limit of tokens: an expression without a limit may never end.
        answer = await site.chat(stream=stream, messages=messages, max_tokens=150, temperature=0, **fields)
    assert answer.status == 200, answer.raw
    message = message_of(answer)
    is_declared = bool(message.note.get("unmet")) or message.finish_reason == "length"
    assert is_declared or has_the_form(name, message.content or "")
    # Grammars and choices of limited length are followed by every engine with constrained decoding.
    if engine.engine.kind != "mlx_server" and name in ("choice", "guided_choice", "grammar", "guided_grammar"):
        assert not is_declared, message
