"""The Messages API over HTTP with a scripted generation service."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from tests.api.asgi import Exchange, mount
from unisono.access.keys import NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.fastapi_app import register
from unisono.api.messages.error_format import ERROR_FORMATS
from unisono.api.messages.inbound import MessagesModel
from unisono.api.messages.routes import MESSAGES, MessagesDeps
from unisono.api.sealing import Sealer
from unisono.core.access import Caller
from unisono.engine.request import GenerationService
from unisono.errors import UnknownModel

SEALER = Sealer(b"a salt")
MODELS = {
    "gpt-oss-20b": MessagesModel("gpt-oss-20b"),
    "claude-sonnet-5": MessagesModel("gpt-oss-20b"),
    "quiet": MessagesModel("gpt-oss-20b", show_reasoning=False),
    "early": MessagesModel("gpt-oss-20b", stream_tool_arguments=True),
}


def resolve(name: str, _: Caller) -> MessagesModel:
    if name not in MODELS:
        raise UnknownModel(f"There is no model '{name}'.", param="model")
    return MODELS[name]


async def seals() -> Sealer:
    return SEALER


def gateway(service: GenerationService, *, keep_alive_s: float = 10.0) -> FastAPI:
    ids = iter(range(1000))
    app = FastAPI(
        docs_url=None,
        openapi_url=None,
        middleware=asgi_layers(
            authenticate=NoKeys().identify, keyless=True, new_id=lambda: str(next(ids)), formats=ERROR_FORMATS
        ),
    )
    register(app)
    deps = MessagesDeps(
        service=service,
        resolve=resolve,
        seals=seals,
        today=lambda: "2026-11-20",
        new_id=lambda: "abc",
        clock=lambda: 1700000000.7,
        keep_alive_s=keep_alive_s,
    )
    mount(app, MESSAGES.routes, deps)
    return app


def request(
    service: GenerationService, *, path: str = "/v1/messages", keep_alive_s: float = 10.0, **fields: Any
) -> Exchange:
    body = {"model": "gpt-oss-20b", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]} | fields
    return Exchange(gateway(service, keep_alive_s=keep_alive_s), "POST", path, json=body)
