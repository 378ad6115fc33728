"""Responses with one JSON body. Event streams are in `sse`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def to_whole(body: Mapping[str, Any], headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Return the response; the values of `body` are plain JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
