"""Implementation of `GenerationService`: starts a generation stream for each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unisono.engine.deps import EngineDeps
from unisono.engine.generation import HarmonyGeneration
from unisono.engine.raw import RawGeneration, to_prompt
from unisono.engine.request import GenerationRequest, GenerationStream


class Engine:
    """Entry point of the engine.

    The engine has no state except the caches in `deps`. If `deps.tools` is None, requests with server tools are
    refused. `salt_of` returns the cache salt for a tenant. Backends share cached prompts only between requests with the
    same salt.
    """

    def __init__(self, deps: EngineDeps, *, salt_of: Callable[[str], str] = lambda tenant: "") -> None:
        self._deps = deps
        self._salt_of = salt_of

    def start(self, request: GenerationRequest) -> GenerationStream:
        """Return a stream for the request, with the tenant's cache salt."""
        if salt := self._salt_of(request.origin.tenant):
            request = request.with_options(routing=replace(request.routing, cache_salt=salt))
        if request.raw is None:
            return HarmonyGeneration(self._deps, request)
        return RawGeneration(self._deps.encoding, self._deps.pool, request, request.raw)

    async def count(self, request: GenerationRequest) -> int:
        if request.raw is not None:
            return len(await to_prompt(self._deps.encoding, request.raw, request.prompt.fields.conversation))
        return await self._deps.count(request, self._salt_of(request.origin.tenant))
