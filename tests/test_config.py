"""Loading a configuration: valid files, errors with paths, warnings about unused settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from unisono.config import Config, Loaded, McpServerSettings, ModelEntry, ModelRegistry, data_folder, load, parse
from unisono.config.router_settings import AliasTarget
from unisono.core.generation import Timeouts
from unisono.errors import ConfigError, InvalidRequest, UnknownModel

EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"
EXAMPLE_ENVIRON = {
    "VLLM_KEY": "vllm-secret",
    "UNISONO_MASTER_KEY": "sk-master",
    "UNISONO_SALT_KEY": "salt-of-this-gateway",
    "DOCS_TOKEN": "docs-secret",
    "CRM_SECRET": "crm-secret",
    "OTEL_KEY": "otel-secret",
    "ALERT_TOKEN": "alert-token",
    "ALERT_SECRET": "alert-secret",
}


def entry(name: str = "gpt-oss-20b", model: str = "vllm/openai/gpt-oss-20b", **rest: Any) -> dict[str, Any]:
    params = {"model": model, "api_base": "http://localhost:8000", **rest.pop("litellm_params", {})}
    return {"model_name": name, "litellm_params": params, **rest}


def read(text: str, tmp_path: Path, environ: dict[str, str] | None = None) -> Loaded:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, environ or {})


def test_the_example_loads_without_warnings() -> None:
    loaded = load(EXAMPLE, EXAMPLE_ENVIRON)
    assert loaded.warnings == ()
    assert loaded.config.general_settings.master_key is not None
    assert ModelRegistry(loaded.config).resolve("gpt-4o").name == "gpt-oss-120b"


def missing_fields(model: type[BaseModel], section: Any, path: str) -> list[str]:
    missing = []
    for name, field in model.model_fields.items():
        field_path = f"{path}.{name}".lstrip(".")
        if name not in section:
            missing.append(field_path)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            missing += missing_fields(field.annotation, section[name], field_path)
    return missing


# Collected from the other keys of `litellm_params`, so the example does not list it.
COLLECTED_FIELD = "model_list[0].litellm_params.provider"


def test_the_example_shows_every_option() -> None:
    raw = yaml.safe_load(EXAMPLE.read_text())
    aliases = raw["router_settings"]["model_group_alias"].values()
    assert missing_fields(Config, raw, "") == []
    assert missing_fields(ModelEntry, raw["model_list"][0], "model_list[0]") == [COLLECTED_FIELD]
    servers = raw["mcp_servers"].values()
    assert set().union(*servers) == set(McpServerSettings.model_fields)
    assert any(not isinstance(alias, str) and not missing_fields(AliasTarget, alias, "") for alias in aliases)


def test_the_example_states_the_defaults() -> None:
    loaded = load(EXAMPLE, EXAMPLE_ENVIRON).config
    without_default = {"salt_key": None, "metrics_listen": None, "otel": None, "alerts": None}
    assert loaded.unisono.model_copy(update=without_default) == Config().unisono
    assert loaded.store.model_copy(update={"url": None, "spool_dir": None}) == Config().store
    assert loaded.store.url is not None
    assert loaded.store.url.get_secret_value() == f"sqlite:///{data_folder({})}/state.db"
    assert loaded.timeouts(loaded.model_list[0]) == Timeouts()
    assert loaded.num_retries == Config().num_retries
    for name in ("allowed_fails", "cooldown_time"):
        assert getattr(loaded.router_settings, name) == getattr(Config().router_settings, name)


def test_a_json_file_loads(tmp_path: Path) -> None:
    assert read(json.dumps({"model_list": [entry()]}), tmp_path).config.model_list[0].model_name == "gpt-oss-20b"


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "model_list: []", "model_list:"])
def test_an_empty_file_loads_as_an_empty_configuration(text: str, tmp_path: Path) -> None:
    assert read(text, tmp_path).config.model_list == ()


ORIGIN = (
    "must be `*` or an origin as browsers send it, such as https://app.example.com: scheme and host in lower case, no "
    "path, and no default port"
)

WRONG: dict[str, tuple[Any, str]] = {
    "lone surrogate": (
        {"model_list": [entry(model_name="gpt\ud83d")]},
        "model_list[0].model_name: the text is not valid Unicode; remove unpaired surrogates and non-UTF-8 bytes",
    ),
    "lone surrogate in a key": (
        {"unisono": {"hooks": [{"mine": {"\udcff": 1}}]}},
        "unisono.hooks[0].mine.\ufffd: the text is not valid Unicode; remove unpaired surrogates and non-UTF-8 bytes",
    ),
    "environment variable that is not UTF-8": (
        {"unisono": {"hooks": [{"mine": {"key": "os.environ/LATIN"}}]}},
        "unisono.hooks[0].mine.key: the text is not valid Unicode; remove unpaired surrogates and non-UTF-8 bytes",
    ),
    "price out of range": (
        {"model_list": [entry(unisono={"price": {"output": 1e300}})]},
        "model_list[0].unisono.price.output: input should be less than or equal to 1000000",
    ),
    "LiteLLM price per million tokens used per token": (
        {"model_list": [entry(litellm_params={"input_cost_per_token": 2.5})]},
        "model_list[0].litellm_params.input_cost_per_token: input should be less than or equal to 1",
    ),
    "duration out of range": (
        {"unisono": {"traces": {"ttl_s": 1e30}}},
        "unisono.traces.ttl_s: input should be less than or equal to 10000000000",
    ),
    "count out of range": (
        {"unisono": {"traces": {"keep": 10**30}}},
        "unisono.traces.keep: input should be less than or equal to 1000000000000",
    ),
    "OTLP endpoint without a scheme": (
        {"unisono": {"otel": {"endpoint": "collector:4318"}}},
        "unisono.otel.endpoint: must be an http or https URL, such as http://collector:4318/v1/traces",
    ),
    "not a mapping": ([1], "the configuration must be a mapping of sections, not a list"),
    "unknown section": ({"modle_list": []}, "modle_list: unknown key `modle_list` (did you mean `model_list`?)"),
    "unknown key": ({"unisono": {"colour": 1}}, "unisono.colour: unknown key `colour`"),
    "unknown key of a model": (
        {"model_list": [entry(), entry(litellm_params={"api_bse": "x"})]},
        "model_list[1].litellm_params.api_bse: unknown key `api_bse` (did you mean `api_base`?)",
    ),
    "models as a mapping": ({"model_list": {"a": 1}}, "model_list: must be a list of models, not a mapping"),
    "model entry as text": ({"model_list": ["gpt-oss"]}, "model_list[0]: must be a mapping, not text"),
    "no model": (
        {"model_list": [{"model_name": "a", "litellm_params": {}}]},
        "model_list[0].litellm_params.model: field required",
    ),
    "missing model name": (
        {"model_list": [{"litellm_params": {"model": "vllm/x"}}]},
        "model_list[0].model_name: field required",
    ),
    "negative timeout": (
        {"router_settings": {"timeout": -1}},
        "router_settings.timeout: input should be greater than 0",
    ),
    "infinite timeout": (
        {"router_settings": {"timeout": float("inf")}},
        "router_settings.timeout: input should be a finite number",
    ),
    "text instead of a number": (
        {"unisono": {"max_queue": "many"}},
        "unisono.max_queue: input should be a valid integer, unable to parse string as an integer",
    ),
    "unsupported mode": (
        {"model_list": [entry(model_info={"mode": "telepathy"})]},
        "model_list[0].model_info.mode: input should be 'chat', 'responses', 'completion', 'embedding', 'rerank', "
        "'score', 'moderation', 'image_generation', 'audio_speech' or 'audio_transcription'",
    ),
    "empty master key": (
        {"general_settings": {"master_key": "  "}},
        "general_settings.master_key: must not be empty; set a key, or remove `master_key` to serve on loopback only",
    ),
    "master key with a line break": (
        {"general_settings": {"master_key": "sk-1\n"}},
        "general_settings.master_key: must be printable ASCII without spaces, because clients send it in a header",
    ),
    "model name with a line break": (
        {"model_list": [entry("gpt-oss\nx")]},
        "model_list[0].model_name: string should match pattern '^[^\\x00-\\x1f\\x7f]+$'",
    ),
    "unknown time zone": (
        {"litellm_settings": {"timezone": "Berlin"}},
        "litellm_settings.timezone: must be the name of a time zone in the IANA database, such as `Europe/Berlin`; "
        "if the name is correct, install the system package tzdata",
    ),
    "zero store lifetime": ({"store": {"ttl_s": 0}}, "store.ttl_s: input should be greater than 0"),
    "negative replica count": (
        {"store": {"replicas": -1}},
        "store.replicas: input should be greater than or equal to 0",
    ),
    "blank store URL": (
        {"store": {"url": " "}},
        "store.url: must not be empty; set an address, or remove the key to use a SQLite file",
    ),
    "store as text": (
        {"store": "redis://localhost"},
        "store: must be a mapping, not text; write `store: {url: ADDRESS}` with one of sqlite:///path, memory://, "
        "redis://host:6379/0, redis+sentinel://hosts/name or redis+cluster://hosts",
    ),
    "short salt key": (
        {"unisono": {"salt_key": "salt"}},
        "unisono.salt_key: must have at least 16 characters; use a longer salt, or remove the key to generate one",
    ),
    "variable not set": (
        {"general_settings": {"master_key": "os.environ/NOT_SET"}},
        "general_settings.master_key: the environment variable NOT_SET is not set",
    ),
    "variable not set, in a list": (
        {"unisono": {"cors_origins": ["https://a.example", "os.environ/NOT_SET"]}},
        "unisono.cors_origins[1]: the environment variable NOT_SET is not set",
    ),
    "origin without a scheme": (
        {"unisono": {"cors_origins": ["https://a.example:8443", "*", "a.example"]}},
        "unisono.cors_origins[2]: " + ORIGIN,
    ),
    "origin with a path": (
        {"unisono": {"cors_origins": ["https://a.example/"]}},
        "unisono.cors_origins[0]: " + ORIGIN,
    ),
    "origin with a default port": (
        {"unisono": {"cors_origins": ["https://a.example:443"]}},
        "unisono.cors_origins[0]: " + ORIGIN,
    ),
    "origin with a wildcard": (
        {"unisono": {"cors_origins": ["https://*.example"]}},
        "unisono.cors_origins[0]: " + ORIGIN,
    ),
    "tool server without http": (
        {"mcp_servers": {"a": {"url": "ftp://x"}}},
        "mcp_servers.a.url: must be an http or https URL, such as https://tools.example.com/mcp",
    ),
    "issuer without http": (
        {"mcp_servers": {"a": {"url": "http://x", "auth_type": "oauth2", "client_id": "a", "issuer": "login"}}},
        "mcp_servers.a.issuer: must be an http or https URL, such as https://login.example.com",
    ),
    "webhook at a metadata service": (
        {"unisono": {"alerts": {"webhook": {"url": "http://169.254.169.254/x"}}}},
        "unisono.alerts.webhook.url: must not be the address of a cloud metadata service; set the address of the "
        "webhook",
    ),
    "unknown key in an alias": (
        {"router_settings": {"model_group_alias": {"y": {"model": "z", "hiden": True}}}},
        "router_settings.model_group_alias.y.hiden: unknown key `hiden`; remove it",
    ),
    "alias without a model": (
        {"router_settings": {"model_group_alias": {"y": {"hidden": True}}}},
        "router_settings.model_group_alias.y.model: field required",
    ),
    "alias as a number": (
        {"router_settings": {"model_group_alias": {"y": 5}}},
        "router_settings.model_group_alias.y: input should be a valid string; or input should be a mapping",
    ),
    "neither of two types": (
        {"unisono": {"hedge": {"after": "p99"}}},
        "unisono.hedge.after: input should be 'p95'; or input should be a valid number, unable to parse string as a "
        "number",
    ),
    "neither a date nor a word": (
        {"unisono": {"current_date": "tomorrow"}},
        "unisono.current_date: input should be a valid date or datetime, input is too short; or input should be "
        "'today' or 'none'",
    ),
    "invalid key": (
        {"unisono": {"builtin_tools": {"foo": "x"}}},
        "unisono.builtin_tools.foo: the key is not valid: input should be 'browser', 'python' or 'container'",
    ),
    "invalid label": (
        {"mcp_servers": {"a b": {"url": "http://x"}}},
        "mcp_servers.a b: the key is not valid: string should match pattern '^[A-Za-z][A-Za-z0-9_-]{0,63}$'",
    ),
    "unknown key in one of two types": (
        {"mcp_servers": {"a": {"url": "http://x", "allowed_tools": {"tool_name": ["x"]}}}},
        "mcp_servers.a.allowed_tools.tool_name: unknown key `tool_name`; remove it",
    ),
    "invalid option of a hook": (
        {"unisono": {"hooks": [{"pii": {"timeout_s": "x"}}]}},
        "unisono.hooks[0].timeout_s: input should be a valid number, unable to parse string as a number",
    ),
    "environment as a list": (
        {"environment_variables": ["A=1"]},
        "environment_variables: must be a mapping of names to values, not a list",
    ),
}


@pytest.mark.parametrize(("raw", "message"), WRONG.values(), ids=WRONG)
def test_an_invalid_value_is_rejected_with_its_path(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(raw, {"LATIN": "caf\udce9"})
    assert str(error.value) == message


def test_all_errors_of_a_file_are_reported_together() -> None:
    raw = {
        "model_list": [entry(litellm_params={"timeout": -1})],
        "general_settings": {"completion_model": "z", "master_key": ""},
        "router_settings": {
            "provider_budget_config": {"vllm": {"budget_limit": 1, "time_period": "x"}},
            "model_group_alias": {"a": "z", "b": "z"},
            "fallbacks": [{"a": ["gpt-oss-20b"]}, {"z": ["y"]}],
        },
        "unisono": {"salt_key": "short", "max_queue": "x", "colour": 1, "metrics_listen": "0.0.0.0:99"},
    }
    with pytest.raises(ConfigError) as error:
        parse(raw, {})
    assert [message.partition(":")[0] for message in error.value.messages] == [
        "unisono.colour",
        "model_list[0].litellm_params.timeout",
        "general_settings.master_key",
        "router_settings.provider_budget_config.vllm.time_period",
        "unisono.salt_key",
        "unisono.max_queue",
        "unisono.metrics_listen",
        "router_settings.model_group_alias.a",
        "router_settings.model_group_alias.b",
        "router_settings.fallbacks[0].a",
        "router_settings.fallbacks[1].z[0]",
        "router_settings.fallbacks[1].z",
        "general_settings.completion_model",
    ]


def test_an_invalid_name_causes_no_errors_of_its_references() -> None:
    for name in (3, "os.environ/NOT_SET"):
        raw = {"model_list": [entry(model_name=name)], "general_settings": {"completion_model": "m"}}
        with pytest.raises(ConfigError) as error:
            parse(raw, {})
        assert [message.partition(":")[0] for message in error.value.messages] == ["model_list[0].model_name"]


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "broken YAML": (b"model_list: [\nmaster_key: sk-secret", "line 2, column"),
    "duplicate key": (b"unisono: {max_queue: 1, max_queue: 2}", "duplicate key `max_queue`"),
    "tab as indentation": (b"unisono:\n\tmax_queue: 1 # sk-secret", "line 2, column 1"),
    "Python object tag": (b"unisono: !!python/object/apply:os.system [sk-secret]", "could not determine a constructor"),
    "binary": (b"\xff\xfe\x00sk-secret", "not UTF-8 text"),
}


@pytest.mark.parametrize(("content", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_is_named_without_its_content(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(path, {})
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "sk-secret" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.yaml", "."], ids=["missing", "folder"])
def test_a_missing_file_is_named_in_the_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^" + str(tmp_path)):
        load(tmp_path / name, {})


def test_an_invalid_value_is_not_quoted_in_the_error() -> None:
    raw = {"general_settings": {"master_key": ["sk-secret"]}, "model_list": [entry(litellm_params={"api_key": {}})]}
    with pytest.raises(ConfigError) as error:
        parse(raw, {})
    assert "sk-secret" not in str(error.value)


def test_environment_references_resolve_in_any_value_and_convert_numbers() -> None:
    raw = {
        "model_list": [entry(litellm_params={"api_key": "os.environ/KEY", "timeout": "os.environ/TIMEOUT"})],
        "router_settings": {"model_group_alias": {"gpt-4o": "os.environ/GROUP"}},
    }
    config = parse(raw, {"KEY": "sk-1", "TIMEOUT": "30", "GROUP": "gpt-oss-20b"}).config
    params = config.model_list[0].litellm_params
    assert params.api_key is not None
    assert (params.api_key.get_secret_value(), params.timeout) == ("sk-1", 30.0)
    assert ModelRegistry(config).resolve("gpt-4o").name == "gpt-oss-20b"


def test_environment_variables_of_the_file_override_the_process() -> None:
    raw = {"environment_variables": {"KEY": "own"}, "general_settings": {"master_key": "os.environ/KEY"}}
    key = parse(raw, {"KEY": "outer"}).config.general_settings.master_key
    assert key is not None
    assert key.get_secret_value() == "own"


def test_secrets_are_masked_in_repr_str_and_json() -> None:
    raw = {
        "general_settings": {"master_key": "sk-m"},
        "model_list": [entry(litellm_params={"api_key": "sk-b"})],
        "store": {"url": "redis://:sk-s@localhost"},
        "unisono": {"salt_key": "sk-salt-of-this-gateway"},
    }
    config = parse(raw, {}).config
    for text in (repr(config), str(config), config.model_dump_json()):
        assert "sk-" not in text


DATA_FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "nothing set": ({}, "~/.local/share/unisono"),
    "set": ({"XDG_DATA_HOME": "/srv/data"}, "/srv/data/unisono"),
    "empty": ({"XDG_DATA_HOME": ""}, "~/.local/share/unisono"),
    "relative path (ignored by the specification)": ({"XDG_DATA_HOME": "data"}, "~/.local/share/unisono"),
}


@pytest.mark.parametrize(("environ", "folder"), DATA_FOLDERS.values(), ids=DATA_FOLDERS)
def test_the_data_folder_follows_xdg_data_home(environ: dict[str, str], folder: str) -> None:
    assert data_folder(environ) == folder


UNUSED: dict[str, tuple[dict[str, Any], str]] = {
    "header of unknown proxies": (
        {"general_settings": {"use_x_forwarded_for": True}},
        "general_settings.use_x_forwarded_for: has no effect without the addresses of the proxies; set "
        "`trusted_proxy_ranges`",
    ),
    "callbacks": (
        {"litellm_settings": {"callbacks": ["otel"]}},
        "litellm_settings.callbacks: this LiteLLM setting has no effect in Unisono",
    ),
    "database": (
        {"general_settings": {"database_url": "os.environ/UNSET"}},
        "general_settings.database_url: this LiteLLM setting has no effect in Unisono",
    ),
    "strategy": (
        {"router_settings": {"routing_strategy": "latency-based-routing"}},
        "router_settings.routing_strategy: `latency-based-routing` is a LiteLLM strategy; `prefix-aware` is used "
        "instead",
    ),
    "rate limit": (
        {"model_list": [{**entry(), "rpm": 10}]},
        "model_list[0].rpm: read as `litellm_params.rpm`",
    ),
    "cosmetic settings": (
        {
            "model_list": [entry(model_info={"input_cost_per_pixel": 0.1})],
            "litellm_settings": {"set_verbose": True, "force_ipv4": False},
        },
        "LiteLLM settings without effect in Unisono: force_ipv4, input_cost_per_pixel, set_verbose",
    ),
    "tool server setting": (
        {"mcp_servers": {"docs": {"url": "http://x", "extra_headers": ["Authorization"]}}},
        "mcp_servers.docs.extra_headers: this LiteLLM setting has no effect in Unisono",
    ),
    "price of another mode": (
        {"model_list": [entry(model_info={"input_cost_per_second": 0.1})]},
        "model_list[0].model_info.input_cost_per_second: this price has no effect for models of the mode `chat`",
    ),
    "proxies": (
        {"unisono": {"trust_proxy_headers": True}},
        "unisono.trust_proxy_headers: this setting is reserved and has no effect in this version",
    ),
}


@pytest.mark.parametrize(("raw", "warning"), UNUSED.values(), ids=UNUSED)
def test_a_setting_without_effect_causes_a_warning(raw: dict[str, Any], warning: str) -> None:
    assert parse(raw, {}).warnings == (warning,)


def test_a_typical_litellm_file_loads() -> None:
    raw = yaml.safe_load("""
    model_list:
      - model_name: gpt-oss
        litellm_params: {model: hosted_vllm/openai/gpt-oss-20b, api_base: http://h:8000/v1, rpm: 60, temperature: 1}
        model_info: {id: one, mode: chat, supports_function_calling: true, base_model: gpt-oss-20b}
    litellm_settings: {drop_params: true, request_timeout: 300, num_retries: 1, callbacks: [prometheus], cache: false}
    router_settings: {routing_strategy: simple-shuffle, model_group_alias: {gpt-4: gpt-oss}, redis_host: h}
    general_settings: {master_key: sk-1234, database_url: postgres://x, alerting: [slack]}
    """)
    loaded = parse(raw, {})
    assert loaded.config.model_list[0].kind == "vllm"
    assert loaded.config.num_retries == 1
    assert loaded.config.timeouts(loaded.config.model_list[0]).total_s == 300
    assert loaded.config.router_settings.routing_strategy == "simple-shuffle"
    assert loaded.config.model_list[0].litellm_params.rpm == 60
    assert len(loaded.warnings) == 7
    assert loaded.config.model_list[0].litellm_params.temperature == 1


def test_the_most_specific_timeout_applies() -> None:
    raw = {
        "model_list": [entry(litellm_params={"timeout": 5}), entry()],
        "router_settings": {"timeout": 50, "stream_timeout": 7},
        "litellm_settings": {"request_timeout": 500},
    }
    config = parse(raw, {}).config
    assert [config.timeouts(e).total_s for e in config.model_list] == [5, 50]
    assert [config.timeouts(e).silence_s for e in config.model_list] == [7, 7]


HARMONY: dict[str, tuple[dict[str, Any], bool]] = {
    "backend model name": (entry("assistant", "vllm/openai/gpt-oss-20b"), True),
    "served model name": (entry("gpt-oss-20b", "mlx_server/default_model"), True),
    "uppercase with underscores": (entry("a", "mlx/GPT_OSS_20b-MXFP4"), True),
    "alias of a backend kind": (entry("a", "hosted_vllm/gpt-oss"), True),
    "model other than gpt-oss": (entry("qwen", "vllm/qwen3"), False),
    "enabled in model_info": (entry("qwen", "vllm/qwen3", model_info={"harmony": True}), True),
    "disabled in model_info": (entry("gpt-oss", "vllm/gpt-oss", model_info={"harmony": False}), False),
    "external API": (entry("gpt-oss", "openrouter/openai/gpt-oss-120b"), False),
}


@pytest.mark.parametrize(("raw", "harmony"), HARMONY.values(), ids=HARMONY)
def test_harmony_models_are_recognised_by_name_or_setting(raw: dict[str, Any], harmony: bool) -> None:
    assert parse({"model_list": [raw]}, {}).config.model_list[0].harmony is harmony


def registry(names: list[str], **sections: Any) -> ModelRegistry:
    """Build a registry of gpt-oss models; `qwen` is another model."""
    entries = [entry(name, "vllm/qwen3") if name == "qwen" else entry(name) for name in names]
    return ModelRegistry(parse({"model_list": entries, **sections}, {}).config)


ALIASES = {"router_settings": {"model_group_alias": {"gpt-4o": "gpt-oss-120b", "o3": {"model": "b", "hidden": True}}}}
AUXILIARY = "codex-auto-review"
RESOLVED: dict[str, tuple[list[str], dict[str, Any], str | None, str]] = {
    "group name": (["a", "b"], {}, "b", "b"),
    "alias": (["gpt-oss-120b", "b"], ALIASES, "gpt-4o", "gpt-oss-120b"),
    "auxiliary name with one model": (["gpt-oss-120b", "qwen"], {}, AUXILIARY, "gpt-oss-120b"),
    "auxiliary name with a default": (
        ["gpt-oss-120b", "gpt-oss-20b"],
        {"general_settings": {"completion_model": "gpt-oss-20b"}},
        AUXILIARY,
        "gpt-oss-20b",
    ),
    "auxiliary name as an alias": (
        ["gpt-oss-120b", "qwen"],
        {"router_settings": {"model_group_alias": {AUXILIARY: "qwen"}}},
        AUXILIARY,
        "qwen",
    ),
    "auxiliary name as a model": (["gpt-oss-120b", AUXILIARY], {}, AUXILIARY, AUXILIARY),
    "auxiliary name with a pattern": (["gpt-oss-120b", "codex-*"], {}, AUXILIARY, "codex-*"),
    "alias with an asterisk": (["a", "b"], {"router_settings": {"model_group_alias": {"x/*": "b"}}}, "x/*", "b"),
    "hidden alias": (["gpt-oss-120b", "b"], ALIASES, "o3", "b"),
    "catch-all pattern": (["a", "*"], {}, "gpt-5", "*"),
    "most specific pattern": (["*", "gpt-*", "gpt-4*"], {}, "gpt-4.1", "gpt-4*"),
    "exact name before a pattern": (["gpt-*", "gpt-oss"], {}, "gpt-oss", "gpt-oss"),
    "default without a name": (["a", "b"], {"general_settings": {"completion_model": "b"}}, None, "b"),
    "default for an empty name": (["a", "b"], {"general_settings": {"completion_model": "b"}}, "", "b"),
    "default for an unknown name": (["a", "b"], {"general_settings": {"completion_model": "b"}}, "c", "b"),
    "pattern before the default": (["a", "g*"], {"general_settings": {"completion_model": "a"}}, "gpt", "g*"),
    "alias as the default": (
        ["gpt-oss-120b", "b"],
        {**ALIASES, "general_settings": {"completion_model": "gpt-4o"}},
        None,
        "gpt-oss-120b",
    ),
}


@pytest.mark.parametrize(("names", "sections", "requested", "group"), RESOLVED.values(), ids=RESOLVED)
def test_a_requested_name_resolves_to_its_group(
    names: list[str], sections: dict[str, Any], requested: str | None, group: str
) -> None:
    assert registry(names, **sections).resolve(requested).name == group


@pytest.mark.parametrize("requested", ["c", "A", "a ", "*"])
def test_an_unknown_model_error_lists_the_known_models(requested: str) -> None:
    with pytest.raises(UnknownModel) as unknown:
        registry(["a", "b"]).resolve(requested)
    assert unknown.value.param == "model"
    assert "a, b" in unknown.value.message


@pytest.mark.parametrize("requested", ["", None])
def test_a_missing_model_is_an_invalid_request(requested: str | None) -> None:
    with pytest.raises(InvalidRequest) as missing:
        registry(["a", "b"]).resolve(requested)
    assert (missing.value.status, missing.value.code, missing.value.param) == (400, "invalid_value", "model")


@pytest.mark.parametrize("names", [["gpt-oss-120b", "gpt-oss-20b"], ["qwen"]], ids=["several gpt-oss models", "none"])
def test_an_auxiliary_name_never_selects_among_models(names: list[str]) -> None:
    with pytest.raises(UnknownModel):
        registry(names).resolve(AUXILIARY)


def test_the_model_list_omits_patterns_and_hidden_aliases() -> None:
    listed = registry(["gpt-oss-120b", "b", "*"], **ALIASES).listed()
    assert [(name, model.name) for name, model in listed] == [
        ("gpt-oss-120b", "gpt-oss-120b"),
        ("b", "b"),
        ("gpt-4o", "gpt-oss-120b"),
    ]


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "alias of an unknown model": (
        {"model_list": [entry("a")], "router_settings": {"model_group_alias": {"x": "y"}}},
        "router_settings.model_group_alias.x: unknown model `y`; use a `model_name` from `model_list`",
    ),
    "unknown default model": (
        {"model_list": [entry("a")], "general_settings": {"completion_model": "y"}},
        "general_settings.completion_model: unknown model `y`; use a `model_name` from `model_list`",
    ),
    "unknown tool server": (
        {"model_list": [entry("a", unisono={"mcp_servers": ["docs"]})]},
        "model_list[0].unisono.mcp_servers[0]: unknown tool server `docs`; add it to `mcp_servers`",
    ),
    "no vision model": (
        {"model_list": [entry("a", unisono={"media": "describe"})]},
        "model_list[0].unisono.media: `describe` requires a vision model; set `media_model`",
    ),
    "vision model without effect": (
        {"model_list": [entry("a", unisono={"media": "strip", "media_model": "a"})]},
        "model_list[0].unisono.media_model: has no effect; set `media: describe` or remove it",
    ),
    "unknown vision model": (
        {"model_list": [entry("a", unisono={"media": "describe", "media_model": "vl"})]},
        "model_list[0].unisono.media_model: unknown model `vl`; use a `model_name` from `model_list`",
    ),
    "vision model that reads text only": (
        {"model_list": [entry("a"), entry("b", unisono={"media": "describe", "media_model": "a"})]},
        "model_list[1].unisono.media_model: `a` cannot be used here; name a pass-through chat model that can read "
        "images and has no `*` in its name",
    ),
    "different reasoning fields in one group": (
        {"model_list": [entry("a"), entry("b"), entry("a", unisono={"reasoning_field": "none"})]},
        "model_list[2].unisono.reasoning_field: differs from model_list[0], which has the same model_name `a`; set "
        "the same value in both",
    ),
    "different reasoning budgets in one group": (
        {"model_list": [entry("a", unisono={"reasoning_budget": 10}), entry("a")]},
        "model_list[1].unisono.reasoning_budget: differs from model_list[0], which has the same model_name `a`; "
        "set the same value in both",
    ),
}


@pytest.mark.parametrize(("raw", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_contradiction_is_rejected_with_its_path(raw: dict[str, Any], message: str) -> None:
    config = parse(raw, {}).config
    with pytest.raises(ConfigError) as error:
        ModelRegistry(config)
    assert str(error.value) == message


def test_a_group_has_its_smallest_context_window() -> None:
    raw = [entry("a", model_info={"max_input_tokens": size}) for size in (8192, 4096)] + [entry("a")]
    model = ModelRegistry(parse({"model_list": raw}, {}).config).resolve("a")
    assert (len(model.entries), model.max_input_tokens) == (3, 4096)


@pytest.mark.parametrize("word", ["off", False, "false"], ids=str)
def test_a_recovery_can_be_disabled_in_any_spelling(word: object) -> None:
    settings = {"recoveries": {"repetition": word, "code-fence": "on"}, "reasoning_budget": 0}
    model = ModelRegistry(parse({"model_list": [entry("a", unisono=settings)]}, {}).config).resolve("a")
    assert (model.settings.disabled_recoveries, model.settings.reasoning_budget) == ({"repetition"}, 0)
