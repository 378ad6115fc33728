"""The model list of OpenAI-like servers: which models are served, and how long their context is."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.errors import BackendProtocolError
from unisono_adapters._http import Wire


async def model_list(wire: Wire) -> Mapping[str, int | None]:
    """Context windows in tokens by the server's own names, None where it tells none. Raises the `BackendError`
    family."""
    listed = await wire.get_json("v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list):
        raise BackendProtocolError("the backend's model list is not one")
    lengths: dict[str, int | None] = {}
    for model in models:
        if isinstance(model, dict) and isinstance(name := model.get("id"), str):
            length = model.get("max_model_len")
            lengths[name] = length if type(length) is int and length > 0 else None
    return lengths
