"""Stored turns that measured requests continue, created by real requests in sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson

from bench import http_client, readers, wires
from bench.http_client import ClientConnection
from bench.prose import Corpus

MAX_CONCURRENT = 2
RETRY_DELAY_S = 0.5
# Statuses of a gateway whose store was late. These turns are not measured, so they are retried.
BUSY_STATUSES = (409, 503)
MAX_TRIES = 20


@dataclass(frozen=True, slots=True)
class PriorTurnsJob:
    """Job that creates `count` sequences of `turns` turns with answers of `tokens` tokens.

    The turns of a sequence continue each other's response (`chain`) or share a conversation (`conversation`).
    """

    variant: str
    port: int
    count: int
    turns: int
    tokens: int
    seed: int
    key: str


async def create_prior_turns(corpus: Corpus, job: PriorTurnsJob) -> list[Mapping[str, str]]:
    """Create all sequences and return the body fields that continue each of them.

    Raises RuntimeError if a turn fails.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(number: int) -> Mapping[str, str]:
        async with slots:
            connection = await http_client.connect(job.port)
            try:
                return await _create_one(corpus, job, number, connection)
            finally:
                connection.close()

    return list(await asyncio.gather(*map(one, range(job.count))))


async def _create_one(
    corpus: Corpus, job: PriorTurnsJob, number: int, connection: ClientConnection
) -> Mapping[str, str]:
    start, advance = PRIOR_KINDS[job.variant]
    prior = await start(connection, job.key)
    for turn in range(job.turns):
        seed = hash((job.seed, number, turn))
        question = wires.Question(seed, extra_fields=prior)
        request = wires.request("responses", corpus, question, tokens=job.tokens, stream=False, key=job.key)
        for _ in range(MAX_TRIES):
            reader = readers.ResponseBodyReader()
            status = await connection.request(request, reader.feed)
            if status not in BUSY_STATUSES:
                break
            await asyncio.sleep(RETRY_DELAY_S)
        fault = reader.fault(status, corpus.answer(job.tokens))
        if fault is not None:
            raise RuntimeError(f"prior turn {turn} failed: {fault}")
        prior = advance(prior, reader.id)
    return prior


async def _no_prior(connection: ClientConnection, key: str) -> Mapping[str, str]:
    del connection, key
    return {}


async def _create_conversation(connection: ClientConnection, key: str) -> Mapping[str, str]:
    parts = list[bytes]()
    status = await connection.request(http_client.message("/v1/conversations", b"{}", key=key), parts.append)
    if status != 200:
        raise RuntimeError(f"creation of a conversation failed: HTTP {status}: {b''.join(parts)[:300]!r}")
    return {"conversation": str(orjson.loads(b"".join(parts))["id"])}


StartPrior = Callable[[ClientConnection, str], Awaitable[Mapping[str, str]]]
AdvancePrior = Callable[[Mapping[str, str], str], Mapping[str, str]]

# By variant: the body fields of the first turn, and those of the turn after a response.
PRIOR_KINDS: dict[str, tuple[StartPrior, AdvancePrior]] = {
    "chain": (_no_prior, lambda prior, response_id: {"previous_response_id": response_id}),
    "conversation": (_create_conversation, lambda prior, response_id: prior),
}
