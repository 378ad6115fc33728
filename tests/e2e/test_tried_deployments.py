"""Errors of backends name the deployments that were tried, for the operator and for nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import FakeVllm, VllmScript, close_at
from unisono.harmony.encoding import load_encoding

TOKENS = load_encoding().encode_marked("<|channel|>final<|message|>One two three four five six.<|return|>")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500}
SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 50},
}


@pytest.mark.parametrize("path", SURFACES)
async def test_an_error_within_a_stream_names_the_attempts_to_the_operator(path: str, tmp_path: Path) -> None:
    """The head and a part of the answer are sent, so that only an event can carry the error."""
    async with FakeVllm() as fake:
        fake.script = lambda body: VllmScript(tokens=TOKENS, faults=(close_at(8),))
        config = config_of(f"vllm@{fake.url}", router_settings={"num_retries": 0})
        config["model_list"][0]["unisono"] = {"failover": False}
        config["unisono"] = {"raw_completions": True}
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(raw=True)
            sent = json.dumps({"model": "gpt-oss", "stream": True, **SURFACES[path]}).encode()
            texts = {}
            for name, secret in (("operator", MASTER), ("client", key)):
                answer = await running.post(path, sent, **bearing(secret))
                assert answer.status == 200
                texts[name] = json.dumps(answer.events[-1])
    assert "Tried: vllm-1 (backend_" in texts["operator"]
    assert "Tried" not in texts["client"]
    assert "error" in texts["client"]
