"""A process dies during a background response that was compacted, and its successor finishes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.api.responses.folding import fold
from tests.e2e.continuing import Model
from tests.e2e.gateway import config_of
from tests.e2e.replicas import LEASE_S, Client, Json, Told, replica
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm

HISTORY: list[Json] = [
    {"type": "message", "role": "user", "content": "Is there tea?"},
    {"type": "message", "role": "assistant", "content": "The porcelain pot is empty. " * 400},
]
QUESTION: Json = {"type": "message", "role": "user", "content": "Then make some."}
REQUESTS: dict[str, tuple[Json, int, list[str], int]] = {
    # case: (fields, last event before the crash, output, summaries that are begun)
    "during the answer": (
        {
            "input": [*HISTORY, QUESTION],
            "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        },
        25,
        ["compaction", "reasoning", "message"],
        1,
    ),
    "during the answer to a conversation beyond the window": (
        {
            "input": [*HISTORY * 4, QUESTION],
            "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        },
        25,
        ["compaction", "reasoning", "message"],
        1,
    ),
    "during the summary": ({"input": [*HISTORY, {"type": "compaction_trigger"}]}, 2, ["compaction"], 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "until", "output", "summaries"), REQUESTS.values(), ids=REQUESTS)
async def test_a_compacted_response_survives_a_crash(
    tmp_path: Path, fields: Json, until: int, output: list[str], summaries: int
) -> None:
    model = Model(delay_s=0.03)
    async with FakeVllm(script=model.script, context=10_000) as fake, aiohttp.ClientSession() as session:
        store = {"url": f"sqlite:///{str(tmp_path).removeprefix('/')}/state.db", "lease_s": LEASE_S}
        config = config_of(f"vllm@{fake.url}", store=store, unisono={"current_date": "2026-11-20"})
        received = Told()
        body: Json = {"model": "gpt-oss", "background": True, "stream": True, **fields}
        async with replica(tmp_path, config) as first:
            await Client(first.url, session).listens(received, "/v1/responses", body, until=until)
            while not any(seen.path == "/v1/completions" for seen in fake.requests):
                await asyncio.sleep(0.01)
            first.kill()
            await first.ended()
        async with replica(tmp_path, config) as second:
            client = Client(second.url, session)
            await client.resumes(received, received.id)
            stored = await client.get(f"/v1/responses/{received.id}")
            assert fold(received.events).response == stored
            assert [item["type"] for item in stored["output"]] == output
            is_beyond = len(fields["input"]) > 6
            assert stored["unisono"].get("left_out", 0) == (2 if is_beyond else 0)
            assert len(stored["unisono"].get("notes", ())) == is_beyond
            # The successor has the same compaction, and continues from it.
            model.delay_s = 0.0
            item = [each for each in stored["output"] if each["type"] == "compaction"]
            follow_up: Json = {"model": "gpt-oss", "input": [*item, QUESTION], "store": False}
            await client.post("/v1/responses", follow_up)
        prompts = [ENCODING.decode(seen.json["prompt"]) for seen in fake.requests if seen.path == "/v1/completions"]
        assert sum("Sum up our conversation" in prompt for prompt in prompts) == summaries
        assert "porcelain" not in prompts[-1]
        assert prompts[-1].count(model.text) == 1
        if output[-1] == "message":
            assert stored["output"][-1]["content"][0]["text"] == model.text
