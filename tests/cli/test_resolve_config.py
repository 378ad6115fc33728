"""Without a configuration: what is found is served, else the demo model, else a recording, and it is said which."""

from __future__ import annotations

import pytest

from unisono.app import build
from unisono.cli.discover import DiscoveredBackend
from unisono.cli.resolve_config import demo_missing, without_config
from unisono.config import ModelRegistry
from unisono.errors import UnknownModel

VLLM = DiscoveredBackend("vllm", "openai/gpt-oss-120b", "http://127.0.0.1:8000")
MLX = DiscoveredBackend("mlx_server", "/models/gpt-oss-20b-MXFP4-Q8", "http://127.0.0.1:8080")
MISSING = "the demo model needs mlx: pip install 'unisono[demo]'"


def test_what_is_found_is_served_under_its_short_name() -> None:
    ready = without_config([VLLM, MLX], None, {})
    assert [entry.model_name for entry in ready.loaded.config.model_list] == ["gpt-oss-120b", "gpt-oss-20b-MXFP4-Q8"]
    assert ready.remarks == (
        "No configuration given; found vllm at http://127.0.0.1:8000 serving gpt-oss-120b.",
        "No configuration given; found mlx_server at http://127.0.0.1:8080 serving gpt-oss-20b-MXFP4-Q8.",
    )


def test_two_servers_of_one_model_share_its_load() -> None:
    ready = without_config([VLLM, DiscoveredBackend("mlx_server", "gpt-oss-120b", MLX.api_base)], None, {})
    (model,) = ModelRegistry(ready.loaded.config).groups()
    assert len(model.entries) == 2


@pytest.mark.parametrize(
    ("missing", "kind"), [(None, "mlx"), (MISSING, "replay")], ids=["the demo model", "only a recording"]
)
def test_with_nothing_found_a_demo_is_served_and_called_one(missing: str | None, kind: str) -> None:
    ready = without_config([], missing, {})
    (entry,) = ready.loaded.config.model_list
    assert (entry.kind, entry.backend_model, entry.harmony) == (kind, "demo", True)
    assert ready.loaded.warnings == ()
    said = " ".join(ready.remarks)
    assert "No configuration given and no gpt-oss backend found" in said
    assert (MISSING in said) is (missing is not None)


@pytest.mark.parametrize(("found", "mode"), [([VLLM], "off"), ([], "all")], ids=["a model of somebody's", "the demo"])
def test_only_a_demo_is_recorded_unasked(found: list[DiscoveredBackend], mode: str) -> None:
    ready = without_config(found, None, {})
    assert ready.loaded.config.unisono.traces.mode == mode
    assert any("recorded" in remark for remark in ready.remarks) is (mode == "all")


@pytest.mark.parametrize("found", [[VLLM, MLX], []], ids=["found", "demo"])
@pytest.mark.parametrize("missing", [None, MISSING], ids=["with the demo", "without it"])
def test_every_outcome_can_be_built(found: list[DiscoveredBackend], missing: str | None) -> None:
    build(without_config(found, missing, {}).loaded.config)


def test_a_backend_on_this_machine_answers_to_any_model_name() -> None:
    catalogue = ModelRegistry(without_config([VLLM, MLX], None, {}).loaded.config)
    assert catalogue.resolve("gpt-4o").name == "gpt-oss-120b"


@pytest.mark.parametrize("missing", [None, MISSING], ids=["the demo model", "only a recording"])
@pytest.mark.parametrize("requested", ["gpt-4o", "gpt-oss-120b", "", None])
def test_a_demo_answers_only_to_its_own_name(missing: str | None, requested: str | None) -> None:
    catalogue = ModelRegistry(without_config([], missing, {}).loaded.config)
    assert catalogue.resolve("gpt-oss-demo").name == "gpt-oss-demo"
    with pytest.raises(UnknownModel):
        catalogue.resolve(requested)


def test_a_key_in_the_environment_is_used() -> None:
    key = without_config([], None, {"UNISONO_MASTER_KEY": "sk-1"}).loaded.config.general_settings.master_key
    assert key is not None
    assert key.get_secret_value() == "sk-1"
    assert without_config([], None, {"UNISONO_MASTER_KEY": ""}).loaded.config.general_settings.master_key is None


def test_the_demo_model_says_what_it_lacks_or_that_it_lacks_nothing() -> None:
    missing = demo_missing()
    assert missing is None or "unisono[demo]" in missing
