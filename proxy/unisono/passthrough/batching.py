"""Embeddings of large input lists: parts on all deployments of a model, joined in order.

Each part is a pass-through generation of its own, with its own attempts. A part that fails is therefore retried alone.
If all attempts of a part have failed, its error ends the whole request.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from unisono.core.answer_times import Deadline
from unisono.core.conversation import Json, Phase
from unisono.core.events import Closed, Event, Finished, Passed, Text
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason, Usage
from unisono.core.passthrough_request import Api, PassthroughRequest
from unisono.core.route_protocol import DeploymentPool
from unisono.core.unit_estimates import estimated_units
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest
from unisono.errors import BackendRejected
from unisono.passthrough.run import PassthroughGeneration

# Maximum number of parts of one request that run at the same time. The limit leaves slots for other requests.
MAX_CONCURRENT_PARTS: Final = 8

# Beginning of the path of an input in a backend's error: `input.1` or `input[1]`. Group 2 is the index.
INPUT_PATH: Final = re.compile(r"(input[.\[])([0-9]{1,9})(?![0-9])")


def is_batched(passthrough: PassthroughRequest) -> bool:
    """Return whether a request has more inputs than its model accepts at once."""
    size = passthrough.batch_size
    return passthrough.api is Api.EMBEDDINGS and size is not None and (passthrough.inputs or 0) > size


@dataclass(frozen=True, slots=True)
class EmbeddingsPart:
    """Answer to one part. `first` is the 0-based index of the part's first input in the request."""

    first: int
    body: Mapping[str, Json]
    usage: Usage


class BatchedEmbeddings(BatchStream):
    """Embeddings of a request that is answered in parts."""

    def __init__(self, pool: DeploymentPool, request: GenerationRequest, passthrough: PassthroughRequest) -> None:
        self.report = GenerationReport()
        self._pool = pool
        self._request = request
        self._passthrough = passthrough
        self._reports: list[GenerationReport] = []

    async def _each(self) -> AsyncGenerator[list[Event]]:
        parts: list[EmbeddingsPart] = []
        waiting, began = self._split(), asyncio.get_running_loop().time()
        workers = [asyncio.create_task(self._work(waiting, parts, began)) for _ in range(MAX_CONCURRENT_PARTS)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._merge_reports(parts)
        usage = Usage(sum(part.usage.prompt_tokens for part in parts), 0)
        body = joined(sorted(parts, key=lambda part: part.first))
        yield [Passed(body), Closed(Text(0, Phase.FINAL), ""), Finished(FinishReason.STOP, usage)]

    def _split(self) -> Iterator[tuple[int, PassthroughRequest]]:
        """Yield the 0-based index of the first input of each part, and the part."""
        passthrough = self._passthrough
        inputs, size = passthrough.body["input"], passthrough.batch_size
        assert isinstance(inputs, list)
        assert size is not None
        for first in range(0, len(inputs), size):
            part = inputs[first : first + size]
            share = -(-passthrough.tokens * len(part) // len(inputs))
            body = {**passthrough.body, "input": part}
            units = estimated_units(passthrough.api, body)
            yield first, replace(passthrough, body=body, inputs=len(part), tokens=share, units=units)

    async def _work(
        self, waiting: Iterator[tuple[int, PassthroughRequest]], parts: list[EmbeddingsPart], began: float
    ) -> None:
        """Take parts from `waiting`, answer one after the other, and append the answers to `parts`.

        `began` is the start of the whole request, on the clock of the event loop. The time limit of each part begins
        then.
        """
        for first, passthrough in waiting:
            routing = replace(self._request.routing, deadline=Deadline(began))
            request = replace(self._request, passthrough=passthrough, routing=routing)
            stream = PassthroughGeneration(self._pool, request, passthrough)
            stream.report.began = self.report.began
            self._reports.append(stream.report)
            body: Mapping[str, Json] = {}
            try:
                async with aclosing(stream):
                    async for batch in stream:
                        for event in batch:
                            if isinstance(event, Passed):
                                body = event.body
                            elif isinstance(event, Finished):
                                parts.append(EmbeddingsPart(first, body, event.usage))
            except BackendRejected as error:
                error.param = _in_request(error.param, first)
                raise

    def _merge_reports(self, parts: Sequence[EmbeddingsPart]) -> None:
        """Combine the reports of all parts.

        The reported backend is the one that answered the most parts.
        """
        report, each = self.report, self._reports
        for number, part in enumerate(each):
            report.facts.waits += part.facts.waits
            report.facts.steps += (replace(step, step=number) for step in part.facts.steps)
        report.facts.prompt_tokens = sum(part.usage.prompt_tokens for part in parts)
        report.failovers = sum(part.failovers for part in each)
        # The attempts of a part that a different model answered are placed last.
        report.tries = [one for part in sorted(each, key=_has_moved) for one in part.tries]
        report.model = self._request.model
        answered = Counter(part.backend for part in each if part.backend)
        report.facts.part_backends = sorted(answered)
        report.backend = max(sorted(answered), key=lambda name: answered[name], default="")


def _in_request(param: str | None, first: int) -> str | None:
    """Return `param`, a path in a part, as a path in the request.

    `first` is the 0-based index of the part's first input in the request.
    """
    if param is None or (found := INPUT_PATH.match(param)) is None:
        return param
    return f"{found[1]}{int(found[2]) + first}{param[found.end() :]}"


def _has_moved(report: GenerationReport) -> bool:
    return report.served_model not in ("", report.model)


def joined(parts: Sequence[EmbeddingsPart]) -> dict[str, Json]:
    """Join the answers of all parts in order.

    The result is the first answer, with the embeddings of all parts and the total usage. It has no usage if a part
    reports none.
    """
    data: list[Json] = []
    for part in parts:
        embeddings = part.body.get("data")
        for index, one in enumerate(_in_order(embeddings if isinstance(embeddings, list) else [])):
            data.append({**one, "index": part.first + index} if isinstance(one, Mapping) else one)
    body = {**parts[0].body, "data": data}
    usages = [part.body.get("usage") for part in parts]
    counts = [usage for usage in usages if isinstance(usage, Mapping)]
    if len(counts) == len(parts):
        body["usage"] = _sum(counts)
    else:
        body.pop("usage", None)
    return body


def _in_order(data: list[Json]) -> list[Json]:
    """Return embeddings in the order of their inputs, which servers may not preserve."""
    places = {one["index"]: one for one in data if isinstance(one, Mapping) and type(one.get("index")) is int}
    order = range(len(data))
    return [places[index] for index in order] if places.keys() == {*order} else data


def _sum(counts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the sums of whole numbers; other values are those of the first part."""
    sums: dict[str, Json] = dict(counts[0])
    for name in counts[0]:
        values = [count.get(name) for count in counts]
        if all(type(value) is int for value in values):
            sums[name] = sum(value for value in values if isinstance(value, int))
    return sums
