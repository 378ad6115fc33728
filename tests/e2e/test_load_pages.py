"""Pages on which backends tell their load: whatever is on them, other streams go on while they are read."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.canary import STEP_S, singing
from tests.e2e.gateway import gateway, message_of
from tests.e2e.wires import WIRES, deployment
from tests.fakes.loads import vllm_metrics
from tests.threads import Threads
from unisono.core.generation import Load

LINE_BYTES = 30_000
READER = "_gauges"
"""The function that reads a page of vLLM."""
LABELS = {
    "one long name": "a" * LINE_BYTES,
    "names without values": "a_" * (LINE_BYTES // 2),
    "names and blanks": "a " * (LINE_BYTES // 2),
    "a value that is not closed": 'a="' + "\\\\" * (LINE_BYTES // 2),
    "many values": 'a="b",' * (LINE_BYTES // 6),
}


def page(labels: str) -> bytes:
    return f"vllm:num_requests_running{{{labels}}} 7\n".encode() + vllm_metrics((3, 2, 0.25), cache_tokens=1000)


@pytest.mark.parametrize("case", LABELS)
async def test_a_stream_goes_on_while_a_page_with_a_long_line_is_read(case: str) -> None:
    threads = Threads(held={READER})
    asyncio.get_running_loop().set_default_executor(threads)
    wire = WIRES["vllm"]
    async with wire.fake() as one, wire.fake() as other, wire.fake() as slow:
        for fake in (one, other):
            fake.script = lambda _: wire.script("<|channel|>final<|message|>ok<|return|>")
            fake.pages = {"/metrics": lambda: page(LABELS[case])}
        song = wire.script("<|channel|>final<|message|>" + " ".join(map(str, range(3_000))), delay_s=STEP_S)
        slow.script = lambda _: song
        # Load is asked for where there is a choice.
        entries = [
            deployment("gpt-oss", wire, one),
            deployment("gpt-oss", wire, other),
            deployment("gpt-oss-slow", wire, slow),
        ]
        async with gateway({"model_list": entries}) as running, singing(running, "gpt-oss-slow") as canary:
            await canary.heard_more(1)
            assert message_of(await running.chat()).content == "ok"
            async with asyncio.timeout(20):
                while READER not in threads.begun:
                    await asyncio.sleep(0.01)
            await canary.heard_more(5)
            assert READER not in [name for name, _ in threads.returned]
            threads.release.set()
            async with asyncio.timeout(20):
                while (found := dict(threads.returned).get(READER)) is None:
                    await asyncio.sleep(0.01)
            # The long line is skipped, and the rest of the page counts.
            assert found == Load(3, 2, 250, 0.25)
            await canary.heard_more(2)
