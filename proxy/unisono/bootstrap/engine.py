"""Construction of the engine. Part of the composition root."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex
from time import thread_time
from typing import TYPE_CHECKING

from unisono import schemas
from unisono.bootstrap.salt import cache_salts
from unisono.core.conversation import TextGrammar
from unisono.core.ports import Schema
from unisono.core.tool_host import ToolHost
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.errors import InvalidRequest
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.routing.pool import RoutingPool

if TYPE_CHECKING:
    from unisono.bootstrap.gateway import Parts


def build_engine(
    pool: RoutingPool,
    tools: ToolHost | None = None,
    parts: Parts | None = None,
    salt_of: Callable[[str], str] | None = None,
    *,
    library_parser: bool = False,
) -> Engine:
    """Build the engine, and load the vocabulary that is part of the package.

    Without `parts`, the engine gets a renderer and a conversation cache of its own. `salt_of` returns the cache salt of
    a tenant; by default all tenants share prompt caches. `library_parser` selects openai-harmony's parser.
    """
    encoding = load_encoding().with_library_parser() if library_parser else load_encoding()
    return Engine(
        EngineDeps(
            encoding=encoding,
            renderer=Renderer(encoding) if parts is None else parts.renderer,
            pool=pool,
            memory=ConversationCache() if parts is None else parts.memory,
            new_call_id=lambda: f"call_{token_hex(12)}",
            tools=tools,
            violation=violation,
            log_left_out=None if parts is None else parts.server_tools.value.log_left_out,
        ),
        salt_of=salt_of or cache_salts(shared=True),
    )


def violation(schema: Schema | TextGrammar, text: str) -> str | None:
    """Describe how a text violates a schema or a grammar; None if there is no violation.

    Returns None for every text if the schema is not supported. For strict tools and answer formats, the gateway rejects
    requests with unsupported schemas. For other tools, the schema is not guaranteed.
    """
    try:
        if not isinstance(schema, TextGrammar):
            schemas.check(schema, "schema")
    except InvalidRequest:
        return None
    return schemas.violation(schema, text, thread_time)
