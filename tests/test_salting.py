"""The gateway's secret: configured, or kept by the store, which may lose it."""

from __future__ import annotations

import pytest

from unisono.bootstrap.salt import BYTES, NAME, Salt
from unisono.config import parse
from unisono.store.sqlite import SqliteStore


class Losing(SqliteStore):
    """A store that can lose its secrets, as a server without a disk does when it is started again."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lost = 0

    async def secret(self, name: str, candidate: bytes) -> bytes:
        return await super().secret(f"{name}-{self.lost}", candidate)


@pytest.fixture
def nothing() -> dict[str, object]:
    return {"model_list": [{"model_name": "m", "litellm_params": {"model": "vllm/a"}}]}


async def test_a_store_that_lost_the_secret_gets_it_back(nothing: dict[str, object]) -> None:
    store, config = Losing(), parse(nothing, {}).config
    await store.start()
    here, elsewhere = Salt(config, store), Salt(config, store)
    first = await here()
    assert len(first) == BYTES
    assert await elsewhere() == first
    store.lost += 1
    assert await here() == await elsewhere() == first
    await store.aclose()


async def test_a_new_secret_somebody_made_before_counts_for_all(nothing: dict[str, object]) -> None:
    store, config = Losing(), parse(nothing, {}).config
    await store.start()
    salt = Salt(config, store)
    first = await salt()
    store.lost += 1
    assert await store.secret(NAME, b"another") == b"another" != first
    assert await salt() == b"another"
    await store.aclose()


async def test_a_configured_one_is_it(nothing: dict[str, object]) -> None:
    store = Losing()
    assert await Salt(parse({**nothing, "unisono": {"salt_key": "salt-of-this-gateway"}}, {}).config, store)() == (
        b"salt-of-this-gateway"
    )
