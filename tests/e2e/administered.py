"""A gateway whose keys, teams and users are administered over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.keyed import MASTER, with_keys
from tests.fakes import FakeVllm
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"


@dataclass(frozen=True)
class AdminClient:
    """Client of the admin API with one key."""

    gateway: Gateway
    key: str = MASTER

    def using(self, key: str) -> AdminClient:
        return AdminClient(self.gateway, key)

    async def post(self, path: str, headers: Mapping[str, str] | None = None, **body: Any) -> Answer:
        data = json.dumps(body).encode()
        return await self.gateway.post(path, data, authorization=f"Bearer {self.key}", **(headers or {}))

    async def get(self, path: str) -> Answer:
        return await self.gateway.get(path, authorization=f"Bearer {self.key}")

    async def made(self, path: str, **body: Any) -> Any:
        answer = await self.post(path, **body)
        assert answer.status == 200, answer.raw
        return answer.body


@asynccontextmanager
async def administered(
    address: str, price: Mapping[str, float] | None = None, **sections: Any
) -> AsyncIterator[AdminClient]:
    """Run a gateway with one scripted model on the store at `address`."""
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}", **sections)
        if price is not None:
            config["model_list"][0]["unisono"] = {"price": price}
        keyed_config = with_keys(config, address)
        # The tests concern no deadline, and the machine may be busy.
        keyed_config["store"]["deadline_s"] = 5.0
        async with gateway(keyed_config) as running:
            yield AdminClient(running)
