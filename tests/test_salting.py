"""Salt of the gateway: configured, or stored in a store that may lose it."""

from __future__ import annotations

import pytest

from unisono.bootstrap.salt import BYTES, NAME, Salt
from unisono.config import parse
from unisono.store.sqlite import SqliteStore


class LossyStore(SqliteStore):
    """Store that loses its secrets, like a server without persistence after a restart."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lost = 0

    async def secret(self, name: str, candidate: bytes) -> bytes:
        return await super().secret(f"{name}-{self.lost}", candidate)


@pytest.fixture
def minimal_config() -> dict[str, object]:
    return {"model_list": [{"model_name": "m", "litellm_params": {"model": "vllm/a"}}]}


async def test_the_secret_is_restored_when_the_store_loses_it(minimal_config: dict[str, object]) -> None:
    store, config = LossyStore(), parse(minimal_config, {}).config
    await store.start()
    first_gateway, second_gateway = Salt(config, store), Salt(config, store)
    first = await first_gateway()
    assert len(first) == BYTES
    assert await second_gateway() == first
    store.lost += 1
    assert await first_gateway() == await second_gateway() == first
    await store.aclose()


async def test_a_secret_written_by_another_gateway_after_the_loss_is_used(minimal_config: dict[str, object]) -> None:
    store, config = LossyStore(), parse(minimal_config, {}).config
    await store.start()
    salt = Salt(config, store)
    first = await salt()
    store.lost += 1
    assert await store.secret(NAME, b"another") == b"another" != first
    assert await salt() == b"another"
    await store.aclose()


async def test_a_configured_salt_key_is_used(minimal_config: dict[str, object]) -> None:
    store = LossyStore()
    assert await Salt(
        parse({**minimal_config, "unisono": {"salt_key": "salt-of-this-gateway"}}, {}).config, store
    )() == (b"salt-of-this-gateway")
