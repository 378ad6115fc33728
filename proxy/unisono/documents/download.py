"""Download of files from the hosts that the operator allows.

The SSRF guard checks every URL, including those of redirects. Connections use only the addresses that the guard
returned.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin

from unisono.core.input_files import InputFile
from unisono.net.ssrf_guard import (
    DestinationNotAllowed,
    DialTarget,
    ResolvedAddress,
    SsrfGuard,
    checked_sockets,
    resolved,
)

if TYPE_CHECKING:
    import aiohttp

REDIRECTS: Final = 3
REDIRECTING: Final = frozenset({301, 302, 303, 307, 308})
CONNECT_S: Final = 8.0
USER_AGENT: Final = "unisono"


class DownloadFailed(Exception):
    """A file was not downloaded. The message is the reason, for the client.

    `is_forbidden` is True if the URL is not allowed.
    """

    def __init__(self, reason: str, *, is_forbidden: bool = False) -> None:
        super().__init__(reason)
        self.is_forbidden = is_forbidden


class Downloader:
    """Reader of files at URLs.

    A file may have at most `max_bytes` bytes, and its download may take at most `timeout_s` seconds.
    """

    def __init__(self, guard: SsrfGuard, max_bytes: int, timeout_s: float) -> None:
        self._guard = guard
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def download(self, url: str, name: str) -> InputFile:
        """Return the file at `url` under the name `name`.

        Raises DownloadFailed if it cannot be downloaded.
        """
        import aiohttp

        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, name)
        except TimeoutError:
            raise DownloadFailed(f"the file was not downloaded within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, OSError, ValueError):
            # The exact reason is not reported, because it could reveal hosts in the operator's network.
            raise DownloadFailed("the file cannot be downloaded") from None

    async def _follow(self, url: str, name: str) -> InputFile:
        for _ in range(REDIRECTS + 1):
            try:
                target = await self._guard.check(url)
            except DestinationNotAllowed:
                raise DownloadFailed(
                    "this URL is not allowed; send the content of the file, or ask the operator", is_forbidden=True
                ) from None
            async with _opened(target) as answer:
                location = answer.headers.get("location")
                if answer.status not in REDIRECTING or not location:
                    return await self._file(name, answer)
            url = urljoin(target.url, location)
        raise DownloadFailed(f"the URL redirects more than {REDIRECTS} times")

    async def _file(self, name: str, answer: aiohttp.ClientResponse) -> InputFile:
        if answer.status != 200:
            raise DownloadFailed(f"the server of the file answered with HTTP status {answer.status}")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise DownloadFailed("the server sent the file compressed although compression was not requested")
        data = bytearray()
        async for chunk in answer.content.iter_chunked(65_536):
            data += chunk
            if len(data) > self._max_bytes:
                raise DownloadFailed(f"the file is larger than {self._max_bytes:,} bytes")
        declared = answer.headers.get("content-type", "").split(";")[0].strip().lower()
        return InputFile(name, declared, _charset(answer), bytes(data))


def _charset(answer: aiohttp.ClientResponse) -> str:
    try:
        return answer.charset or ""
    except (ValueError, RuntimeError):
        return ""


@asynccontextmanager
async def _opened(target: DialTarget) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a GET request to the checked addresses of a target and yield the answer.

    The request uses no proxy and no cookies. The answer is not decompressed.
    """
    import aiohttp
    from aiohttp.abc import AbstractResolver

    class CheckedAddresses(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolvedAddress]:
            return resolved(host, port, target.addresses)

        async def close(self) -> None:
            """Do nothing: no resources are open."""

    sockets = checked_sockets(target.addresses.__contains__, "the SSRF guard did not check this address")
    connector = aiohttp.TCPConnector(
        resolver=CheckedAddresses(), use_dns_cache=False, force_close=True, socket_factory=sockets
    )
    async with (
        aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
            auto_decompress=False,
        ) as session,
        session.get(target.url, allow_redirects=False) as answer,
    ):
        yield answer
