"""What a measured request continues: turns that were really had, each a request and its answer, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson

from bench import http_client, readers, wires
from bench.http_client import Connection
from bench.material import Material

AT_ONCE = 2
BUSY_S = 0.5
BUSY = (409, 503)
"""What a gateway says whose store was late: pasts are not measured, so the turn is had a little later."""
TRIES = 20


@dataclass(frozen=True, slots=True)
class Lived:
    """`count` pasts of `turns` turns with answers of `tokens` tokens, made of responses that continue each other
    (`chain`) or in a conversation (`conversation`)."""

    how: str
    port: int
    count: int
    turns: int
    tokens: int
    seed: int
    key: str


async def live(stuff: Material, lived: Lived) -> list[Mapping[str, str]]:
    """The pasts, each as the fields of a body that continues it. Raises RuntimeError when a turn goes wrong."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Mapping[str, str]:
        async with places:
            connection = await http_client.connect(lived.port)
            try:
                return await _past(stuff, lived, number, connection)
            finally:
                connection.close()

    return list(await asyncio.gather(*map(one, range(lived.count))))


async def _past(stuff: Material, lived: Lived, number: int, connection: Connection) -> Mapping[str, str]:
    begin, further = PASTS[lived.how]
    past = await begin(connection, lived.key)
    for turn in range(lived.turns):
        seed = hash((lived.seed, number, turn))
        question = wires.Question(seed, more=past)
        request = wires.request("responses", stuff, question, tokens=lived.tokens, stream=False, key=lived.key)
        for _ in range(TRIES):
            reader = readers.ResponseReader()
            status = await connection.request(request, reader.feed)
            if status not in BUSY:
                break
            await asyncio.sleep(BUSY_S)
        fault = reader.fault(status, stuff.answer(lived.tokens))
        if fault is not None:
            raise RuntimeError(f"turn {turn} of a past: {fault}")
        past = further(past, reader.id)
    return past


async def _nothing(connection: Connection, key: str) -> Mapping[str, str]:
    del connection, key
    return {}


async def _conversation(connection: Connection, key: str) -> Mapping[str, str]:
    parts = list[bytes]()
    status = await connection.request(http_client.message("/v1/conversations", b"{}", key=key), parts.append)
    if status != 200:
        raise RuntimeError(f"no conversation: HTTP {status}: {b''.join(parts)[:300]!r}")
    return {"conversation": str(orjson.loads(b"".join(parts))["id"])}


Begin = Callable[[Connection, str], Awaitable[Mapping[str, str]]]
Further = Callable[[Mapping[str, str], str], Mapping[str, str]]

PASTS: dict[str, tuple[Begin, Further]] = {
    "chain": (_nothing, lambda past, response_id: {"previous_response_id": response_id}),
    "conversation": (_conversation, lambda past, response_id: past),
}
"""What the first turn of a past continues, and what the turn behind a response does."""
