"""Routes that need no FastAPI: generation, list of models, health, metrics, start page."""

from __future__ import annotations

from starlette.routing import BaseRoute

from unisono.api.chat.routes import CHAT
from unisono.api.completions.routes import COMPLETIONS
from unisono.api.health import HEALTH
from unisono.api.messages.routes import MESSAGES
from unisono.api.metrics import METRICS
from unisono.api.models import MODELS
from unisono.api.modes.routes import OTHER_MODES, RERANK_V2
from unisono.api.responses.routes import OPEN_RESPONSES_ROUTES, RESPONSES
from unisono.web.files import PAGE

_TABLES = (
    *(CHAT, RESPONSES, MESSAGES, COMPLETIONS, OTHER_MODES, RERANK_V2, OPEN_RESPONSES_ROUTES),
    *(MODELS, METRICS, HEALTH, PAGE),
)
DIRECT_ROUTES: tuple[BaseRoute, ...] = tuple(route for table in _TABLES for route in table.routes)
