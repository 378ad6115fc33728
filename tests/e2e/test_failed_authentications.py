"""Requests with invalid keys are limited by client address."""

from __future__ import annotations

import aiohttp
import pytest

from tests.e2e.administered import AdminClient, administered
from tests.e2e.keyed import MASTER

LIMITED = {"failed_authentication": {"max_per_minute": 5, "trusted_proxies": ["127.0.0.1"]}}


async def status(admin: AdminClient, key: str, address: str = "") -> tuple[int, str | None, str]:
    headers = {"x-forwarded-for": address} if address else {}
    answer = await admin.gateway.get("/v1/models", authorization=f"Bearer {key}", **headers)
    code = answer.body["error"]["code"] if answer.status >= 400 else ""
    return answer.status, answer.headers.get("retry-after"), code


async def test_an_address_that_guesses_is_refused_and_others_are_not(store_address: str) -> None:
    async with administered(store_address, unisono=LIMITED) as admin:
        key = (await admin.made("/key/generate"))["key"]
        assert (await status(admin, key, "9.9.9.9"))[0] == 200
        for number in range(5):
            assert (await status(admin, f"sk-guess-{number}", "9.9.9.9"))[0] == 401
        refused = await status(admin, "sk-guess", "9.9.9.9")
        assert refused[0] == 429
        assert refused[2] == "too_many_failed_authentications"
        assert 0 < int(refused[1] or 0) <= 60
        # Even the right key is refused if it is new at this address: a guess learns nothing.
        assert (await status(admin, MASTER, "9.9.9.9"))[0] == 429
        # Whoever used a valid key before at this address, and everybody elsewhere, is served.
        assert (await status(admin, key, "9.9.9.9"))[0] == 200
        assert (await status(admin, MASTER, "8.8.8.8"))[0] == 200
        assert (await status(admin, "sk-guess", "8.8.8.8"))[0] == 401
        # The client cannot choose its address: the proxy adds it at the end.
        assert (await status(admin, "sk-guess", "7.7.7.7, 9.9.9.9"))[0] == 429
        assert (await admin.gateway.get("/health/liveliness")).status == 200
        with pytest.raises(aiohttp.WSServerHandshakeError) as handshake:
            await admin.gateway.session.ws_connect(
                f"{admin.gateway.url}/v1/responses",
                headers={"authorization": "Bearer sk-guess", "x-forwarded-for": "9.9.9.9"},
            )
        assert handshake.value.status == 429


@pytest.mark.parametrize(("believed", "shared"), [(True, False), (False, True)])
async def test_the_trusted_proxies_of_the_gateway_name_the_client(believed: bool, shared: bool) -> None:
    proxies = {"use_x_forwarded_for": believed, "trusted_proxy_ranges": ["127.0.0.1"]}
    limited = {"failed_authentication": {"max_per_minute": 1}}
    async with administered("memory://", general_settings=proxies, unisono=limited) as admin:
        assert (await status(admin, "sk-guess", "9.9.9.9"))[0] == 401
        assert (await status(admin, "sk-guess", "9.9.9.9"))[0] == 429
        assert (await status(admin, "sk-guess", "8.8.8.8"))[0] == (429 if shared else 401)


async def test_requests_without_a_key_are_not_counted(store_address: str) -> None:
    async with administered(store_address, unisono=LIMITED) as admin:
        for _ in range(10):
            assert (await admin.gateway.get("/v1/models")).status == 401
        assert (await status(admin, "sk-guess"))[0] == 401
