"""Web pages, with limits on scheme, content type, size, time, redirects and addresses.

Names are resolved through the SSRF guard, once per hop. Every socket checks its address again, because the HTTP client
does not resolve hosts that are written as addresses.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import socket
from typing import Final
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver

from unisono.net.ssrf_guard import (
    DestinationNotAllowed,
    NotDialled,
    ResolvedAddress,
    checked_addresses,
    permitted_sockets,
    resolved,
)
from unisono.toolservers.browser.page_sources import Document
from unisono.toolservers.browser.visited_pages import BrowsingError

PAGE_BYTES: Final = 4 * 1024 * 1024
PAGE_S: Final = 20.0
CONNECT_S: Final = 8.0
REDIRECTS: Final = 5
AT_ONCE: Final = 16
MAX_URL_LENGTH: Final = 4096
USER_AGENT: Final = "Mozilla/5.0 (compatible; unisono-browser)"

HTML: Final = frozenset({"text/html", "application/xhtml+xml"})
TEXT: Final = re.compile(r"text/.+|application/(json|xml|javascript|x-yaml|yaml|toml|[a-z0-9.-]+\+(json|xml))")
REDIRECTING: Final = frozenset({301, 302, 303, 307, 308})

_CHARSETS_NAMES = """
    utf-8 utf-16 utf-16-le utf-16-be ascii iso8859-1 iso8859-2 iso8859-3 iso8859-4 iso8859-5 iso8859-6 iso8859-7
    iso8859-8 iso8859-9 iso8859-10 iso8859-13 iso8859-14 iso8859-15 iso8859-16 cp1250 cp1251 cp1252 cp1253
    cp1254 cp1255 cp1256 cp1257 cp1258 cp866 cp874 koi8-r koi8-u mac-roman gbk gb2312 gb18030 big5 euc_jp
    shift_jis iso2022_jp euc_kr
"""
# Supported encodings of pages, by their Python names. Python's other codecs are not text encodings, or are too slow.
CHARSETS: Final = frozenset(_CHARSETS_NAMES.split())
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)

NOT_PUBLIC: Final = "it is not on the public Internet"


class _GuardedResolver(AbstractResolver):
    """Resolver of the HTTP client: returns addresses that the SSRF guard checked."""

    def __init__(self, private: bool) -> None:
        self._private = private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolvedAddress]:
        try:
            found = await checked_addresses(host.lower().removesuffix("."), port, private=self._private)
        except (DestinationNotAllowed, UnicodeError):
            raise NotDialled(NOT_PUBLIC) from None
        return resolved(host, port, found)

    async def close(self) -> None:
        """Do nothing: no resources are open."""


class Web:
    """Reader of http and https pages.

    With `private`, addresses in private networks are permitted too, but not those of cloud metadata services.
    """

    def __init__(self, *, private: bool = False, page_bytes: int = PAGE_BYTES, page_s: float = PAGE_S) -> None:
        self._private = private
        self._page_bytes = page_bytes
        self._page_s = page_s
        self._session: aiohttp.ClientSession | None = None

    def reads(self, url: str) -> bool:
        return url[:8].lower().startswith(("http://", "https://"))

    async def read(self, url: str) -> Document:
        try:
            async with asyncio.timeout(self._page_s):
                return await self._follow(url)
        except TimeoutError:
            raise BrowsingError(f"it did not load within {self._page_s:g} s") from None
        except NotDialled as error:
            raise BrowsingError(str(error)) from None
        except aiohttp.ClientConnectorError as error:
            raise BrowsingError(str(error.os_error) or "its server cannot be reached") from None
        except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, OSError, ValueError) as error:
            raise BrowsingError(str(error)[:300] or type(error).__name__) from None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _follow(self, url: str) -> Document:
        for _ in range(REDIRECTS + 1):
            self._judge(url)
            async with self._client().get(url, allow_redirects=False) as answer:
                target = answer.headers.get("location")
                if answer.status not in REDIRECTING or not target:
                    return await self._document(url, answer)
            url = urljoin(url, target)
        raise BrowsingError(f"it redirects more than {REDIRECTS} times")

    def _judge(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme.lower() not in {"http", "https"} or not parts.hostname:
            raise BrowsingError("only http and https URLs can be opened")
        if len(url) > MAX_URL_LENGTH:
            raise BrowsingError(f"the URL has {len(url):,} characters; the limit is {MAX_URL_LENGTH:,}")
        if parts.username is not None or parts.password is not None:
            raise BrowsingError("URLs with a user name are not allowed")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=AT_ONCE,
                    resolver=_GuardedResolver(self._private),
                    use_dns_cache=False,
                    force_close=True,
                    socket_factory=permitted_sockets(NOT_PUBLIC, private=self._private),
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": USER_AGENT, "Accept": "text/html, text/plain;q=0.9, */*;q=0.1"},
                auto_decompress=True,
            )
        return self._session

    async def _document(self, url: str, answer: aiohttp.ClientResponse) -> Document:
        if answer.status >= 400:
            raise BrowsingError(f"HTTP status {answer.status}")
        declared = answer.headers.get("content-type", "").split(";")[0].strip().lower()
        if declared and declared not in HTML and not TEXT.fullmatch(declared):
            raise BrowsingError(f"its content type is `{declared[:80]}`; only text can be read")
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > self._page_bytes:
                del body[self._page_bytes :]
                break
        text = await asyncio.to_thread(_decoded, bytes(body), _charset(answer), declared in HTML)
        is_html = declared in HTML or (not declared and text[:500].lstrip().lower().startswith(("<!doctype", "<html")))
        if not declared and "\x00" in text:
            raise BrowsingError("its content is not text")
        return Document(url, text, is_html)


def _charset(answer: aiohttp.ClientResponse) -> str | None:
    try:
        return answer.charset
    except (ValueError, RuntimeError):
        return None


def _decoded(body: bytes, charset: str | None, is_html: bool) -> str:
    """Decode a page by its byte order mark, `charset` or `<meta>` element, otherwise as UTF-8.

    Invalid bytes become U+FFFD.
    """
    if body.startswith(codecs.BOM_UTF8):
        return body.decode("utf-8-sig", "replace")
    if charset is None and is_html and (found := _META_CHARSET.search(body[:4096])):
        charset = found[1].decode("ascii")
    try:
        name = codecs.lookup(charset or "utf-8").name
    except LookupError:
        name = "utf-8"
    return body.decode(name if name in CHARSETS else "utf-8", "replace")
