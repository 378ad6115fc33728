"""Validation of requests with regular expressions or grammars, which runs in a thread for any size."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.api.messages.mounted import request
from tests.api.scripted import ScriptedTurns, final, finished
from tests.threads import Threads
from unisono.api.body import OFF_LOOP_BYTES, work_size

TOOL: dict[str, Any] = {"type": "custom", "name": "t"}
BODIES: dict[str, tuple[bytes, bool]] = {
    "text": (b'{"input": "Hi"}', False),
    "a large body": (b" " * (OFF_LOOP_BYTES + 1), True),
    "a custom tool without a grammar": (orjson.dumps({"tools": [TOOL]}), False),
    "a custom tool with a grammar": (
        orjson.dumps(
            {"tools": [{**TOOL, "format": {"type": "grammar", "syntax": "regex", "definition": "a"}}]},
        ),
        True,
    ),
    "an escaped name": (rb'{"guided_\u0067rammar": "start: \"a\""}', True),
    "a schema": (orjson.dumps({"properties": {"a": {"pattern": "a"}}}), True),
}


@pytest.mark.parametrize(("body", "is_large"), BODIES.values(), ids=BODIES)
def test_a_body_with_expressions_counts_as_large(body: bytes, is_large: bool) -> None:
    assert (work_size(body) > OFF_LOOP_BYTES) is is_large


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}, "additionalProperties": False}
STRICT = {"name": "f", "input_schema": SCHEMA, "strict": True}
PLAIN = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}


@pytest.mark.parametrize(("tool", "in_thread"), [(STRICT, True), (PLAIN, False)], ids=["a pattern", "no pattern"])
async def test_a_request_with_expressions_is_validated_in_a_thread(tool: dict[str, Any], in_thread: bool) -> None:
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    response = await request(ScriptedTurns([[*final(0, "So."), finished()]]), tools=[tool]).run()
    assert response.status == 200
    assert any("turned" in name for name in threads.begun) is in_thread
