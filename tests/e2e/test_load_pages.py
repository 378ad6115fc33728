"""Load pages of backends: parsing them never blocks other streams."""

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
# Function that parses a metrics page of vLLM.
PARSER = "_gauges"
LABELS = {
    "one long name": "a" * LINE_BYTES,
    "names without values": "a_" * (LINE_BYTES // 2),
    "names and blanks": "a " * (LINE_BYTES // 2),
    "unclosed value": 'a="' + "\\\\" * (LINE_BYTES // 2),
    "many values": 'a="b",' * (LINE_BYTES // 6),
}


def page(labels: str) -> bytes:
    return f"vllm:num_requests_running{{{labels}}} 7\n".encode() + vllm_metrics((3, 2, 0.25), cache_tokens=1000)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("case", LABELS)
async def test_streams_continue_while_a_load_page_with_a_long_line_is_parsed(case: str) -> None:
    threads = Threads(held={PARSER})
    asyncio.get_running_loop().set_default_executor(threads)
    wire = WIRES["vllm"]
    async with wire.fake() as first, wire.fake() as second, wire.fake() as slow:
        for fake in (first, second):
            fake.script = lambda _: wire.script("<|channel|>final<|message|>ok<|return|>")
            fake.pages = {"/metrics": lambda: page(LABELS[case])}
        script = wire.script("<|channel|>final<|message|>" + " ".join(map(str, range(3_000))), delay_s=STEP_S)
        slow.script = lambda _: script
        # Load is read only if several deployments can be chosen.
        deployments = [
            deployment("gpt-oss", wire, first),
            deployment("gpt-oss", wire, second),
            deployment("gpt-oss-slow", wire, slow),
        ]
        async with gateway({"model_list": deployments}) as running, singing(running, "gpt-oss-slow") as canary:
            await canary.heard_more(1)
            assert message_of(await running.chat()).content == "ok"
            async with asyncio.timeout(20):
                while PARSER not in threads.begun:
                    await asyncio.sleep(0.01)
            await canary.heard_more(5)
            assert PARSER not in [name for name, _ in threads.returned]
            threads.release.set()
            async with asyncio.timeout(20):
                while (load := dict(threads.returned).get(PARSER)) is None:
                    await asyncio.sleep(0.01)
            # The long line is skipped, and the rest of the page counts.
            assert load == Load(3, 2, 250, 0.25)
            await canary.heard_more(2)
