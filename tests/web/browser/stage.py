"""Gateways for the checks of the web page: one without keys, one with a key, and the demo.

It runs in the project's own environment, as `python -m tests.web.browser.stage`. Like `tests.e2e.clients.stage`, it
prints one line of JSON when all gateways are ready, and ends when its stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.e2e.clients.stage import MASTER_KEY, demo_config, nobody_at, run, served, until_told
from tests.fakes import FakeVllm
from tests.mcp.conftest import start_upstream
from tests.web.browser.scripts import script_of

# Names come from the configuration, and may contain harmful text too.
NAME = "<b>gpu</b>\u202e1-"


def config_of(url: str, closed: str, **sections: Any) -> dict[str, Any]:
    def entry(name: str, base: str, **rest: Any) -> dict[str, Any]:
        return {"model_name": name, "litellm_params": {"model": "vllm/tiny", "api_base": base}, **rest}

    return {
        "model_list": [
            entry("gpt-oss-120b", url),
            entry("gpt-oss-120b", closed),
            entry("gpt-oss-20b", url, unisono={"price": {"input": 0.1, "output": 0.5}}, model_info={"id": NAME}),
        ],
        "router_settings": {"model_group_alias": {"gpt-4o": "gpt-oss-120b"}, "allowed_fails": 10_000},
        "store": {"url": "memory://"},
        "unisono": {"traces": {"mode": "all"}, "raw_completions": True},
        **sections,
    }


def recorded(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "unisono": {**config["unisono"], "traces": {"mode": "all"}}}


async def perform() -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-page-")))
        fake = await stack.enter_async_context(FakeVllm(script=script_of))
        # One deployment always fails.
        closed = stack.enter_context(nobody_at())
        _, upstream = stack.enter_context(start_upstream(folder))
        tools = {"docs": {"url": upstream.urls["modern"], "require_approval": "never"}}
        keyed = config_of(fake.url, closed, general_settings={"master_key": MASTER_KEY}, mcp_servers=tools)
        async with asyncio.TaskGroup() as starting:
            configs = {"open": config_of(fake.url, closed, mcp_servers=tools), "keyed": keyed}
            configs["demo"] = recorded(demo_config())
            tasks = {
                name: starting.create_task(stack.enter_async_context(served(folder, name, config)))
                for name, config in configs.items()
            }
        addresses = {name: task.result() for name, task in tasks.items()}
        print(json.dumps({**addresses, "key": MASTER_KEY, "backend": fake.url}), flush=True)
        await until_told()


if __name__ == "__main__":
    run(perform)
