"""Example files of LiteLLM load, and settings without effect cause warnings.

The files are data: examples of LiteLLM's documentation and repository (BerriAI/litellm: docs/my-website/docs/proxy and
litellm/proxy/example_config_yaml), which are under the MIT licence, copyright (c) 2023 Berri AI.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from unisono.cli import main
from unisono.config import Config, Loaded, ModelRegistry, imported, load, own_servers, parse
from unisono.config.general_settings import GeneralSettings
from unisono.config.ineffective_settings import PROTECTIVE_IF_FALSE, KeyClass, keys_of
from unisono.config.mcp_settings import McpServerSettings
from unisono.config.model_settings import LitellmParams, ModelEntry, ModelInfo
from unisono.config.root_config import LitellmSettings
from unisono.config.router_settings import RouterSettings
from unisono.core.passthrough_request import AnswerMode, ModelMode
from unisono.errors import ConfigError
from unisono.observe.redaction import secrets_of

FOLDER = Path(__file__).parent / "litellm_files"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
ENV_REFERENCE = re.compile(r"os\.environ/(\w+)")


# Protective settings of the files that Unisono does not support.
PROTECTIVE: dict[str, list[str]] = {
    "guardrails": ["guardrails[0] (aporia)"],
    "providers": ["litellm_settings.default_team_settings"],
    "settings": [
        "litellm_settings.redact_user_api_key_info",
        "general_settings.enable_jwt_auth",
        "general_settings.reject_clientside_metadata_tags",
        "general_settings.allowed_routes",
        "general_settings.custom_auth",
    ],
}


def acknowledged(path: Path) -> dict[str, Any]:
    """Return a file's content with all of its protective settings acknowledged."""
    names = [setting.partition("[")[0].rpartition(".")[2] for setting in PROTECTIVE.get(path.stem, ())]
    raw: dict[str, Any] = yaml.safe_load(path.read_text())
    return {**raw, "unisono": {"acknowledge": names}} if names else raw


def loaded(path: Path) -> Loaded:
    environ = dict.fromkeys(ENV_REFERENCE.findall(path.read_text()), "https://set.example.com")
    return parse(acknowledged(path), environ)


@pytest.mark.parametrize("name", FILES)
def test_an_example_file_of_litellm_loads(name: str) -> None:
    result = loaded(FILES[name])
    assert list(ModelRegistry(result.config).groups())
    for warning in result.warnings:
        assert "https://set.example.com" not in warning


@pytest.mark.parametrize("name", PROTECTIVE)
def test_a_file_with_protective_settings_is_refused_and_all_are_named(name: str) -> None:
    environ = dict.fromkeys(ENV_REFERENCE.findall(FILES[name].read_text()), "https://set.example.com")
    with pytest.raises(ConfigError) as refused:
        load(FILES[name], environ)
    lines = [line.strip() for line in str(refused.value).splitlines()]
    named = [line.partition(":")[0] for line in lines if "unisono.acknowledge" in line]
    assert named == PROTECTIVE[name]


def test_a_fallback_must_be_a_model_of_the_list() -> None:
    raw = acknowledged(FILES["providers"])
    raw["litellm_settings"]["context_window_fallbacks"] = [{"gpt-5-mini": ["gpt-5.5"]}]
    environ = dict.fromkeys(ENV_REFERENCE.findall(FILES["providers"].read_text()), "set")
    with pytest.raises(ConfigError, match=r"unknown model `gpt-5.5`"):
        ModelRegistry(parse(raw, environ).config)


def test_an_embedding_entry_is_served_and_one_of_an_unsupported_mode_is_skipped() -> None:
    result = loaded(FILES["embeddings"])
    assert [(entry.model_name, entry.mode) for entry in result.config.model_list] == [
        ("string", ModelMode.EMBEDDING),
        ("gpt-4o", ModelMode.CHAT),
    ]
    ocr = {"model_name": "reader", "litellm_params": {"model": "mistral/ocr"}, "model_info": {"mode": "ocr"}}
    result = parse({"model_list": [ocr]}, {})
    assert result.config.model_list == ()
    assert "model_list[0].model_info.mode: `ocr` is not supported; the entry is skipped" in result.warnings


