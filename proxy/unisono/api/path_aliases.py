"""Layer that maps paths of Azure and of older OpenAI clients to the paths of the gateway.

A model in such a path replaces the `model` in the body, as in Azure's API. The query, for example `api-version`, has no
effect.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

# Prefixes of paths that continue with a model and an operation.
WITH_MODEL: Final = ("/openai/deployments/", "/v1/engines/", "/engines/")
# Operations that may follow the model. The longest match is used, because the name of a model may contain slashes.
OPERATIONS: Final = tuple(
    sorted(
        (
            *("chat/completions", "completions", "embeddings", "rerank", "score", "moderations"),
            *("images/generations", "audio/speech", "audio/transcriptions", "audio/translations"),
        ),
        key=len,
        reverse=True,
    )
)
# Prefixes that are replaced by `/v1/`, longest first.
WITHOUT_MODEL: Final = ("/openai/v1/", "/openai/")
# Key of the model in the state of a request.
PATH_MODEL: Final = "path_model"


class PathAliases:
    """Layer that replaces the path of a request before all other layers read the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in ("http", "websocket"):
            path, model = resolved(scope["path"])
            if path != scope["path"]:
                state = scope.get("state", {})
                scope = {**scope, "path": path, "raw_path": path.encode(), "state": {**state, PATH_MODEL: model}}
        return self._app(scope, receive, send)


def resolved(path: str) -> tuple[str, str]:
    """Return the gateway's path for `path`, and the model that `path` names, or ""."""
    # Nearly all paths are the gateway's own.
    if not path.startswith(("/openai/", "/v1/engines/", "/engines/")):
        return path, ""
    for beginning in WITH_MODEL:
        if path.startswith(beginning):
            rest = path.removeprefix(beginning)
            for operation in OPERATIONS:
                model = rest.removesuffix(f"/{operation}")
                if model and model != rest:
                    return f"/v1/{operation}", model
            return path, ""
    beginning = next(each for each in WITHOUT_MODEL if path.startswith(each))
    return f"/v1/{path.removeprefix(beginning)}", ""
