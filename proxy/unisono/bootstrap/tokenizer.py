"""Construction of the object that counts and splits tokens for the tokenizer routes."""

from __future__ import annotations

from unisono.access.model_access import allowed_model
from unisono.api.chat.routes import ChatRoute
from unisono.api.tokenizer import Tokenizer
from unisono.config import ModelRegistry
from unisono.core.access import Caller
from unisono.errors import UnsupportedValue
from unisono.harmony.encoding import load_encoding
from unisono.routing.pool import RoutingPool


def build_tokenizer(catalogue: ModelRegistry, pool: RoutingPool, chat: ChatRoute) -> Tokenizer:
    encoding = load_encoding()

    def check_model(name: str, caller: Caller) -> int | None:
        model = allowed_model(catalogue, name, caller)
        if not any(entry.harmony for entry in model.entries):
            raise UnsupportedValue(
                f"'model': the gateway has no vocabulary for `{name[:64]}`; send the request to the server of this "
                "model.",
                param="model",
            )
        return pool.context(model.name)

    return Tokenizer(check_model, chat.count, encoding.encode_as_server, encoding.decode)
