"""Configuration files of LiteLLM start and serve their models, with servers of ours behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.gateway import gateway
from tests.fakes.openai_api import FakeOpenAi
from tests.providers.test_providers import text_of

pytestmark = pytest.mark.filterwarnings("ignore")
FOLDER = Path(__file__).parent.parent / "litellm_files"
KEY = "sk-operator-of-the-files"

GUARDED = {
    "credential_list": [{"credential_name": "box", "credential_values": {"api_key": "sk-of-the-box"}}],
    "guardrails": [
        {
            "guardrail_name": "mails",
            "litellm_params": {
                "guardrail": "litellm_content_filter",
                "mode": "pre_call",
                "default_on": True,
                "patterns": [{"pattern_type": "prebuilt", "pattern_name": "email", "action": "BLOCK"}],
            },
        }
    ],
    "litellm_settings": {"drop_params": True, "num_retries": 1},
    "general_settings": {"master_key": KEY, "allowed_ips": ["127.0.0.1"]},
}


def served(path: Path, url: str, **sections: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a file, with `url` as the address of all models, and the names of the models."""
    raw: dict[str, Any] = yaml.safe_load(path.read_text())
    entries = []
    for entry in raw["model_list"]:
        params = entry["litellm_params"]
        name = str(params["model"]).rpartition("/")[2]
        if "*" in name or "*" in entry["model_name"]:
            continue
        # The provider is replaced by one that the server can stand for; all other settings stay.
        kept = {key: value for key, value in params.items() if not key.startswith(("aws_", "api_", "vertex_"))}
        own = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "sk-x"}
        entries.append({**entry, "litellm_params": {**kept, **own}})
    names = list(dict.fromkeys(entry["model_name"] for entry in entries))
    kept_sections = {key: raw[key] for key in ("litellm_settings", "router_settings") if key in raw}
    return {**kept_sections, "model_list": entries, "store": {"url": "memory://"}, **sections}, names


@pytest.mark.parametrize("name", ["simple", "load_balancer", "model_params", "reliability", "load_balancing"])
@pytest.mark.parametrize("more", [{}, GUARDED], ids=["as it is", "with protective settings"])
async def test_a_file_of_litellm_serves_its_models(name: str, more: dict[str, Any]) -> None:
    async with FakeOpenAi() as fake:
        config, models = served(FOLDER / f"{name}.yaml", fake.url, **more)
        assert models
        async with gateway(config) as running:
            for model in models:
                answer = await running.chat_as(KEY, model=model)
                assert answer.status == 200, (model, answer.raw)
                assert text_of(answer) == "Four."
                if more:
                    blocked = await running.chat_as(
                        KEY, model=model, messages=[{"role": "user", "content": "ann@example.com"}]
                    )
                    assert blocked.status == 400
                    assert (await running.chat(model=model)).status == 401
        assert len(fake.requests) >= len(models)
