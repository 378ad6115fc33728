"""Search engine that uses the JSON interface of a SearXNG instance."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import aiohttp

from unisono.toolservers.browser.page_sources import SearchResult
from unisono.toolservers.browser.visited_pages import BrowsingError

ANSWER_BYTES: Final = 4 * 1024 * 1024
ANSWER_S: Final = 20.0
MAX_FIELD_LENGTH: Final = 4096


class SearxNG:
    """Search engine of a SearXNG instance.

    `base` is configured by the operator, so its address is not restricted. Redirects are not followed.
    """

    name = "web"

    def __init__(self, base: str) -> None:
        self._url = base.rstrip("/") + "/search"
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: str, most: int) -> list[SearchResult]:
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._query(query)
        except TimeoutError:
            raise BrowsingError(f"the search engine did not answer within {ANSWER_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BrowsingError(f"the search engine cannot be reached: {str(error)[:300]}") from None
        results = [result for entry in found if (result := _result(entry)) is not None]
        return results[:most]

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _query(self, query: str) -> list[Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        parameters = {"q": query, "format": "json"}
        async with self._session.get(self._url, params=parameters, allow_redirects=False) as answer:
            if answer.status == 403:
                raise BrowsingError(
                    "the search engine answered with HTTP status 403; SearXNG needs `json` in `search.formats`"
                )
            if answer.status != 200:
                raise BrowsingError(f"the search engine answered with HTTP status {answer.status}")
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > ANSWER_BYTES:
                    raise BrowsingError(f"the search engine's answer has more than {ANSWER_BYTES:,} bytes")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise BrowsingError("the search engine's answer is not JSON") from None
        results = found.get("results") if isinstance(found, dict) else None
        if not isinstance(results, list):
            raise BrowsingError("the search engine's answer has no `results` list")
        return results


def _result(entry: Any) -> SearchResult | None:
    """Convert one result, or return None if it is invalid."""
    if not isinstance(entry, dict):
        return None
    url, title, content = entry.get("url"), entry.get("title"), entry.get("content")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")) or len(url) > MAX_FIELD_LENGTH:
        return None
    return SearchResult(url, title if isinstance(title, str) else "", content if isinstance(content, str) else "")
