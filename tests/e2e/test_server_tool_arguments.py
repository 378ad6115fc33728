"""Arguments of server tools that Python's own readers of JSON refuse: sent as the model wrote them, or told why not."""

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
every_surface = pytest.mark.parametrize("surface", [CHAT, RESPONSES, MESSAGES])
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

LEVELS = 3_000


def irregular(levels: int, inner: str = "1") -> str:
    """An object of so many levels, which a model that repeats itself would not write."""
    pick = random.Random(7)
    opened = ['{"a":', *(pick.choice(("[", "[ ", '{"a":', '{"b": ', '[1,"x",', "[[],")) for _ in range(levels - 1))]
    return "".join(opened) + inner + "".join("}" if each[0] == "{" else "]" for each in reversed(opened))


def brackets(levels: int) -> str:
    """About so many irregular levels that are not closed, in few tokens."""
    pick = random.Random(7)
    pieces = ("[[[[[[[[", "[[[[", "[[", "[ [")
    return '{"a":' + "".join(pick.choice(pieces) for _ in range(levels // 4))


SENT = {
    "an integer of 5,000 digits": '{"a":' + "123456789 ".strip() * 555 + "12345}",
    "a long integer beside a name": '{"b":"x","a":[-' + "7" * 5_000 + ",1.50]}",
    "3,000 levels of lists": '{"a":' + "[" * LEVELS + "]" * LEVELS + "}",
    "3,000 levels of both": irregular(LEVELS),
    "a number with more digits than Python keeps": '{"a":0.1000000000000000055511151231257827,"b":1e2}',
    "half of a pair in an escaped backslash": '{"a":"\\\\ud800"}',
    "a pair": '{"a":"\\ud83d\\ude00"}',
}
TOLD = {
    "a number out of range": ('{"a":1e400}', "1e400 is out of range"),
    "a deep number out of range": (irregular(LEVELS, "-1e400"), "-1e400 is out of range"),
    "half of a surrogate pair": ('{"a":"\\ud800"}', "half of a surrogate pair"),
    "the second half in a name": ('{"\\udc00":1}', "half of a surrogate pair"),
    "half of a deep pair": (irregular(LEVELS, '"\\ud800"'), "half of a surrogate pair"),
    "20,000 levels": (brackets(20_000), "10,000 levels"),
    "no number": ('{"a":NaN}', "NaN is not a JSON number"),
    "deep and not closed": (irregular(LEVELS)[:-1], "not a JSON object"),
}


def crossed(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Each case on each surface, streamed and whole; what is left out of the quick run is marked slow."""
    quick = {(case, (CHAT, RESPONSES, MESSAGES)[at % 3], bool(at % 2)) for at, case in enumerate(cases)}
    every = itertools.product(cases, (CHAT, RESPONSES, MESSAGES), (False, True))
    marked = [pytest.param(*each, marks=() if each in quick else pytest.mark.slow) for each in every]
    return pytest.mark.parametrize(("case", "surface", "stream"), marked)


@pytest.fixture
async def server() -> AsyncIterator[Hostile]:
    async with Hostile(acted) as found:
        yield found


@pytest.fixture
async def here(server: Hostile) -> AsyncIterator[Line]:
    servers = {"docs": {"url": server.server().url, "require_approval": "never", "timeout": 20}}
    async with line(WIRES["vllm"], mcp_servers=servers) as found:
        yield found


def acted(seen: Seen) -> Iterable[Step]:
    return [text(seen, "acted")]


def called(arguments: str) -> str:
    return f"{THOUGHT}<|channel|>commentary to=functions.docs__act <|constrain|>json<|message|>{arguments}<|call|>"


async def answered(here: Line, surface: str, *, stream: bool) -> str:
    """The final text of an answer over a surface."""
    if surface == RESPONSES:
        return text_of(await here.responds(stream=stream, tools=[DOCS]))
    if surface == MESSAGES:
        answer = await here.gateway.messages(stream=stream, max_tokens=120_000, **RUN)
        return text_in(message_in(answer)["content"])
    answer = await here.gateway.chat(stream=stream, **RUN)
    assert answer.status == 200, answer.raw
    return message_of(answer).content or ""


def clean(caplog: pytest.LogCaptureFixture) -> bool:
    return not [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR]


@pytest.mark.sampled(one_in=2)
@crossed(SENT)
async def test_arguments_reach_the_server_as_the_model_wrote_them(
    here: Line, server: Hostile, caplog: pytest.LogCaptureFixture, case: str, surface: str, stream: bool
) -> None:
    here.say(called(SENT[case]), ANSWER)
    assert await answered(here, surface, stream=stream) == "ok"
    [call] = server.calls
    assert f'"arguments":{SENT[case]}'.encode() in call.body
    assert "acted" in here.said
    assert clean(caplog)


@pytest.mark.sampled(one_in=2)
@crossed(TOLD)
async def test_arguments_that_cannot_be_sent_are_an_error_that_the_model_reads(
    here: Line, server: Hostile, caplog: pytest.LogCaptureFixture, case: str, surface: str, stream: bool
) -> None:
    await told(here, server, surface, *TOLD[case], stream=stream)
    assert clean(caplog)


@pytest.mark.slow
@both_forms
@every_surface
async def test_levels_without_end_are_an_error_that_the_model_reads(
    here: Line, server: Hostile, caplog: pytest.LogCaptureFixture, surface: str, stream: bool
) -> None:
    await told(here, server, surface, brackets(200_000), "10,000 levels", stream=stream)
    assert clean(caplog)


async def told(here: Line, server: Hostile, surface: str, arguments: str, words: str, *, stream: bool) -> None:
    """The model reads `words` in place of a result, and the answer goes on."""
    here.say(called(arguments), ANSWER)
    assert await answered(here, surface, stream=stream) == "ok"
    assert server.calls == []
    assert words in here.said.rpartition("<|call|>")[2]
