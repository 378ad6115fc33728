"""All routes of the Responses API, direct ones and those through FastAPI."""

from unisono.api.responses.routes import OPEN_RESPONSES_ROUTES, RESPONSES
from unisono.api.responses.routes.retrieve import STORED_OPEN_RESPONSES, STORED_RESPONSES

TABLES = (RESPONSES, STORED_RESPONSES, OPEN_RESPONSES_ROUTES, STORED_OPEN_RESPONSES)
RESPONSES_ROUTES = tuple(route for table in TABLES for route in table.routes)
