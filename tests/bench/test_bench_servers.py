"""Fake backend and relays over real sockets, with the clients of the load generator."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import orjson
import pytest

from bench import fake_vllm, http_client, prose, relay, vllm_wire, wires
from bench.fake_vllm import Pace
from bench.load import Clients, ColdPrompts, Load
from bench.prose import Corpus
from tests.listening import listening


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


@asynccontextmanager
async def fake(corpus: Corpus) -> AsyncIterator[int]:
    async with await fake_vllm.serve(corpus, 0) as server:
        yield port_of(server)


async def ask(port: int, path: str, body: object = None, method: str = "POST") -> tuple[int, bytes]:
    connection, parts = await http_client.connect(port), list[bytes]()
    status = await connection.request(http_client.message(path, orjson.dumps(body), method), parts.append)
    connection.close()
    await asyncio.sleep(0.01)
    return status, b"".join(parts)


async def run(corpus: Corpus, load: Load) -> tuple[int, int, list[str]]:
    clients = Clients(corpus)
    result = await clients.run(load)
    clients.close()
    await asyncio.sleep(0.02)
    return result.requests, result.tokens, result.examples


LOADS = {
    "one stream": Load("vllm", 0, streams=1, tokens=30),
    "several streams, repeated": Load("vllm", 0, streams=4, tokens=200, requests=3),
    "shortest answer": Load("vllm", 0, streams=2, tokens=12, requests=2),
    "truncated by max_tokens": Load("vllm", 0, streams=1, tokens=3),
    "no streaming": Load("vllm", 0, streams=2, tokens=64, requests=2, stream=False),
    "larger than the socket buffer": Load("vllm", 0, streams=1, tokens=16_384),
}

LOADS_BY_WIRE = {
    f"{name}, {wire}": replace(load, wire=wire)
    for name, load in LOADS.items()
    for wire in ("vllm", "chat")
    # A truncated answer has no defined chat form, so it is tested on the vLLM wire only.
    if wire == "vllm" or load.tokens >= prose.MIN_ANSWER_TOKENS
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("relayed", [False, True], ids=["direct", "relayed"])
@pytest.mark.parametrize("load", LOADS_BY_WIRE.values(), ids=LOADS_BY_WIRE)
async def test_every_answer_arrives_byte_for_byte(corpus: Corpus, load: Load, relayed: bool) -> None:
    async with fake(corpus) as upstream, await relay.serve(0, upstream) as between:
        aimed = replace(load, port=port_of(between) if relayed else upstream)
        count = load.streams * load.requests
        assert await run(corpus, aimed) == (count, count * load.tokens, [])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_serves_the_next_request_after_a_complete_answer(corpus: Corpus, stream: bool) -> None:
    async with fake(corpus) as port:
        connection = await http_client.connect(port)
        request = wires.request("vllm", corpus, wires.Question(1), tokens=30, stream=stream)
        for _ in range(2):
            parts = list[bytes]()
            assert await connection.request(request, parts.append) == 200
            assert connection.reusable
        connection.close()


async def test_cold_prompts_are_answered_without_a_change_of_pace(corpus: Corpus) -> None:
    async with fake(corpus) as port:
        await ask(port, "/bench/pace", {"interval_us": 5000, "tokens_per_chunk": 2})
        started_at = time.perf_counter()
        cold = ColdPrompts(words=3000, every_s=0.02, count=2, tokens=12)
        requests, tokens, faults = await run(corpus, Load("vllm", port, streams=2, tokens=60, cold=cold))
        assert (requests, tokens, faults) == (4, 144, [])
        assert time.perf_counter() - started_at >= 29 * 2 * 0.005


async def test_a_request_can_set_the_tokens_per_chunk(corpus: Corpus) -> None:
    async with fake(corpus) as port:
        body = {"model": vllm_wire.MODEL, "prompt": [1], "max_tokens": 24, "stream": True, "stream_interval": 6}
        _, answer = await ask(port, "/v1/completions", body)
        assert answer.count(b"data: {") == 4


async def test_a_client_disconnect_is_counted(corpus: Corpus) -> None:
    async with fake(corpus) as port:
        await ask(port, "/bench/pace", asdict(Pace(interval_us=10_000)))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(wires.request("vllm", corpus, wires.Question(1), tokens=5000, stream=True))
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        _, counters = await ask(port, "/bench/served", method="GET")
        assert orjson.loads(counters) == {"requests": 1, "tokens": 0, "abandoned": 1}


async def test_the_backend_reports_the_end_time_of_an_answer(corpus: Corpus) -> None:
    async with fake(corpus) as port:
        words, _ = corpus.prompt(wires.QUESTION_WORDS, 7)
        frame = [200007, 200006, 173781]
        body = {"model": vllm_wire.MODEL, "prompt": [1, *words, *frame], "max_tokens": 12, "stream": True}
        before = time.monotonic()
        await ask(port, "/v1/completions", body)
        _, answer = await ask(port, "/bench/ended")
        [(words_sent, ended_at)] = orjson.loads(answer).items()
        assert words_sent == " ".join(map(str, words[-vllm_wire.QUESTION_KEY_WORDS :]))
        assert before <= ended_at <= time.monotonic()
        assert await ask(port, "/bench/ended") == (200, b"{}")


async def test_planned_disconnects_are_counted_without_faults(corpus: Corpus) -> None:
    async with fake(corpus) as port:
        await ask(port, "/bench/pace", asdict(Pace(interval_us=10_000)))
        clients = Clients(corpus)
        result = await clients.run(Load("vllm", port, streams=3, tokens=5000, disconnect_after_s=0.05))
        await asyncio.sleep(0.02)
        _, counters = await ask(port, "/bench/served", method="GET")
        assert (result.disconnected, result.faults, orjson.loads(counters)["abandoned"]) == (3, 0, 3)


REFUSED = {
    "unknown model": ({"model": "x", "prompt": [1]}, 404),
    "text prompt": ({"model": vllm_wire.MODEL, "prompt": "hello"}, 400),
    "token id out of range": ({"model": vllm_wire.MODEL, "prompt": [201_088]}, 400),
    "longer than the context": ({"model": vllm_wire.MODEL, "prompt": [1], "max_tokens": 131_072}, 400),
}


@pytest.mark.parametrize(("body", "status"), REFUSED.values(), ids=REFUSED)
async def test_an_invalid_request_is_rejected(corpus: Corpus, body: object, status: int) -> None:
    async with fake(corpus) as port:
        response_status, content = await ask(port, "/v1/completions", body)
        assert (response_status, orjson.loads(content)["error"]["code"]) == (status, status)


async def test_a_hanging_server_is_a_fault_after_the_limit(corpus: Corpus) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent) as listener:
        load = Load("vllm", listener.port, streams=1, tokens=12, limit_s=0.1)
        assert await run(corpus, load) == (1, 0, ["not finished after 0 s"])
