"""Implementation of `GenerationService`: starts a generation stream for each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unisono.core.ports import Violation
from unisono.core.route_protocol import DeploymentPool
from unisono.core.tools import ToolHost
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps, LeftOutLog
from unisono.engine.generation import HarmonyGeneration
from unisono.engine.prompt import render
from unisono.engine.raw import RawGeneration, to_prompt
from unisono.engine.request import GenerationReport, GenerationRequest, GenerationStream
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer


class Engine:
    """Entry point of the engine.

    The only state is the bounded cache of stateless conversations. Without `tools`, requests with server tools are
    refused. `violation` describes why a JSON text does not match a schema. Without it, only the JSON syntax is checked.
    `salt_of` returns a tenant's cache salt, which separates its prompts from those of other tenants in backend caches.
    """

    def __init__(
        self,
        *,
        encoding: Encoding,
        renderer: Renderer,
        pool: DeploymentPool,
        memory: ConversationCache,
        new_call_id: Callable[[], str],
        tools: ToolHost | None = None,
        violation: Violation | None = None,
        salt_of: Callable[[str], str] = lambda tenant: "",
        log_left_out: LeftOutLog | None = None,
    ) -> None:
        self._means = EngineDeps(encoding, renderer, pool, memory, new_call_id, tools, violation, log_left_out)
        self._salt_of = salt_of

    def start(self, turn: GenerationRequest) -> GenerationStream:
        """Return a stream for the request, with the tenant's cache salt."""
        if salt := self._salt_of(turn.tenant):
            turn = replace(turn, cache_salt=salt)
        return HarmonyGeneration(self._means, turn) if turn.raw is None else RawGeneration(self._means, turn, turn.raw)

    async def count(self, turn: GenerationRequest) -> int:
        if turn.raw is not None:
            return len(await to_prompt(self._means.encoding, turn.raw, turn.history_at))
        loop = self._means.loop(turn, GenerationReport())
        hosted = None if loop is None else self._means.hosted(turn, await loop.offers())
        prepared = await self._means.prepared(turn, hosted)
        rendered = await render(self._means.renderer, prepared.conversation, prepared.tools, self._salt_of(turn.tenant))
        if loop is None:
            self._means.counted_prompts.record(turn, prepared, rendered)
        return len(rendered.prompt.tokens)