def test_provider_parameters_are_passed_to_litellm() -> None:
    [first, second, third, fourth] = loaded(FILES["model_params"]).config.model_list
    assert first.litellm_params.provider == {
        "api_version": "2023-05-15",
        "azure_ad_token": "eyJ0eXAiOiJ",
        "seed": 12,
        "max_tokens": 20,
    }
    assert second.litellm_params.provider == {"temperature": 0.2}
    assert third.litellm_params.provider["extra_headers"] == {"AI-Resource Group": "ishaan-resource"}
    assert (fourth.kind, fourth.by_litellm, fourth.litellm_params.provider) == ("ollama", False, {})


def entry(model: str = "openai/x", **params: Any) -> dict[str, Any]:
    return {"model_list": [{"model_name": "m", "litellm_params": {"model": model, **params}}]}


ENTRY_WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "router setting": (
        entry(tag_regex=["a"]),
        "model_list[0].litellm_params.tag_regex: this LiteLLM setting has no effect in Unisono",
    ),
    "unknown key": (
        entry(own_option="x"),
        "model_list[0].litellm_params.own_option: unknown key `own_option`; it is passed to litellm unchanged",
    ),
    "gpt-oss at a generic endpoint": (
        entry("openai/gpt-oss-20b", api_base="http://h"),
        "model_list[0].litellm_params.model: if api_base is your own server, write the backend kind of the "
        "server instead of `openai`, such as `model: vllm/gpt-oss-20b`; only then does the gateway use Harmony",
    ),
}


