"""Routes that are imported at startup: Chat, models, metrics, health and the web page."""

from __future__ import annotations

from starlette.routing import BaseRoute

from unisono.api.chat.routes import CHAT
from unisono.api.health import HEALTH
from unisono.api.metrics import METRICS
from unisono.api.models import MODELS
from unisono.web.files import PAGE

DIRECT_ROUTES: tuple[BaseRoute, ...] = tuple(
    route for table in (CHAT, MODELS, METRICS, HEALTH, PAGE) for route in table.routes
)
