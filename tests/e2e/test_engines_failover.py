"""Real servers killed within an answer: another one continues it exactly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.processes import lives
from tests.e2e.test_engines import PINNED, mlx_lm_server

pytestmark = [pytest.mark.engine]

ENDLESS = "Repeat la forever."
TOKENS = 400
# Events that are read before the server is killed.
EVENTS_BEFORE_KILL = 12

SURFACES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": ENDLESS}], "max_tokens": TOKENS},
    "/v1/responses": {"input": ENDLESS, "max_output_tokens": TOKENS},
}


def cpu_ticks(pid: int) -> int:
    """Return the processor time of a process, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def events_of(running: Gateway, path: str, up: Sequence[int] = ()) -> tuple[str, Any]:
    """Return the text of a stream and its last event.

    Of the processes `up`, the one that answers is killed after some events.
    """
    body = {"model": "gpt-oss", "stream": True, "temperature": 0, **SURFACES[path]}
    headers = {"content-type": "application/json"}
    text, events, last = "", 0, None
    before = {pid: cpu_ticks(pid) for pid in up}
    async with running.session.post(running.url + path, data=json.dumps(body), headers=headers) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            last = json.loads(line[6:])
            text += _text(last)
            events += 1
            if events == EVENTS_BEFORE_KILL and up:
                os.kill(max(up, key=lambda pid: cpu_ticks(pid) - before[pid]), signal.SIGKILL)
    return text, last


def _text(event: Any) -> str:
    if "choices" in event:
        deltas = [choice["delta"] for choice in event["choices"]]
        return "".join((delta.get("reasoning") or "") + (delta.get("content") or "") for delta in deltas)
    return event["delta"] if event["type"].endswith("text.delta") else ""


@pytest.mark.slow
async def test_client_gets_the_undisturbed_answer_after_a_server_is_killed(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        up = [stack.enter_async_context(mlx_lm_server(tmp_path / f"log{number}")) for number in range(3)]
        servers = await asyncio.gather(*up)
        patient = {"allowed_fails": 1000, "cooldown_time": 0.01}
        config = config_of(*(f"mlx_server@{url}" for url, _ in servers), router_settings=patient, unisono=PINNED)
        running = await stack.enter_async_context(gateway(config))
        undisturbed = {path: (await events_of(running, path))[0] for path in SURFACES}
        for path, text in undisturbed.items():
            assert len(text) > TOKENS
            continued, last = await events_of(running, path, [pid for _, pid in servers if lives(pid)])
            assert continued == text
            note = last["unisono"] if "choices" in last else last["response"]["unisono"]
            assert note["failovers"] >= 1, note