SECTIONS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "": lambda key, value: {key: value},
    "model_list[]": lambda key, value: {
        "model_list": [{**entry("vllm/x", api_base="http://h")["model_list"][0], key: value}]
    },
    "model_list[].litellm_params": lambda key, value: entry("vllm/x", api_base="http://h", **{key: value}),
    "model_list[].model_info": lambda key, value: {
        "model_list": [{**entry("vllm/x", api_base="http://h")["model_list"][0], "model_info": {key: value}}]
    },
    "litellm_settings": lambda key, value: {"litellm_settings": {key: value}},
    "general_settings": lambda key, value: {"general_settings": {key: value}},
    "router_settings": lambda key, value: {"router_settings": {key: value}},
    "mcp_servers[]": lambda key, value: {"mcp_servers": {"docs": {"url": "http://x", key: value}}},
}
MODELS: dict[str, type[BaseModel]] = {
    "": Config,
    "model_list[]": ModelEntry,
    "model_list[].litellm_params": LitellmParams,
    "model_list[].model_info": ModelInfo,
    "litellm_settings": LitellmSettings,
    "general_settings": GeneralSettings,
    "router_settings": RouterSettings,
    "mcp_servers[]": McpServerSettings,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_listed_key_is_treated_by_its_class(section: str) -> None:
    keys = keys_of(section)
    assert keys
    for key, kind in keys.items():
        assert key not in MODELS[section].model_fields, "a supported key must not be listed"
        raw = SECTIONS[section](key, key not in PROTECTIVE_IF_FALSE)
        name = f"{section}.{key}".lstrip(".")
        match kind:
            case KeyClass.PROTECTIVE:
                with pytest.raises(ConfigError, match=rf"{key}: this LiteLLM setting protects the gateway"):
                    parse(raw, {})
                given = {**raw, "unisono": {"acknowledge": [key]}}
                [warning] = parse(given, {}).warnings
                assert warning.endswith("not supported, as acknowledged in `unisono.acknowledge`")
                assert parse({**raw, "unisono": {"acknowledge": [name]}}, {}).warnings == (warning,)
            case KeyClass.NOTED:
                [warning] = parse(raw, {}).warnings
                assert warning.endswith(f"{key}: this LiteLLM setting has no effect in Unisono")
            case KeyClass.COSMETIC:
                assert parse(raw, {}).warnings == (f"LiteLLM settings without effect in Unisono: {key}",)


# Keys that LiteLLM reads or documents, but does not declare in any class of its source.
UNDECLARED = {
    "general_settings": (
        *("disable_error_logs", "enable_mcp_registry", "encryption_algorithm", "forward_llm_provider_auth_headers"),
        *("context_management_summary_model", "litellm_license", "mcp_allow_all_keys_respects_mcp_scope"),
        *("enforce_fallback_budget", "enforce_project_model_quota", "team_admin_editable_team_fields"),
    ),
    "litellm_settings": ("budget_reset_time", "enable_post_custom_auth_checks", "priority_reservation_settings"),
    "router_settings": ("enable_pre_call_check",),
}


@pytest.mark.parametrize("section", UNDECLARED)
def test_keys_that_litellm_reads_without_declaring_them_are_listed(section: str) -> None:
    assert set(UNDECLARED[section]) <= {*keys_of(section)}


MISSPELLED = {
    "default_fallback": ({"litellm_settings": {"default_fallback": ["m"]}}, "default_fallbacks"),
    "stream_timeouts": (entry(stream_timeouts=3), "stream_timeout"),
    "cooldown_tme": ({"router_settings": {"cooldown_tme": 3}}, "cooldown_time"),
    "input_cost_per_tokens": (entry(input_cost_per_tokens=3), "input_cost_per_token"),
    "input_cost_per_tokens of a backend": (
        entry("vllm/gpt-oss", api_base="http://h", input_cost_per_tokens=3),
        "input_cost_per_token",
    ),
    "api_bse": (entry(api_bse="http://x"), "api_base"),
    "alowed_ips": ({"general_settings": {"alowed_ips": ["10.0.0.1"]}}, "allowed_ips"),
}


@pytest.mark.parametrize(("raw", "meant"), MISSPELLED.values(), ids=MISSPELLED)
def test_a_misspelled_key_is_an_error_that_names_the_right_one(raw: dict[str, Any], meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key `.*` \(did you mean `{meant}`\?\)"):
        parse(raw, {})


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_a_protective_setting_that_protects_nothing_needs_no_acknowledgement(value: Any) -> None:
    raw = {"general_settings": {"allowed_routes": value}, "litellm_settings": {"store_audit_logs": value}}
    assert parse(raw, {}).warnings == ("LiteLLM settings without effect in Unisono: allowed_routes, store_audit_logs",)


@pytest.mark.parametrize("key", ["callbacks", "success_callback"])
def test_callbacks_that_check_requests_are_protective(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"litellm_settings\.{key}: this LiteLLM setting protects"):
        parse({"litellm_settings": {key: ["otel", "presidio"]}}, {})


def test_an_acknowledgement_without_a_setting_causes_a_warning() -> None:
    assert parse({"unisono": {"acknowledge": ["guardrails"]}}, {}).warnings == (
        "unisono.acknowledge: `guardrails` matches no protective setting; remove it",
    )


def test_all_errors_of_a_file_are_reported_at_once() -> None:
    raw = {
        "model_list": [
            {"model_name": "m", "litellm_params": {"model": "vllm/x", "api_base": "os.environ/UNSET", "rpm": 0}},
            {"litellm_params": {"model": "vllm/x", "modl": 1}},
        ],
        "general_settings": {"allowed_routes": ["/v1"]},
        "router_settings": {"cooldown_tme": 3, "model_group_alias": {"a": 7}, "num_retries": -1},
    }
    with pytest.raises(ConfigError) as refused:
        parse(raw, {})
    head, *lines = str(refused.value).splitlines()
    assert head == "the configuration has 8 errors:"
    assert [line.strip().partition(":")[0] for line in lines] == [
        "model_list[0].litellm_params.api_base",
        "model_list[1].litellm_params.modl",
        "router_settings.cooldown_tme",
        "general_settings.allowed_routes",
        "model_list[0].litellm_params.rpm",
        "model_list[1].model_name",
        "router_settings.num_retries",
        "router_settings.model_group_alias.a",
    ]


def test_limits_of_an_entry_are_limits_of_its_backend() -> None:
    raw = entry("vllm/x", api_base="http://h")
    raw["model_list"][0] |= {"rpm": 3, "tpm": 500, "model_info": {"rpm": 9}}
    params = parse(raw, {}).config.model_list[0].litellm_params
    assert (params.rpm, params.tpm) == (3, 500)


@pytest.mark.parametrize(("raw", "warning"), ENTRY_WARNINGS.values(), ids=ENTRY_WARNINGS)
def test_a_questionable_entry_causes_a_warning(raw: dict[str, Any], warning: str) -> None:
    assert parse(raw, {}).warnings == (warning,)


EMPTY = """
model_list:
  - model_name: m
    litellm_params: {model: openai/x, weight: , order: null, rpm: , timeout: null}
    model_info:
litellm_settings: {drop_params: null, num_retries: null}
router_settings: {routing_strategy: , allowed_fails: , cooldown_time: , model_group_alias: }
"""


def test_a_key_with_an_empty_value_equals_a_missing_key() -> None:
    assert parse(yaml.safe_load(EMPTY), {}).config == parse(entry(), {}).config


FRAGMENTS = """
x-there: &there {api_base: http://h, api_version: 2024-02-01}
.more: &more {rpm: 9}
model_list: [{model_name: m, litellm_params: {<<: [*there, *more], model: azure/x}}]
"""


def test_anchor_sections_are_allowed_and_dates_are_read_as_text(tmp_path: Path) -> None:
    loaded = parse(yaml.safe_load(FRAGMENTS), {})
    params = loaded.config.model_list[0].litellm_params
    assert (params.api_base, params.rpm, params.provider) == ("http://h", 9, {"api_version": "2024-02-01"})
    assert [warning.partition(":")[0] for warning in loaded.warnings] == ["x-there", ".more"]
    source, target = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(FRAGMENTS)
    target.write_text(imported(source))
    assert loaded.config == load(target, {}).config


def test_a_file_with_a_recursive_anchor_is_rejected(tmp_path: Path) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text("model_list: [{model_name: m, litellm_params: {model: openai/x, extra_body: &b [*b]}}]")
    for read in (load, imported):
        with pytest.raises(ConfigError, match="refers to itself"):
            read(source)


def test_an_invalid_provider_parameter_is_rejected_with_its_path_in_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^model_list\[0\]\.litellm_params\.temperature"):
        parse(entry(temperature=float("nan")), {})


def test_auth_value_and_authentication_token_are_the_same_setting() -> None:
    def server(**settings: Any) -> dict[str, Any]:
        return {"mcp_servers": {"gh": {"url": "https://mcp.example.com/mcp", "auth_type": "api_key", **settings}}}

    loaded = parse(server(auth_value="os.environ/GH"), {"GH": "secret"})
    token = loaded.config.mcp_servers["gh"].authentication_token
    assert (token and token.get_secret_value(), loaded.warnings) == ("secret", ())
    assert parse(server(auth_value="a", authentication_token=None), {}).config.mcp_servers["gh"].authentication_token
    with pytest.raises(ConfigError, match=r"mcp_servers\.gh\.auth_value: same setting as `authentication_token`"):
        parse(server(auth_value="a", authentication_token="b"), {})


def test_base_url_and_api_base_are_the_same_setting() -> None:
    assert parse(entry(base_url="http://h"), {}).config.model_list[0].litellm_params.api_base == "http://h"
    with pytest.raises(ConfigError, match="same setting as `api_base`"):
        parse(entry(base_url="http://h", api_base="http://h"), {})


def test_environment_variables_of_the_file_override_the_process() -> None:
    raw = {"environment_variables": {"KEY": "sk-file", "PORT": 6329}, **entry(api_key="os.environ/KEY")}
    config = parse(raw, {"KEY": "sk-environment"}).config
    key = config.model_list[0].litellm_params.api_key
    assert key is not None
    assert key.get_secret_value() == "sk-file"
    assert {name: value.get_secret_value() for name, value in config.environment_variables.items()} == {
        "KEY": "sk-file",
        "PORT": "6329",
    }
    assert "sk-file" not in str(config)


def test_secrets_passed_to_litellm_are_redacted_in_logs() -> None:
    raw = {"environment_variables": {"SOME_TOKEN": "token-of-theirs"}, **entry(aws_secret_access_key="aws-secret-1")}
    assert {"token-of-theirs", "aws-secret-1"} <= set(secrets_of(parse(raw, {}).config))


def test_examples_are_not_empty() -> None:
    assert len(FILES) >= 12
    assert all(isinstance(yaml.safe_load(path.read_text()), dict) for path in FILES.values())


# -- import-litellm


@pytest.mark.parametrize("name", FILES)
def test_an_imported_file_loads_as_the_same_configuration(name: str, tmp_path: Path) -> None:
    before = loaded(FILES[name])
    source, target = tmp_path / "theirs.yaml", tmp_path / f"{name}.yaml"
    source.write_text(yaml.safe_dump(acknowledged(FILES[name])))
    target.write_text(imported(source))
    environ = dict.fromkeys(ENV_REFERENCE.findall(FILES[name].read_text()), "https://set.example.com")
    after = load(target, environ)
    models = [entry.litellm_params.model for entry in before.config.model_list]
    assert [entry.litellm_params.model for entry in after.config.model_list] == models
    # The store is LiteLLM's Redis.
    assert after.config.model_copy(update={"store": before.config.store}) == before.config
    assert not [warning for warning in after.warnings if "no effect" in warning or "without effect" in warning]
    text = target.read_text()
    noted = [warning for warning in before.warnings if not warning.startswith("LiteLLM settings without effect")]
    assert all(f"#   {warning}" in text for warning in noted)


@pytest.mark.parametrize("budgeted", [["hosted_vllm", "vllm"], ["vllm"], ["hosted_vllm"]], ids=str)
def test_an_import_keeps_the_names_of_providers_with_budgets(budgeted: list[str], tmp_path: Path) -> None:
    models = [
        {"model_name": "a", "litellm_params": {"model": f"{provider}/tiny", "api_base": f"http://{provider}:8000"}}
        for provider in ("hosted_vllm", "vllm", "ollama_chat")
    ]
    budgets = {provider: {"max_budget": 1} for provider in budgeted}
    source = tmp_path / "litellm.yaml"
    source.write_text(yaml.safe_dump({"model_list": models, "router_settings": {"provider_budget_config": budgets}}))
    written = yaml.safe_load(imported(source))["model_list"]
    assert [entry["litellm_params"]["model"] for entry in written] == ["hosted_vllm/tiny", "vllm/tiny", "ollama/tiny"]


def test_import_keeps_protective_settings_so_that_serve_refuses_them(tmp_path: Path) -> None:
    target = tmp_path / "ours.yaml"
    target.write_text(text := imported(FILES["guardrails"]))
    assert "#   guardrails[0] (aporia): this LiteLLM setting protects the gateway" in text
    with pytest.raises(ConfigError, match=r"guardrails\[0\] \(aporia\): this LiteLLM setting protects the gateway"):
        load(target, dict.fromkeys(ENV_REFERENCE.findall(text), "set"))


def test_import_refuses_a_file_without_sections(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"^the configuration must be a mapping of sections, not a list$"):
        imported(tmp_path / "list.json")


def test_import_keeps_environment_references() -> None:
    text = imported(FILES["reliability"])
    assert text.count("os.environ/AZURE_API_KEY") == 1


def test_import_renames_backend_kinds(tmp_path: Path) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(entry("hosted_vllm/qwen", api_base="http://h", rpm=3, tag_regex=["a"])))
    tree = yaml.safe_load(text := imported(source))
    params = {"model": "vllm/qwen", "api_base": "http://h", "rpm": 3}
    assert tree["model_list"] == [{"model_name": "m", "litellm_params": params}]
    assert "#   model_list[0].litellm_params.tag_regex: this LiteLLM setting has no effect in Unisono\n" in text


def test_import_litellm_prints_or_writes_a_private_file(tmp_path: Path) -> None:
    source, target = str(FILES["overview"]), tmp_path / "ours.yaml"
    printed = CliRunner().invoke(main, ["import-litellm", source])
    assert printed.output == imported(FILES["overview"])
    assert CliRunner().invoke(main, ["import-litellm", source, "-o", str(target)]).exit_code == 0
    assert (target.read_text(), target.stat().st_mode & 0o077) == (printed.output, 0)
    again = CliRunner().invoke(main, ["import-litellm", source, "-o", str(target)])
    assert (again.exit_code, "exists" in again.output) == (1, True)


def test_the_models_command_marks_passthrough_models(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    models = ("vllm/gpt-oss-20b", "ollama/qwen3:8b")
    entries = [entry(model, api_base="http://h")["model_list"][0] for model in models]
    file.write_text(yaml.safe_dump({"model_list": entries}))
    lines = CliRunner().invoke(main, ["models", "--config", str(file)]).output.splitlines()
    assert [line.split()[1:] for line in lines[1:]] == [
        ["vllm-1", "vllm", "gpt-oss-20b"],
        ["ollama-1", "ollama", "(pass-through)", "qwen3:8b"],
    ]


# -- configurations of the documentation pages

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {page: (DOCS / page).read_text() for page in ("passthrough.md", "migrating-from-litellm.md")}
BLOCKS = {
    f"{page} {number}": block
    for page, text in PAGES.items()
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_configuration_of_the_pages_loads_without_warnings(block: str) -> None:
    result = parse(yaml.safe_load(block), dict.fromkeys(ENV_REFERENCE.findall(block), "sk-set"))
    assert result.warnings == ()
    assert list(ModelRegistry(result.config).groups())


def test_answer_modes_match_the_page() -> None:
    [block] = [block for block in BLOCKS.values() if "assistant" in block]
    registry = ModelRegistry(parse(yaml.safe_load(block), {}).config)
    modes = {model.name: registry.answer_mode(model) for model in registry.groups()}
    assert modes == {"assistant": AnswerMode.ENGINE_THEN_PASSTHROUGH, "other": AnswerMode.PASSTHROUGH_THEN_ENGINE}


@pytest.mark.parametrize(
    ("sections", "url"),
    [
        ({"router_settings": {"redis_host": "cache", "redis_port": 6380}}, "redis://cache:6380/0"),
        ({"router_settings": {"redis_url": "os.environ/CACHE"}}, "os.environ/CACHE"),
        (
            {"litellm_settings": {"cache_params": {"type": "redis", "host": "cache", "password": "a/b", "ssl": True}}},
            "rediss://:a%2Fb@cache:6379/0",
        ),
        (
            {"litellm_settings": {"cache_params": {"host": "cache", "username": "a@b", "password": "c", "ssl": "no"}}},
            "redis://a%40b:c@cache:6379/0",
        ),
        ({"litellm_settings": {"cache_params": {"host": "cache", "username": "os.environ/U"}}}, "os.environ/REDIS_URL"),
        ({"router_settings": {"redis_host": "cache", "redis_ssl": "os.environ/TLS"}}, "os.environ/REDIS_URL"),
        (
            {"router_settings": {"redis_host": "os.environ/REDIS_HOST", "redis_port": "os.environ/REDIS_PORT"}},
            "os.environ/REDIS_URL",
        ),
        ({"litellm_settings": {"cache_params": {"type": "s3", "host": "x"}}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_import_writes_the_store_of_litellms_redis(tmp_path: Path, sections: dict[str, Any], url: str | None) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump({**entry("hosted_vllm/gpt-oss", api_base="http://h"), **sections}))
    text = imported(source)
    assert (yaml.safe_load(text).get("store") or {}).get("url") == url
    assert ("store.url: set REDIS_URL" in text) is (url == "os.environ/REDIS_URL")


FROM_VARIABLES: dict[str, Any] = {
    "guardrails": [
        {
            "guardrail_name": "a",
            "litellm_params": {
                "guardrail": "litellm_content_filter",
                "mode": "os.environ/A",
                "blocked_words": [{"keyword": "x"}],
            },
        }
    ],
    "mcp_servers": {"docs": {"url": "os.environ/A", "transport": "os.environ/B"}},
    "litellm_settings": {"budget_duration": "os.environ/A", "timezone": "os.environ/B"},
    "general_settings": {"master_key": "os.environ/A", "allowed_ips": ["os.environ/D", "os.environ/E"]},
    "unisono": {"salt_key": "os.environ/A", "cors_origins": ["os.environ/C"]},
}


@pytest.mark.parametrize("section", FROM_VARIABLES)
def test_import_accepts_a_variable_for_every_kind_of_value(tmp_path: Path, section: str) -> None:
    source = tmp_path / "theirs.yaml"
    # The hint about the generic server is still given.
    model = entry("openai/openai/gpt-oss-20b", api_base="http://h:8000/v1", api_key="none")
    source.write_text(yaml.safe_dump({**model, section: FROM_VARIABLES[section]}))
    text = imported(source)
    assert yaml.safe_load(text)[section] == FROM_VARIABLES[section]
    assert "write the backend kind of the server" in text
    source.write_text(yaml.safe_dump({**model, section: FROM_VARIABLES[section], "credential_list": 3}))
    with pytest.raises(ConfigError, match=r"\Acredential_list: [^\n]*\Z"):
        imported(source)


def test_import_writes_the_kind_of_a_generic_server(tmp_path: Path) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(entry("openai/openai/gpt-oss-20b", api_base="http://h:8000/v1", api_key="none")))
    assert own_servers(source) == ["http://h:8000/v1"]
    text = imported(source, {"http://h:8000/v1": "vllm"})
    assert yaml.safe_load(text)["model_list"][0]["litellm_params"]["model"] == "vllm/openai/gpt-oss-20b"
    assert "model_list[0].litellm_params.model: the server is vllm" in text
    # Without an answer of the server, the entry stays and the hint says what to do.
    assert "write the backend kind of the server" in imported(source)


def test_the_own_code_of_an_operator_may_check_requests() -> None:
    with pytest.raises(ConfigError, match=r"litellm_settings\.callbacks: this LiteLLM setting protects"):
        parse({"litellm_settings": {"callbacks": "guards.handler_instance"}}, {})


@pytest.mark.parametrize("value", [True, "true", "yes", 1, "os.environ/BLOCKED"])
def test_an_entry_is_blocked_by_every_value_that_means_true(value: Any) -> None:
    blocked = {**entry("vllm/x", api_base="http://h")["model_list"][0], "model_info": {"blocked": value}}
    loaded = parse({"model_list": [blocked]}, {"BLOCKED": "True"})
    assert loaded.config.model_list == ()
    assert "model_list[0].model_info.blocked: the entry is blocked" in loaded.warnings[0]


def test_a_model_in_a_variable_is_read_like_the_model_itself() -> None:
    params = {"api_base": "http://h/v1/chat/completions", "api_key": "x"}
    literal = parse(entry("vllm/x", **params), {})
    assert "model_list[0].litellm_params.api_base: the API route" in literal.warnings[0]
    environ = {"MODEL": "vllm/x", "MODE": "batch", "STRATEGY": "latency-based-routing"}
    assert parse(entry("os.environ/MODEL", **params), environ).config == literal.config
    with pytest.raises(ConfigError, match=r"unknown key `max_paralel` \(did you mean `max_parallel_requests`"):
        parse(entry("os.environ/MODEL", **params, max_paralel=3), environ)
    # The same applies to other values that decide how the file is read.
    skipped = {**entry("vllm/x", **params)["model_list"][0], "model_info": {"mode": "os.environ/MODE"}}
    assert parse({"model_list": [skipped]}, environ).config.model_list == ()
    raw = {**entry("vllm/x", **params), "router_settings": {"routing_strategy": "os.environ/STRATEGY"}}
    assert parse(raw, environ).config.router_settings == literal.config.router_settings


def test_errors_name_positions_in_the_file_behind_entries_that_were_left_out() -> None:
    other = {"guardrail_name": "a", "litellm_params": {"guardrail": "aporia", "mode": "pre_call"}}
    words = {"guardrail": "litellm_content_filter", "mode": "pre_call", "blocked_words": [{"keyword": "x"}]}
    raw = {
        "model_list": [
            {**entry("vllm/x", api_base="http://h")["model_list"][0], "model_info": {"blocked": True}},
            entry("vllm/x", api_base="http://h", rpm=0)["model_list"][0],
        ],
        "guardrails": [other, {"guardrail_name": "b", "litellm_params": {**words, "blocked_words_file": "x"}}],
        "unisono": {"acknowledge": ["a"]},
    }
    with pytest.raises(ConfigError) as refused:
        parse(raw, {})
    assert [message.partition(":")[0] for message in refused.value.messages] == [
        "guardrails[1].litellm_params.blocked_words_file",
        "model_list[1].litellm_params.rpm",
    ]
    assert "this LiteLLM setting protects the gateway" in refused.value.messages[0]


FOREIGN_GUARDRAILS: dict[str, dict[str, Any]] = {
    "bedrock": {"mode": "during_call", "guardrailIdentifier": "ff6ujrregl1q", "guardrailVersion": "DRAFT"},
    "lakera_v2": {"mode": "pre_call", "api_key": "os.environ/LAKERA_API_KEY", "project_id": "p", "dev_info": True},
    "tool_permission": {"mode": "post_call", "rules": [{"id": "r", "tool_name": "Bash", "decision": "deny"}]},
    "custom_guardrail.myCustomGuardrail": {"mode": "pre_call", "categories": ["own argument"]},
}


@pytest.mark.parametrize(("kind", "params"), FOREIGN_GUARDRAILS.items(), ids=FOREIGN_GUARDRAILS)
def test_the_own_keys_of_an_unsupported_guardrail_are_not_checked(
    tmp_path: Path, kind: str, params: dict[str, Any]
) -> None:
    guardrail = {"guardrail_name": "a", "litellm_params": {**params, "guardrail": kind}}
    raw = {**entry("vllm/x", api_base="http://h"), "guardrails": [guardrail]}
    source, target = tmp_path / "litellm.yaml", tmp_path / "ours.yaml"
    source.write_text(yaml.safe_dump(raw))
    target.write_text(text := imported(source))
    refusal = f"guardrails[0] ({kind}): this LiteLLM setting protects the gateway"
    assert f"#   {refusal}" in text
    for file in (source, target):
        with pytest.raises(ConfigError) as refused:
            load(file, {})
        assert [message.startswith(refusal) for message in refused.value.messages] == [True]
    source.write_text(yaml.safe_dump({**raw, "unisono": {"acknowledge": ["a"]}}))
    target.write_text(imported(source))
    assert load(source, {}).config == load(target, {}).config


@pytest.mark.parametrize("name", [{}, {"guardrail_name": 3}])
def test_an_unsupported_guardrail_has_a_name(tmp_path: Path, name: dict[str, Any]) -> None:
    raw = {**entry("vllm/x"), "guardrails": [{**name, "litellm_params": {"guardrail": "bedrock"}}]}
    (source := tmp_path / "litellm.yaml").write_text(yaml.safe_dump(raw))
    for read in (load, imported):
        with pytest.raises(ConfigError, match=r"guardrails\[0\].guardrail_name: must be the name of the guardrail"):
            read(source, {})


RULES: dict[str, Any] = {
    "blocked_words_file": "words.yaml",
    "categories": [{"category": "harmful_self_harm", "enabled": True}],
    "competitor_intent_config": {"brand_self": ["a"]},
    "image_model": "gpt-4o",
    "end_session_after_n_fails": 3,
}


def content_filter(**params: Any) -> dict[str, Any]:
    words = {"guardrail": "litellm_content_filter", "mode": "pre_call", "blocked_words": [{"keyword": "x"}]}
    return {"guardrails": [{"guardrail_name": "a", "litellm_params": {**words, **params}}]}


@pytest.mark.parametrize(("key", "value"), RULES.items(), ids=RULES)
def test_an_unsupported_rule_of_a_guardrail_must_be_acknowledged(key: str, value: Any) -> None:
    path = rf"guardrails\[0\]\.litellm_params\.{key}"
    with pytest.raises(ConfigError, match=f"{path}: this LiteLLM setting protects the gateway"):
        parse(content_filter(**{key: value}), {})
    loaded = parse({**content_filter(**{key: value}), "unisono": {"acknowledge": [key]}}, {})
    assert loaded.config.guardrails[0].litellm_params.blocked_words
    assert any(re.match(f"{path}: not supported, as acknowledged", warning) for warning in loaded.warnings)
    assert parse(content_filter(**{key: None}), {}).config.guardrails


def test_other_keys_of_a_guardrail_are_noted_or_unknown() -> None:
    assert parse(content_filter(skip_system_message_in_guardrail=True), {}).warnings == (
        "guardrails[0].litellm_params.skip_system_message_in_guardrail: this LiteLLM setting has no effect in Unisono",
    )
    with pytest.raises(ConfigError, match=r"unknown key `blocked_wrods` \(did you mean `blocked_words`"):
        parse(content_filter(blocked_wrods=[]), {})


@pytest.mark.parametrize("guardrails", [[], [{"guardrail_name": "a", "litellm_params": {"guardrail": "aporia"}}]])
def test_a_model_must_not_name_an_unknown_guardrail(guardrails: list[Any]) -> None:
    raw = {**entry("vllm/x", api_base="http://h", guardrails=["a", "b"]), "guardrails": guardrails}
    with pytest.raises(ConfigError, match=r"model_list\[0\].litellm_params.guardrails: unknown guardrail `b`"):
        parse({**raw, "unisono": {"acknowledge": ["a"]}}, {})


def test_two_credentials_of_one_name_are_an_error() -> None:
    values = [{"credential_name": "a", "credential_values": {"api_base": f"http://{host}"}} for host in "xy"]
    raw = entry("vllm/x", litellm_credential_name="os.environ/NAME")
    with pytest.raises(ConfigError, match=r"credential_list\[1\].credential_name: another credential"):
        parse({**raw, "credential_list": values}, {"NAME": "a"})
    loaded = parse({**raw, "credential_list": values[:1]}, {"NAME": "a"})
    assert loaded.config.model_list[0].litellm_params.api_base == "http://x"
