"""Every secret of a configuration is known to the redaction of logs."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.config import parse
from unisono.observe.redaction import REDACTED, Secrets, secrets_of

SECRET = "k-3f9a71c2d8"
MODEL: dict[str, Any] = {"model": "vllm/gpt-oss", "api_base": "http://127.0.0.1:8000"}


def model_list(params: dict[str, Any] | None = None, **unisono: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"model_name": "gpt-oss", "litellm_params": {**MODEL, **(params or {})}, "unisono": unisono}
    return {"model_list": [entry]}


CONFIGS: dict[str, dict[str, Any]] = {
    "api_key": model_list({"api_key": SECRET}),
    "api_base": model_list({"api_base": f"http://127.0.0.1:8000/v1?key={SECRET}"}),
    "wake.url": model_list(wake={"url": f"http://10.0.0.2:9000/wake?token={SECRET}"}),
    "otel.endpoint": {"unisono": {"otel": {"endpoint": f"http://127.0.0.1:4318/v1/traces?key={SECRET}"}}},
    "otel.metrics_endpoint": {
        "unisono": {"otel": {"metrics_endpoint": f"http://127.0.0.1:4318/v1/metrics?key={SECRET}"}}
    },
    "otel.headers": {"unisono": {"otel": {"endpoint": "http://127.0.0.1:4318/v1/traces", "headers": {"x-k": SECRET}}}},
    "webhook.url": {"unisono": {"alerts": {"webhook": {"url": f"https://hooks.example.com/a?key={SECRET}"}}}},
    "webhook.secret": {"unisono": {"alerts": {"webhook": {"url": "https://hooks.example.com/a", "secret": SECRET}}}},
    "webhook.headers": {
        "unisono": {"alerts": {"webhook": {"url": "https://hooks.example.com/a", "headers": {"x-k": SECRET}}}}
    },
    "mcp env": {"mcp_servers": {"files": {"transport": "stdio", "command": "files", "env": {"TOKEN": SECRET}}}},
    "mcp headers": {"mcp_servers": {"web": {"url": "https://mcp.example.com", "static_headers": {"x-k": SECRET}}}},
    "store.url": {"store": {"url": f"redis://:{SECRET}@127.0.0.1:6379/0"}},
}


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_secrets_of_every_section_are_redacted(fields: dict[str, Any]) -> None:
    config = parse({**model_list(), **fields}, {}).config
    assert Secrets(secrets_of(config)).redact(f"failed: {SECRET}") == f"failed: {REDACTED}"


def test_path_of_a_webhook_is_redacted() -> None:
    url = f"https://hooks.example.com/services/{SECRET}"
    config = parse({**model_list(), "unisono": {"alerts": {"webhook": {"url": url}}}}, {}).config
    assert Secrets(secrets_of(config)).redact(f"cannot connect to {url}") == f"cannot connect to {REDACTED}"
