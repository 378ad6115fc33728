"""Arguments of server tools that Python's JSON parsers reject: sent unchanged, or an error.

The model reads the error instead of a result.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import AsyncIterator, Iterable

import pytest

from tests.e2e.gateway import message_of
from tests.e2e.hosting import DOCS
from tests.e2e.messages import message_in, text_in
from tests.e2e.responses import ANSWER, THOUGHT, Line, line, text_of
from tests.e2e.wires import WIRES
from tests.fakes.wire import Seen, Step
from tests.mcp.hostile import Hostile, text

RUN = {"unisono": {"run_tools": True}}
CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
every_api = pytest.mark.parametrize("surface", [CHAT, RESPONSES, MESSAGES])
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

LEVELS = 3_000


def irregular_object(levels: int, inner: str = "1") -> str:
    """Build an object with this many levels and without repetition, which would be stopped."""
    pick = random.Random(7)
    prefixes = ['{"a":', *(pick.choice(("[", "[ ", '{"a":', '{"b": ', '[1,"x",', "[[],")) for _ in range(levels - 1))]
    return "".join(prefixes) + inner + "".join("}" if prefix[0] == "{" else "]" for prefix in reversed(prefixes))


def brackets(levels: int) -> str:
    """Return about this many unclosed irregular levels in few tokens."""
    pick = random.Random(7)
    pieces = ("[[[[[[[[", "[[[[", "[[", "[ [")
    return '{"a":' + "".join(pick.choice(pieces) for _ in range(levels // 4))


SENT_UNCHANGED = {
    "an integer of 5,000 digits": '{"a":' + "123456789 ".strip() * 555 + "12345}",
    "a long integer next to a string": '{"b":"x","a":[-' + "7" * 5_000 + ",1.50]}",
    "3,000 levels of lists": '{"a":' + "[" * LEVELS + "]" * LEVELS + "}",
    "3,000 levels of lists and objects": irregular_object(LEVELS),
    "a number with more digits than a float": '{"a":0.1000000000000000055511151231257827,"b":1e2}',
    "half a surrogate pair after an escaped backslash": '{"a":"\\\\ud800"}',
    "a surrogate pair": '{"a":"\\ud83d\\ude00"}',
}
REJECTED = {
    "a number out of range": ('{"a":1e400}', "1e400 is out of range"),
    "a deep number out of range": (irregular_object(LEVELS, "-1e400"), "-1e400 is out of range"),
    "half a surrogate pair": ('{"a":"\\ud800"}', "half of a surrogate pair"),
    "the second half in a key": ('{"\\udc00":1}', "half of a surrogate pair"),
    "deeply nested half of a surrogate pair": (irregular_object(LEVELS, '"\\ud800"'), "half of a surrogate pair"),
    "20,000 levels": (brackets(20_000), "10,000 levels"),
    "NaN": ('{"a":NaN}', "NaN is not a JSON number"),
    "deeply nested and unclosed": (irregular_object(LEVELS)[:-1], "not a JSON object"),
}


def on_every_api(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Run each case on each API, streamed and whole; most of them are marked slow."""
    quick = {(case, (CHAT, RESPONSES, MESSAGES)[index % 3], bool(index % 2)) for index, case in enumerate(cases)}
    combinations = itertools.product(cases, (CHAT, RESPONSES, MESSAGES), (False, True))
    marked = [
        pytest.param(*combination, marks=() if combination in quick else pytest.mark.slow)
        for combination in combinations
    ]
    return pytest.mark.parametrize(("case", "surface", "stream"), marked)


@pytest.fixture
async def server() -> AsyncIterator[Hostile]:
    async with Hostile(act) as running:
        yield running


@pytest.fixture
async def harness(server: Hostile) -> AsyncIterator[Line]:
    servers = {"docs": {"url": server.server().url, "require_approval": "never", "timeout": 20}}
    async with line(WIRES["vllm"], mcp_servers=servers) as running:
        yield running


def act(seen: Seen) -> Iterable[Step]:
    return [text(seen, "acted")]


def call_with(arguments: str) -> str:
    return f"{THOUGHT}<|channel|>commentary to=functions.docs__act <|constrain|>json<|message|>{arguments}<|call|>"


async def final_text(harness: Line, surface: str, *, stream: bool) -> str:
    """Return the final text of an answer on an API."""
    if surface == RESPONSES:
        return text_of(await harness.responds(stream=stream, tools=[DOCS]))
    if surface == MESSAGES:
        response = await harness.gateway.messages(stream=stream, max_tokens=120_000, **RUN)
        return text_in(message_in(response)["content"])
    response = await harness.gateway.chat(stream=stream, **RUN)
    assert response.status == 200, response.raw
    return message_of(response).content or ""


def no_errors_logged(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.sampled(one_in=2)
@on_every_api(SENT_UNCHANGED)
async def test_arguments_reach_the_server_unchanged(
    harness: Line, server: Hostile, caplog: pytest.LogCaptureFixture, case: str, surface: str, stream: bool
) -> None:
    harness.say(call_with(SENT_UNCHANGED[case]), ANSWER)
    assert await final_text(harness, surface, stream=stream) == "ok"
    [call] = server.calls
    assert f'"arguments":{SENT_UNCHANGED[case]}'.encode() in call.body
    assert "acted" in harness.said
    assert no_errors_logged(caplog)


@pytest.mark.sampled(one_in=2)
@on_every_api(REJECTED)
async def test_invalid_arguments_return_an_error_to_the_model(
    harness: Line, server: Hostile, caplog: pytest.LogCaptureFixture, case: str, surface: str, stream: bool
) -> None:
    await assert_error_for_model(harness, server, surface, *REJECTED[case], stream=stream)
    assert no_errors_logged(caplog)


@pytest.mark.slow
@both_forms
@every_api
async def test_excessive_nesting_returns_an_error_to_the_model(
    harness: Line, server: Hostile, caplog: pytest.LogCaptureFixture, surface: str, stream: bool
) -> None:
    await assert_error_for_model(harness, server, surface, brackets(200_000), "10,000 levels", stream=stream)
    assert no_errors_logged(caplog)


async def assert_error_for_model(
    harness: Line, server: Hostile, surface: str, arguments: str, words: str, *, stream: bool
) -> None:
    """Check that the model reads `words` instead of a result and the answer continues."""
    harness.say(call_with(arguments), ANSWER)
    assert await final_text(harness, surface, stream=stream) == "ok"
    assert server.calls == []
    assert words in harness.said.rpartition("<|call|>")[2]
