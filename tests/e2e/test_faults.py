"""Backend faults: another backend answers, or the client gets exactly one clear error."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, Gateway, config_of, gateway, message_of
from tests.e2e.playing import Play
from tests.e2e.wires import WIRES, Fake, Script, Wire, asked, deployment
from tests.fakes import (
    FakeVllm,
    Refusal,
    close_at,
    done_twice,
    half_event_at,
    in_one_write,
    inject_at,
    line_ends,
    recut,
    reset_at,
    stall_at,
    vllm_context_error,
    without_done,
)
from unisono.core.error_texts import ANTHROPIC_PROMPT_TOO_LONG, OPENAI_PROMPT_TOO_LONG, MatchedText

ANSWER = (
    "<|channel|>analysis<|message|>Easy, I know.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Four, of course. Grüße!<|return|>"
)
EXPECTED = ("Easy, I know.", "Four, of course. Grüße!")
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"the sky above"}<|call|>'
SHORT_PATIENCE_S = 0.3
# An error without a timeout comes at once. The limit is for a busy machine.
IMMEDIATE_S = 2.0


@dataclass
class Site:
    """Gateways with several groups.

    `two` is served alternately by `bad` and `good`, and so is `stays`, without failover in an answer that the client
    has seen. The hurried groups are the same with little patience for `bad`. `one` is served only by `bad`, in a
    separate gateway without retries. `good` continues any part of `play`.
    """

    wire: Wire
    bad: Fake
    good: Fake
    play: Play
    gateway: Gateway
    unretrying: Gateway

    def behave(self, behaviour: Behaviour) -> None:
        script = behaviour(self.wire)
        self.bad.script = lambda _: script  # type: ignore[assignment]
        self.bad.requests.clear()
        self.good.requests.clear()

    async def ask(self, group: str, *, stream: bool, **fields: Any) -> Answer:
        target = self.unretrying if group.endswith("one") else self.gateway
        return await target.chat(model=f"gpt-oss-{group}", stream=stream, **fields)


Behaviour = Callable[[Wire], Script | Refusal]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    wire: Wire = request.param
    async with wire.fake() as bad, wire.fake() as good:
        play = Play(ANSWER)
        play.serve(wire.name, good)
        stays = {"unisono": {"failover": False}}
        alone = [
            deployment("gpt-oss-one", wire, bad),
            deployment("gpt-oss-hurried-one", wire, bad, patience_s=SHORT_PATIENCE_S),
            deployment("gpt-oss-short-one", wire, bad, timeout=0.5),
        ]
        entries = [
            deployment("gpt-oss-two", wire, bad),
            deployment("gpt-oss-two", wire, good),
            deployment("gpt-oss-hurried-two", wire, bad, patience_s=SHORT_PATIENCE_S),
            deployment("gpt-oss-hurried-two", wire, good),
            {**deployment("gpt-oss-stays", wire, bad), **stays},
            {**deployment("gpt-oss-stays", wire, good), **stays},
        ]
        tolerant = {"allowed_fails": 1_000_000, "cooldown_time": 0, "routing_strategy": "simple-shuffle"}
        unretrying = {"model_list": alone, "router_settings": tolerant | {"num_retries": 0}}
        async with (
            gateway({"model_list": entries, "router_settings": tolerant}) as running,
            gateway(unretrying) as also_running,
        ):
            bad.script = good.script
            for group in ("gpt-oss-two", "gpt-oss-hurried-two", "gpt-oss-stays"):
                await all_take_turns(running, bad, good, model=group)
            yield Site(wire, bad, good, play, running, also_running)


async def all_take_turns(running: Gateway, *fakes: Fake, model: str = "gpt-oss") -> None:
    """Wait until every fake was probed and has served a request."""
    for fake in fakes:
        fake.requests.clear()
    async with asyncio.timeout(60):
        while not all(asked(fake) for fake in fakes):
            await running.chat(model=model)
    for fake in fakes:
        fake.requests.clear()


pytestmark = pytest.mark.asyncio(loop_scope="module")
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def refuses(status: int, body: bytes = b'{"error": {"message": "boom"}}', **fields: Any) -> Behaviour:
    return lambda wire: Refusal(status, body, **fields)


def breaks(*faults: Any, text: str = ANSWER, **fields: Any) -> Behaviour:
    return lambda wire: wire.script(text, faults=faults, **fields)


def event(**fields: Any) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": [87], "finish_reason": None, **fields}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


HTML = b"<html><body>502 Bad Gateway</body></html>"
LATER = {"Retry-After": "7"}

# Faults before any output: behaviour, and status and code without another backend.
EARLY: dict[str, tuple[Behaviour, int, str]] = {
    "500": (refuses(500), 502, "backend_error"),
    "502 from a proxy": (refuses(502, HTML, content_type="text/html"), 502, "backend_error"),
    "429": (refuses(429, headers=LATER), 503, "backend_overloaded"),
    "503": (refuses(503, headers=LATER), 503, "backend_overloaded"),
    "401": (refuses(401), 503, "backend_unavailable"),
    "404": (refuses(404), 502, "backend_error"),
    "redirect": (refuses(307, headers={"Location": "http://127.0.0.1:9/"}), 502, "backend_protocol_error"),
    "HTML with status 200": (refuses(200, HTML, content_type="text/html"), 502, "backend_protocol_error"),
    "HTML as events": (refuses(200, HTML, content_type="text/event-stream"), 502, "backend_protocol_error"),
    "error body with status 200": (refuses(200), 502, "backend_protocol_error"),
    "error body with status 200 and a code": (
        refuses(200, b'{"error": {"message": "boom", "code": 503}}'),
        503,
        "backend_overloaded",
    ),
    "empty body with status 200": (refuses(200, b"", content_type="text/event-stream"), 502, "backend_protocol_error"),
    "garbage": (breaks(inject_at(0, b"data: {garbage\n\n")), 502, "backend_protocol_error"),
    "invalid UTF-8": (breaks(inject_at(0, b"data: \xff\xfe\xfd\n\n")), 502, "backend_protocol_error"),
    "error event": (breaks(inject_at(0, b'data: {"error": "out of memory"}\n\n')), 502, "backend_protocol_error"),
    "RST": (breaks(reset_at(0)), 502, "backend_protocol_error"),
    "FIN": (breaks(close_at(0)), 502, "backend_protocol_error"),
    "FIN within an event": (breaks(half_event_at(0)), 502, "backend_protocol_error"),
    "RST within a Harmony header": (breaks(reset_at(2)), 502, "backend_protocol_error"),
    "[DONE] without a finish reason": (breaks(inject_at(0, b"data: [DONE]\n\n")), 502, "backend_protocol_error"),
    "aborted": (breaks(inject_at(0, event(finish_reason="abort"))), 503, "backend_unavailable"),
    "negative token id": (breaks(inject_at(0, event(token_ids=[-1], text=3))), 502, "backend_protocol_error"),
    "token id as a string": (breaks(inject_at(0, event(token_ids=["x"], text=None))), 502, "backend_protocol_error"),
}


@pytest.mark.sampled(one_in=12)
@both_ways
@pytest.mark.parametrize("case", EARLY)
async def test_fault_of_the_only_backend_is_an_http_error(site: Site, case: str, stream: bool) -> None:
    behaviour, status, code = EARLY[case]
    site.behave(behaviour)
    began = asyncio.get_running_loop().time()
    answer = await site.ask("one", stream=stream)
    assert asyncio.get_running_loop().time() - began < IMMEDIATE_S
    check_error(answer, status, code)
    if "Retry-After" in str(behaviour(site.wire)):
        assert answer.headers["retry-after"] == "7"
    assert len(asked(site.bad)) == 1


@pytest.mark.sampled(one_in=4)
@both_ways
@pytest.mark.parametrize("case", EARLY)
async def test_second_backend_answers_after_a_fault(site: Site, case: str, stream: bool) -> None:
    site.behave(EARLY[case][0])
    answers = [await site.ask("two", stream=stream) for _ in range(2)]
    for answer in answers:
        check_answer(site, answer, stream=stream)
    # They alternate, so exactly one of the two requests began on the broken one.
    assert sorted(message_of(answer).note["failovers"] for answer in answers) == [0, 1]
    assert {answer.headers["x-unisono-backend"] for answer in answers} == {f"{site.wire.name}-2"}
    assert len(asked(site.bad)) == 1
    # A kind that drops a leading space needs a separate request for the next token.
    assert len(asked(site.good)) in ((2,) if site.wire.name == "vllm" else (2, 3))


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@both_ways
async def test_interrupted_tool_call_continues_on_the_second_backend(site: Site, stream: bool) -> None:
    site.behave(breaks(reset_at(9), text=CALL))
    check_error(await site.ask("one", stream=stream, tools=[LOOK]), 502, "backend_protocol_error")
    site.behave(breaks(reset_at(9), text=CALL))
    site.play.script = CALL
    try:
        answers = [message_of(await site.ask("two", stream=stream, tools=[LOOK])) for _ in range(2)]
    finally:
        site.play.script = ANSWER
    assert [answer.calls for answer in answers] == [[("look", '{"at":"the sky above"}')]] * 2
    assert sorted(answer.note["failovers"] for answer in answers) == [0, 1]
    assert (len(asked(site.bad)), len(asked(site.good))) == (1, 2)


SILENT: dict[str, Behaviour] = {
    "no headers": lambda wire: wire.silent(),
    "no token": breaks(stall_at(0)),
    "only comments": breaks(*(inject_at(0, b": hi\n\n") for _ in range(3)), stall_at(0)),
    "unfinished Harmony header": breaks(stall_at(2)),
}


@pytest.mark.sampled(one_in=4)
@both_ways
@pytest.mark.parametrize("behaviour", SILENT.values(), ids=SILENT)
async def test_silent_backend_fails_over_or_is_a_timeout(site: Site, behaviour: Behaviour, stream: bool) -> None:
    site.behave(behaviour)
    only_answer, *answers = await asyncio.gather(
        site.ask("hurried-one", stream=stream), *(site.ask("hurried-two", stream=stream) for _ in range(2))
    )
    check_error(only_answer, 504, "backend_timeout")
    for answer in answers:
        check_answer(site, answer, stream=stream)
    assert sorted(message_of(answer).note["failovers"] for answer in answers) == [0, 1]


# Faults after visible output.
LATE: dict[str, tuple[Behaviour, str]] = {
    "RST": (breaks(reset_at(6)), "backend_protocol_error"),
    "FIN": (breaks(close_at(6)), "backend_protocol_error"),
    "FIN within an event": (breaks(half_event_at(6)), "backend_protocol_error"),
    "RST within the answer": (breaks(reset_at(15)), "backend_protocol_error"),
    "garbage": (breaks(inject_at(6, b"data: {garbage\n\n")), "backend_protocol_error"),
    "HTML": (breaks(inject_at(6, b"data: <html>\n\n")), "backend_protocol_error"),
    "invalid UTF-8": (breaks(inject_at(6, b"data: \xff\xfe\n\n")), "backend_protocol_error"),
    "error event": (breaks(inject_at(6, b'data: {"error": {"message": "x"}}\n\n')), "backend_protocol_error"),
    "error event with a code": (
        breaks(inject_at(6, b'data: {"error": {"message": "x", "code": 500}}\n\n')),
        "backend_error",
    ),
    "negative token id": (breaks(inject_at(6, event(token_ids=[-1], text=3))), "backend_protocol_error"),
    "unknown finish reason": (breaks(inject_at(6, event(finish_reason="bored"))), "backend_protocol_error"),
    "[DONE] without a finish reason": (breaks(inject_at(6, b"data: [DONE]\n\n")), "backend_protocol_error"),
    "aborted": (breaks(inject_at(6, event(finish_reason="abort"))), "backend_unavailable"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("case", LATE)
async def test_second_backend_continues_after_visible_output(site: Site, case: str) -> None:
    site.behave(LATE[case][0])
    answers = [await site.ask("two", stream=True) for _ in range(2)]
    for answer in answers:
        check_answer(site, answer, stream=True)
    assert sorted(message_of(answer).note["failovers"] for answer in answers) == [0, 1]
    assert {message_of(answer).note["backend"] for answer in answers} == {f"{site.wire.name}-2"}
    assert (len(asked(site.bad)), len(asked(site.good))) == (1, 2)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("group", ["one", "stays"])
@pytest.mark.parametrize("case", LATE)
async def test_interrupted_stream_ends_with_one_error_event_without_failover(site: Site, case: str, group: str) -> None:
    behaviour, code = LATE[case]
    site.behave(behaviour)
    answers = [await site.ask(group, stream=True) for _ in range(1 if group == "one" else 2)]
    [broken] = [answer for answer in answers if "error" in answer.events[-1]]
    check_broken(broken, code)
    assert len(asked(site.bad)) == 1
    assert len(asked(site.good)) == len(answers) - 1


@pytest.mark.parametrize("case", LATE)
async def test_interrupted_answer_without_streaming_is_an_http_error(site: Site, case: str) -> None:
    behaviour, code = LATE[case]
    site.behave(behaviour)
    status = {"backend_protocol_error": 502, "backend_error": 502, "backend_unavailable": 503}[code]
    check_error(await site.ask("one", stream=False), status, code)
    assert len(asked(site.bad)) == 1


@both_ways
async def test_missing_done_is_accepted_if_the_stop_token_arrived(site: Site, stream: bool) -> None:
    site.behave(breaks(without_done))
    answer = await site.ask("one", stream=stream)
    if not site.wire.hidden_stop():
        check_answer(site, answer, stream=stream)
    elif stream:
        check_broken(answer, "backend_protocol_error")
    else:
        check_error(answer, 502, "backend_protocol_error")
    check_answer(site, await site.ask("two", stream=stream), stream=stream)


async def test_silence_after_visible_output_is_one_error_event(site: Site) -> None:
    site.behave(breaks(stall_at(6)))
    answer = await site.ask("hurried-one", stream=True)
    check_broken(answer, "backend_timeout")
    assert len(asked(site.bad)) == 1


@both_ways
async def test_slow_answer_ends_at_the_total_time_limit(site: Site, stream: bool) -> None:
    text = ANSWER.replace("Easy", "Well, " * 100)
    site.behave(breaks(text=text, delay_s=0.02))
    answer = await site.ask("short-one", stream=stream)
    if stream:
        check_broken(answer, "backend_timeout")
    else:
        check_error(answer, 504, "backend_timeout")
    await site.bad.gone()


TOO_LONG: dict[str, Refusal] = {
    "as 400": vllm_context_error(),
    "as 413": Refusal(413, b'{"error": "maximum context length is 10"}'),
}


@both_ways
@pytest.mark.parametrize("case", TOO_LONG)
async def test_context_overflow_goes_to_another_backend_or_is_a_400(site: Site, case: str, stream: bool) -> None:
    site.behave(lambda wire: TOO_LONG[case])
    assert [(await site.ask("two", stream=stream)).status for _ in range(2)] == [200, 200]
    assert (len(asked(site.bad)), len(asked(site.good))) == (1, 2)
    check_error(await site.ask("one", stream=stream), 400, "context_length_exceeded", kind="invalid_request_error")


CLAUDE_CODE = re.compile(ANTHROPIC_PROMPT_TOO_LONG.clients["Claude Code"], re.IGNORECASE)


@both_ways
@pytest.mark.parametrize("case", TOO_LONG)
async def test_messages_reports_a_context_overflow_in_anthropics_words(site: Site, case: str, stream: bool) -> None:
    site.behave(lambda wire: TOO_LONG[case])
    answer = await site.unretrying.messages(model="gpt-oss-one", stream=stream)
    assert (answer.status, answer.headers["x-should-retry"]) == (400, "false")
    assert answer.body["error"]["type"] == "invalid_request_error"
    found = CLAUDE_CODE.fullmatch(answer.body["error"]["message"].removesuffix(" maximum"))
    assert found is not None
    assert int(found[1]) > int(found[2]) == {"as 400": 4096, "as 413": 10}[case]


# Error text that clients of each API match, by path.
FULL: dict[str, tuple[dict[str, Any], MatchedText]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, OPENAI_PROMPT_TOO_LONG),
    "/v1/responses": ({"input": "Hi"}, OPENAI_PROMPT_TOO_LONG),
    "/v1/completions": ({"prompt": "Hi. " * 40}, OPENAI_PROMPT_TOO_LONG),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
        ANTHROPIC_PROMPT_TOO_LONG,
    ),
}


@both_ways
async def test_context_overflow_is_reported_in_the_words_of_each_api(stream: bool) -> None:
    async with FakeVllm(context=20) as fake:
        config = {**config_of(f"vllm@{fake.url}"), "unisono": {"raw_completions": True}}
        async with gateway(config) as running:
            for path, (fields, text) in FULL.items():
                body = json.dumps({"model": "gpt-oss", "stream": stream, **fields}).encode()
                answer = await running.post(path, body)
                assert answer.status == 400 or (path, stream) == ("/v1/responses", True), (path, answer.raw)
                if answer.status == 400:
                    assert answer.headers["x-should-retry"] == "false"
                for client, pattern in text.clients.items():
                    assert re.search(pattern, answer.raw.decode(), re.IGNORECASE), (path, client)


REFUSED: dict[str, tuple[Refusal, str]] = {
    "rejected": (Refusal(400, b'{"error": {"message": "top_k: too odd"}}'), "backend_rejected_request"),
    "unprocessable": (Refusal(422, b'{"detail": "seed: too large"}'), "backend_rejected_request"),
}


@both_ways
@pytest.mark.parametrize("case", REFUSED)
async def test_rejected_request_is_reported_without_failover(site: Site, case: str, stream: bool) -> None:
    refusal, code = REFUSED[case]
    site.behave(lambda wire: refusal)
    answers = [await site.ask("two", stream=stream) for _ in range(2)]
    [refused] = [answer for answer in answers if answer.status != 200]
    check_error(refused, 400, code, kind="invalid_request_error")
    assert (len(asked(site.bad)), len(asked(site.good))) == (1, 1)


# Unusual streams that are still valid answers.
ODD: dict[str, Behaviour] = {
    "byte by byte": breaks(recut(1, 0)),
    "seven bytes at a time": breaks(recut(7, 0)),
    "one write": breaks(in_one_write),
    "CRLF": breaks(line_ends(b"\r\n")),
    "CR": breaks(line_ends(b"\r")),
    "all line ends": breaks(line_ends(b"\r\n", b"\n", b"\n", b"\r"), recut(5, 0)),
    "comments": breaks(inject_at(0, b": ping\n\n"), inject_at(5, b":\n\n"), inject_at(9, b"event: x\nid: 7\n\n")),
    "[DONE] twice": breaks(done_twice),
    "impossible usage": breaks(prompt_tokens=-7, cached_tokens=10**9),
    "usage of a wrong type": breaks(prompt_tokens="many"),
    "huge usage": breaks(prompt_tokens=10**30),
}


@pytest.mark.sampled(one_in=3)
@both_ways
@pytest.mark.parametrize("behaviour", ODD.values(), ids=ODD)
async def test_unusual_stream_is_read_as_a_normal_answer(site: Site, behaviour: Behaviour, stream: bool) -> None:
    site.behave(behaviour)
    answer = await site.ask("one", stream=stream, stream_options={"include_usage": True} if stream else None)
    check_answer(site, answer, stream=stream)
    usage = message_of(answer).usage
    assert 50 < usage["prompt_tokens"] < 100
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


FAMILY = "Greetings: 👩‍👩‍👧 中文 é!"


async def test_split_characters_reach_the_client_whole(site: Site) -> None:
    """Ids wires split characters into tokens, text wires into bytes."""
    text = f"<|channel|>final<|message|>{FAMILY}<|return|>"
    if site.wire.name == "vllm":
        site.behave(lambda wire: wire.script(text))
    else:
        choice = {"index": 0, "finish_reason": None, "text": text.removesuffix("<|return|>")}
        raw = f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()
        site.behave(breaks(inject_at(0, raw), recut(1, 0), text=""))
    answer = await site.ask("one", stream=True)
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in answer.events]
    assert "".join(deltas) == FAMILY
    assert "\ufffd" not in "".join(deltas)
    assert answer.done


@both_ways
async def test_failure_of_one_choice_fails_all_choices(site: Site, stream: bool) -> None:
    scripts: Iterator[Script] = iter(
        [site.wire.script(ANSWER), site.wire.script(ANSWER, faults=(reset_at(6),)), site.wire.script(ANSWER)]
    )
    site.behave(lambda wire: wire.script(""))
    site.bad.script = lambda _: next(scripts)  # type: ignore[assignment]
    answer = await site.ask("one", stream=stream, n=3)
    if stream:
        assert answer.status == 200
        assert not answer.done
        assert answer.events[-1]["error"]["code"] == "backend_protocol_error"
    else:
        check_error(answer, 502, "backend_protocol_error")
    assert len(asked(site.bad)) == 3


# Groups as a whole. Each test needs its own gateway.


def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


async def test_backend_that_never_started_does_not_affect_requests() -> None:
    wire = WIRES["vllm"]
    async with wire.fake() as good:
        answer = wire.script(ANSWER)
        good.script = lambda _: answer  # type: ignore[assignment]
        dead = f"http://127.0.0.1:{dead_port()}"
        entries = [deployment("gpt-oss", wire, dead), deployment("gpt-oss", wire, good)]
        async with gateway({"model_list": entries}) as running:
            began = asyncio.get_running_loop().time()
            answers = [await running.chat() for _ in range(6)]
            assert asyncio.get_running_loop().time() - began < IMMEDIATE_S
            assert [message_of(answer).content for answer in answers] == [EXPECTED[1]] * 6
            health = await running.get("/health/readiness")
            assert health.status == 200


async def test_deployments_share_requests_by_weight() -> None:
    wire = WIRES["vllm"]
    async with wire.fake() as heavy, wire.fake() as light, wire.fake() as other:
        answer = wire.script(ANSWER)
        for fake in (heavy, light, other):
            fake.script = lambda _: answer  # type: ignore[assignment]
        entries = [
            deployment("gpt-oss", wire, heavy, weight=4),
            deployment("gpt-oss", wire, light, weight=2),
            deployment("gpt-oss", wire, other, weight=2),
        ]
        async with gateway({"model_list": entries}) as running:
            await all_take_turns(running, heavy, light, other)
            for _ in range(12):
                await running.chat()
        assert [len(asked(fake)) for fake in (heavy, light, other)] == [6, 3, 3]


@both_ways
async def test_retries_are_limited_if_all_deployments_are_overloaded(stream: bool) -> None:
    wire = WIRES["vllm"]
    async with wire.fake() as busy:
        busy.script = lambda _: Refusal(503, b"{}", headers={"Retry-After": "3"})
        entries = [deployment("gpt-oss", wire, busy) for _ in range(5)]
        config = {"model_list": entries, "router_settings": {"num_retries": 2}}
        async with gateway(config) as running:
            for request in range(1, 4):
                answer = await running.chat(stream=stream)
                check_error(answer, 503, "backend_overloaded")
                assert answer.headers["retry-after"] == "3"
                assert len(asked(busy)) == 3 * request


async def test_failing_backend_cools_down_and_is_used_again() -> None:
    wire = WIRES["vllm"]
    async with wire.fake() as flapping, wire.fake() as good:
        answer = wire.script(ANSWER)
        good.script = lambda _: answer  # type: ignore[assignment]
        flapping.script = good.script
        entries = [deployment("gpt-oss", wire, flapping), deployment("gpt-oss", wire, good)]
        router = {"allowed_fails": 1, "cooldown_time": 0.5}
        async with gateway({"model_list": entries, "router_settings": router}) as running:
            await all_take_turns(running, flapping, good)
            flapping.script = lambda _: Refusal(500)
            for number in range(10):
                # A different prompt each time: identical failing requests could be the fault of the request.
                messages = [{"role": "user", "content": f"Question {number}"}]
                assert message_of(await running.chat(messages=messages)).content == EXPECTED[1]
            assert len(asked(flapping)) == 2
            flapping.script = lambda _: answer  # type: ignore[assignment]
            # After its cooldown, it is probed before it is used again.
            async with asyncio.timeout(15):
                while len(asked(flapping)) == 2:
                    assert message_of(await running.chat()).content == EXPECTED[1]
                    await asyncio.sleep(0.05)


# Checks of the client's answer


def check_answer(site: Site, answer: Answer, *, stream: bool) -> None:
    assert answer.status == 200
    assert answer.done is stream
    message = message_of(answer)
    assert (message.reasoning, message.content, message.calls, message.finish_reason) == (*EXPECTED, [], "stop")
    # A continued answer may come with all of its ids, including the stop token.
    note = message.note
    assert note["recoveries"] == site.wire.hidden_stop() or (note["failovers"], note["recoveries"]) == (1, [])


def check_error(answer: Answer, status: int, code: str, kind: str = "server_error") -> None:
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, code)
    assert error["message"]
    assert "127.0.0.1" not in error["message"]
    assert ("retry-after" in answer.headers) is (status == 503)


def check_broken(answer: Answer, code: str) -> None:
    """Check a partial answer with an error at its end and no sign of success."""
    assert answer.status == 200
    assert not answer.done
    assert b"[DONE]" not in answer.raw
    *before_error, last = answer.events
    assert last["error"]["code"] == code
    assert set(last) == {"error", "unisono"}
    text = "".join(
        event["choices"][0]["delta"].get("reasoning") or event["choices"][0]["delta"].get("content") or ""
        for event in before_error
    )
    assert text
    assert "".join(EXPECTED).startswith(text) or text.startswith("Well, ")
    assert all(choice["finish_reason"] is None for event in before_error for choice in event["choices"])
    assert answer.raw.rstrip().rpartition(b"\n")[2].startswith(b'data: {"error"')
