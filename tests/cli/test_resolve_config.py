"""Settings without a configuration file: found backends, else a demo model or recording."""

from __future__ import annotations

import pytest

from unisono.app import build
from unisono.cli.discover import DiscoveredBackend
from unisono.cli.resolve_config import demo_missing, without_config
from unisono.config import ModelRegistry
from unisono.errors import InvalidRequest

VLLM = DiscoveredBackend("vllm", "openai/gpt-oss-120b", "http://127.0.0.1:8000")
MLX = DiscoveredBackend("mlx_server", "/models/gpt-oss-20b-MXFP4-Q8", "http://127.0.0.1:8080")
MISSING = "the demo model needs mlx: pip install 'unisono[demo]'"


def test_discovered_backends_are_served_under_their_short_names() -> None:
    ready = without_config([VLLM, MLX], None, {})
    assert [entry.model_name for entry in ready.loaded.config.model_list] == ["gpt-oss-120b", "gpt-oss-20b-MXFP4-Q8"]
    assert ready.remarks == (
        "No configuration given; found vllm at http://127.0.0.1:8000 serving gpt-oss-120b.",
        "No configuration given; found mlx_server at http://127.0.0.1:8080 serving gpt-oss-20b-MXFP4-Q8.",
    )


def test_two_servers_of_one_model_form_one_group() -> None:
    ready = without_config([VLLM, DiscoveredBackend("mlx_server", "gpt-oss-120b", MLX.api_base)], None, {})
    (model,) = ModelRegistry(ready.loaded.config).groups()
    assert len(model.entries) == 2


@pytest.mark.parametrize(
    ("missing", "kind"), [(None, "mlx"), (MISSING, "replay")], ids=["the demo model", "only a recording"]
)
def test_without_backends_a_demo_is_served_with_a_remark(missing: str | None, kind: str) -> None:
    ready = without_config([], missing, {})
    (entry,) = ready.loaded.config.model_list
    assert (entry.kind, entry.backend_model, entry.harmony) == (kind, "demo", True)
    assert ready.loaded.warnings == ()
    remarks = " ".join(ready.remarks)
    assert "No configuration given and no gpt-oss backend found" in remarks
    assert (MISSING in remarks) is (missing is not None)


@pytest.mark.parametrize(("found", "mode"), [([VLLM], "off"), ([], "all")], ids=["discovered backend", "demo"])
def test_only_a_demo_is_recorded_by_default(found: list[DiscoveredBackend], mode: str) -> None:
    ready = without_config(found, None, {})
    assert ready.loaded.config.unisono.traces.mode == mode
    assert any("recorded" in remark for remark in ready.remarks) is (mode == "all")


@pytest.mark.parametrize("found", [[VLLM, MLX], []], ids=["found", "demo"])
@pytest.mark.parametrize("missing", [None, MISSING], ids=["demo available", "demo missing"])
def test_an_app_can_be_built_from_every_outcome(found: list[DiscoveredBackend], missing: str | None) -> None:
    build(without_config(found, missing, {}).loaded.config)


def test_a_discovered_backend_answers_to_any_model_name() -> None:
    registry = ModelRegistry(without_config([VLLM, MLX], None, {}).loaded.config)
    assert registry.resolve("gpt-4o").name == "gpt-oss-120b"


@pytest.mark.parametrize("missing", [None, MISSING], ids=["the demo model", "only a recording"])
@pytest.mark.parametrize("requested", ["gpt-4o", "gpt-oss-120b", "", None])
def test_a_demo_answers_only_to_its_own_name(missing: str | None, requested: str | None) -> None:
    registry = ModelRegistry(without_config([], missing, {}).loaded.config)
    assert registry.resolve("gpt-oss-demo").name == "gpt-oss-demo"
    with pytest.raises(InvalidRequest):
        registry.resolve(requested)


def test_the_master_key_of_the_environment_is_used() -> None:
    key = without_config([], None, {"UNISONO_MASTER_KEY": "sk-1"}).loaded.config.general_settings.master_key
    assert key is not None
    assert key.get_secret_value() == "sk-1"
    assert without_config([], None, {"UNISONO_MASTER_KEY": ""}).loaded.config.general_settings.master_key is None


def test_a_missing_demo_model_is_reported_with_its_package_name() -> None:
    missing = demo_missing()
    assert missing is None or "mlx-lm" in missing
