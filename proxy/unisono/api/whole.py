"""An answer that comes whole: one JSON body. `sse` is for those that come in events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def to_whole(body: Mapping[str, Any], headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """`body` as it is sent; its values are plain JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
