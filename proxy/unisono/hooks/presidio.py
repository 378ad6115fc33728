"""Hook that blocks or masks personal data, with a Presidio service that finds the data.

The service has two parts: the analyzer finds entities, and the anonymizer masks them. Both have an HTTP API:
https://microsoft.github.io/presidio/api-docs/api-docs.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import orjson

from unisono.core.lru_cache import RecentEntries
from unisono.errors import ConfigError
from unisono.hooks.text_guardrail import BLOCK, MASK, Blocked, TextGuardrail, without_surrogates

# Maximum size of an answer from the service, in bytes.
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
# Limits of the cache of analyzed texts. It is useful because every turn of a conversation sends all earlier texts
# again.
MAX_CACHED_TEXTS: Final = 2_000
MAX_CACHED_CHARACTERS: Final = 20_000


class Presidio(TextGuardrail):
    """Guardrail that searches texts for personal data.

    The options are `analyzer`, `anonymizer`, `language`, `score_threshold`, `entities` and `where`. `entities` maps
    names of entities to BLOCK or MASK; without it, all entities are masked.
    """

    # If the texts of a long conversation were checked one after another, the hook would exceed its time limit.
    CHECKS_AT_ONCE = 16

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__(options)
        self._analyzer = _address(options, "analyzer")
        self._anonymizer = _address(options, "anonymizer") if options.get("anonymizer") is not None else None
        self._language = str(options.get("language", "en"))
        self._threshold = options.get("score_threshold")
        entities = options.get("entities") or {}
        if not isinstance(entities, Mapping) or any(action not in (BLOCK, MASK) for action in entities.values()):
            raise ConfigError(f"entities: must map names of entities to {BLOCK} or {MASK}")
        self._actions = {str(name): str(action) for name, action in entities.items()}
        if self._anonymizer is None and (not self._actions or MASK in self._actions.values()):
            raise ConfigError("anonymizer: is missing; set its address, or give all `entities` the action BLOCK")
        self._session: aiohttp.ClientSession | None = None
        # Masked texts by original text, the least recently used first.
        self._cache: RecentEntries[str, str] = RecentEntries(MAX_CACHED_TEXTS)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def checked_text(self, text: str, subject: str, field: str | None = None) -> str:
        """Return the text with masked entities.

        Raises Blocked if the text contains an entity with the action BLOCK, aiohttp.ClientError if the service cannot
        be reached, and ValueError for an invalid answer of the service.
        """
        if not text.strip():
            return text
        if text in self._cache:
            self._cache.move_to_end(text)
            return self._cache[text]
        searched = without_surrogates(text)
        found = await self._analyze(searched)
        blocked = sorted({each["entity_type"] for each in found if self._actions.get(each["entity_type"]) == BLOCK})
        if blocked:
            raise Blocked(f"The {subject} contains blocked content: {', '.join(blocked)}.", param=field)
        new = await self._masked(searched, found) if found else text
        if len(text) <= MAX_CACHED_CHARACTERS:
            self._cache.put(text, new)
        return new

    async def _analyze(self, text: str) -> list[dict[str, Any]]:
        body: dict[str, Any] = {"text": text, "language": self._language}
        if self._actions:
            body["entities"] = [*self._actions]
        if self._threshold is not None:
            body["score_threshold"] = self._threshold
        found = await self._post(f"{self._analyzer}/analyze", body)
        if not isinstance(found, list) or not all(isinstance(each, dict) and "entity_type" in each for each in found):
            raise ValueError("the analyzer's answer is not a list of entities")
        # Some versions also return entities that the request excludes.
        return [each for each in found if not self._actions or each["entity_type"] in self._actions]

    async def _masked(self, text: str, found: list[dict[str, Any]]) -> str:
        masked = await self._post(f"{self._anonymizer}/anonymize", {"text": text, "analyzer_results": found})
        if not isinstance(masked, dict) or not isinstance(masked.get("text"), str):
            raise ValueError("the anonymizer's answer has no text")  # noqa: TRY004 - a fault of the service
        return str(masked["text"])

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        """Send a POST request and return the parsed JSON of the answer.

        Raises ValueError for an invalid answer.
        """
        if self._session is None:
            # `trust_env` uses the proxy that the environment may name.
            self._session = aiohttp.ClientSession(trust_env=True, connector=aiohttp.TCPConnector(limit=32))
        async with self._session.post(url, json=body, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"{url} answered with status {answer.status}")
            content = await answer.content.read(MAX_ANSWER_BYTES + 1)
            while len(content) <= MAX_ANSWER_BYTES and not answer.content.at_eof():
                content += await answer.content.read(MAX_ANSWER_BYTES + 1 - len(content))
            if len(content) > MAX_ANSWER_BYTES:
                raise ValueError(f"the answer of {url} has more than {MAX_ANSWER_BYTES:,} bytes")
            return orjson.loads(content)


def _address(options: Mapping[str, object], key: str) -> str:
    value = options.get(key)
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise ConfigError(f"{key}: must be an address that begins with http:// or https://")
    return value.rstrip("/")
