"""Sections of the configuration file as frozen pydantic models.

Shape and key names are LiteLLM's where it has them. All times are in seconds. Unisono's own keys name the unit;
LiteLLM's keys keep their spelling. The string under a field is its description in `docs/configuration.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, tzinfo
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, SecretStr, model_validator

from unisono.config.alert_settings import AlertSettings
from unisono.config.authentication_settings import FailedAuthenticationSettings
from unisono.config.budget_settings import Duration, Money, ProviderBudget, ZoneName, to_zone
from unisono.config.fidelity_settings import FidelitySettings
from unisono.config.file_settings import FileSettings
from unisono.config.general_settings import GeneralSettings
from unisono.config.guardrail_settings import GuardrailSettings
from unisono.config.mcp_settings import AllowedHostEntry, McpServerSettings, ServerLabel
from unisono.config.model_settings import CredentialSettings, ModelEntry
from unisono.config.section import Count, Name, Seconds, Section
from unisono.config.telemetry_settings import (
    OtelSettings,
    RequestFileSettings,
    RequestLogSettings,
    RequestRecordSettings,
    TraceSettings,
)
from unisono.core.generation import Timeouts

# Section of hooks: names, order, and behaviour on failure.


class HookSettings(Section):
    """One entry of `unisono.hooks`: a name, or `{name: {options}}`."""

    name: Name
    """Name of the hook's entry point."""
    timeout_s: Seconds = 5.0
    """Limit for each call of the hook, in seconds."""
    fail: Literal["closed", "open"] = "closed"
    """Behaviour when the hook fails or exceeds its limit.
    `closed` ends the generation with an error, `open` continues without the hook."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the hook itself."""


# Options that the gateway reads itself. All others belong to the hook.
OURS = frozenset({"timeout_s", "fail"})


def _to_hook(value: Any) -> Any:
    """Expand the short forms of an entry."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, HookSettings):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError("must be the name of a hook, or `{name: {options}}`")
    [(name, options)] = value.items()
    # In YAML, `- name:` without options has the value null.
    values = {} if options is None else options
    if not isinstance(values, Mapping):
        raise ValueError("the options of a hook must be a mapping")  # noqa: TRY004 - pydantic expects ValueError
    own_options = {key: option for key, option in values.items() if key in OURS}
    return {"name": name, **own_options, "options": {key: option for key, option in values.items() if key not in OURS}}


HookEntry: TypeAlias = Annotated[HookSettings, BeforeValidator(_to_hook)]


FallbackList = tuple[dict[Name, tuple[Name, ...]], ...]
"""LiteLLM's form: `[{model: [fallback, ...]}, ...]`.
`*` stands for every model without its own list."""

# The names are LiteLLM's, except for `prefix-aware` and `quality-aware`.
STRATEGIES = ("prefix-aware", "least-busy", "simple-shuffle", "quality-aware")


class Fallbacks(Section):
    """Fallback models."""

    fallbacks: FallbackList | None = None
    """Models for requests whose own backends failed or have no free slot.
    The form is `[{model: [others]}]`. The key `*` stands for every model without its own list."""
    default_fallbacks: tuple[Name, ...] | None = None
    """Fallback models for every model that `fallbacks` does not list."""
    context_window_fallbacks: FallbackList | None = None
    """Models for prompts that are too long for the requested model, in the form of `fallbacks`."""


class LitellmSettings(Fallbacks):
    """Defaults in the section where LiteLLM has them. The same keys in `router_settings` win."""

    request_timeout: Seconds | None = None
    """Default for `timeout` of every model, in seconds. `router_settings.timeout` wins."""
    num_retries: Annotated[int, Field(ge=0)] | None = None
    """Maximum further attempts after a failure, each on another backend.
    `router_settings.num_retries` wins."""
    turn_off_message_logging: bool = False
    """True records no content of requests and answers: it switches `unisono.traces` off.
    Metrics, spans and logs never contain any."""
    max_budget: Money | None = None
    """Maximum cost of all answers in USD, in every `budget_duration`; 0 means no limit.
    Further requests are refused with 429. Costs need prices in `model_list`. By default no limit."""
    budget_duration: Duration | None = None
    """Period after which `max_budget` renews, such as `30d`, `12h` or `1mo` (calendar month).
    By default it never renews."""
    timezone: ZoneName = "UTC"
    """IANA time zone of the days, weeks and months of budgets, such as `Europe/Berlin`.
    It must be the same for all gateways on a store. A change begins new budget periods."""
    drop_params: bool = False
    """True removes request fields that a provider served by litellm does not support.
    By default such requests are rejected."""

    @property
    def zone(self) -> tzinfo:
        """Time zone of budget periods."""
        return to_zone(self.timezone)


class AliasTarget(Section):
    """Long form of an alias, as in LiteLLM."""

    model: Name
    """Name of the model in `model_list`."""
    hidden: bool = False
    """True omits the alias from `GET /v1/models`."""


class RouterSettings(Fallbacks):
    """Choice of backends, retries and fallback models."""

    routing_strategy: Literal["prefix-aware", "least-busy", "simple-shuffle", "quality-aware"] = "prefix-aware"
    """Choice among the backends of a model.
    `prefix-aware` prefers cached prompts and the least expected work, `least-busy` the fewest requests.
    `simple-shuffle` alternates by weight. `quality-aware` is `prefix-aware` with less weight for backends whose
    answers are faulty more often than those of the others."""
    num_retries: Annotated[int, Field(ge=0)] | None = None
    """Maximum further attempts after a failure, each on another backend.
    By default `litellm_settings.num_retries`, else 2."""
    enable_tag_filtering: bool = False
    """True restricts a request to backends with its `tags`.
    Requests name them in `tags` or `metadata.tags`, entries in `litellm_params.tags`."""
    tag_filtering_match_any: bool = True
    """True requires one of the request's tags, false all of them."""
    allowed_fails: Annotated[int, Field(ge=0)] = 3
    """Tolerated failures of one kind in a row.
    The next one opens the circuit breaker of the backend."""
    provider_budget_config: dict[Name, ProviderBudget] = Field(default_factory=dict)
    """Budgets by provider: the first part of `litellm_params.model`, such as `openai` or `vllm`.
    Requests use other deployments of the model while the budget is spent, or are refused with 429."""
    cooldown_time: Annotated[float, Field(ge=0)] = 30.0
    """Cooldown of a backend after its circuit breaker opens, in seconds.
    It doubles with every further failure, up to five minutes."""
    timeout: Seconds | None = None
    """Default for `timeout` of every model, in seconds."""
    stream_timeout: Seconds | None = None
    """Default for `stream_timeout` of every model, in seconds."""
    model_group_alias: dict[Name, Name | AliasTarget] = Field(default_factory=dict)
    """Other names for models in `model_list`, such as `{gpt-4o: gpt-oss-120b}`."""


class StoreSettings(Section):
    """Storage of state that outlives a request: responses, conversations, keys and usage."""

    url: SecretStr | None = None
    """Address of the store: `sqlite:///path`, `memory://`, or `redis://` and its variants.
    By default a SQLite file in the user's data folder. Replicas need a shared Redis. The address is secret because
    it may contain a password."""
    ttl_s: Seconds = 30 * 86400.0
    """Lifetime of responses and conversations after their last write, in seconds."""
    log_ttl_s: Seconds = 600.0
    """Time for which the events of a finished response can be streamed again, in seconds."""
    deadline_s: Seconds = 0.25
    """Limit for one operation of a shared store, in seconds.
    Raise it if the network to the store is slow."""
    replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of Redis replicas that must acknowledge a write.
    Unset: one, if the primary has a connected replica or had one within the last 30 seconds."""
    lease_s: Seconds = 10.0
    """Duration of a lease, in seconds.
    Another process takes over a background response whose lease was not renewed for so long."""
    spool_dir: Name | None = None
    """Folder for usage records that the store does not accept yet.
    By default `spool` next to the SQLite file, or in the user's data folder; none for `memory://`."""
    spool_max_bytes: Count = 64 * 1024 * 1024
    """Maximum size of the spool of one process, in bytes."""

    # The default would be a local file. Replicas would then silently not share their state.
    @model_validator(mode="after")
    def _url_is_given(self) -> StoreSettings:
        if self.url is not None and not self.url.get_secret_value().strip():
            raise ValueError("`url` is empty; set an address, or remove it to use a SQLite file of the user")
        return self


# Minimum number of characters of a salt. A shorter one could be guessed by someone who can read the store.
MIN_SALT_LENGTH = 16


class HedgeSettings(Section):
    """Insurance of the time to the first token."""

    after: Literal["p95"] | Seconds = "p95"
    """Time without a token after which a second backend is asked, in seconds.
    `p95` is the 95th percentile of the backend's recent answers."""


class GatewaySettings(Section):
    """Settings of the gateway itself."""

    salt_key: SecretStr | None = None
    """Secret for virtual keys, for sealed data of clients, and for models in the store.
    It has at least 16 characters and is equal on all replicas. A new value invalidates these. By default generated."""
    model_variables: tuple[Name, ...] = ()
    """Environment variables that models added at run time may name. By default none."""
    acknowledge: tuple[Name, ...] = ()
    """Unsupported protective LiteLLM settings in this file, such as `allowed_routes`.
    The gateway starts without them only if each of them is listed here. By default none."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the gateway, such as `https://app.example.com`.
    By default none."""
    max_body_bytes: Count = 10 * 1024 * 1024
    """Maximum size of a request body, in bytes. Larger requests are rejected with 413."""
    header_timeout_s: Seconds = 10.0
    """Limit until the headers of a request are complete, in seconds.
    A change takes effect after a restart."""
    body_timeout_s: Seconds = 60.0
    """Limit until the body of a request is complete, in seconds."""
    max_upload_bytes: Count = 25 * 1024 * 1024
    """Maximum size of a form with a file, such as audio, in bytes.
    Larger requests are rejected with 413. The form is stored in a temporary file until it is answered."""
    upload_timeout_s: Seconds = 300.0
    """Limit until a form with a file is complete, in seconds."""
    write_timeout_s: Seconds = 60.0
    """Time after which a client that reads nothing of its response is disconnected, in seconds.
    A change takes effect after a restart."""
    max_connections: Count = 2048
    """Maximum concurrent connections, divided among workers.
    Requests beyond it get 503, except for health checks. A change takes effect after a restart."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Maximum requests that wait for a slot on the backends of one model.
    The limit is divided among workers. With 0, no request waits."""
    max_queue_per_key: Annotated[int, Field(ge=0)] | None = None
    """Maximum waiting requests of one key for one model.
    By default `max_queue` is the only limit."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait for a slot, in seconds. The limit `timeout` includes this wait."""
    mcp_allowed_hosts: tuple[AllowedHostEntry, ...] = ()
    """Hosts of tool servers that requests may name by URL. By default none."""
    files: FileSettings = Field(default_factory=FileSettings)
    """Reading of the files in requests."""
    builtin_tools: dict[Literal["browser", "python", "container"], ServerLabel] = Field(default_factory=dict)
    """Servers in `mcp_servers` that implement the tools gpt-oss was trained on.
    In requests, `browser` is `web_search` and `python` is `code_interpreter`. By default none."""
    pause_after_rounds: Count = 10
    """Rounds of server tools after which a Messages answer pauses with `pause_turn`.
    The client sends the answer back to continue."""
    raw_completions: bool = False
    """True enables `/v1/completions`, which sends prompts to a backend without rendering.
    Virtual keys need the permission `--raw`."""
    library_parser: bool = False
    """True reads generated messages with openai-harmony's own parser instead of a table.
    The answers are the same. Each token costs more, and each process needs 50 MB more memory."""
    share_prompt_caches: bool = False
    """True lets tenants share the prompt caches of backends.
    Prompts that begin alike are read faster, but the time to the first token then reveals that another tenant sent
    the same beginning."""
    hooks: tuple[HookEntry, ...] = ()
    """Hooks that run for every generation, in this order.
    Each one is a name or `{name: {options}}`. By default none."""
    shutdown_grace_s: Count = 30
    """Time for running answers to finish after SIGTERM, in whole seconds.
    A change takes effect after a restart."""
    shutdown_delay_s: Annotated[float, Field(ge=0)] = 5.0
    """Time for which new connections are still accepted after SIGTERM, in seconds.
    Readiness already fails then. The delay applies only if readiness was probed within the last minute. Raise it if
    the load balancer reacts later."""
    when_store_is_down: Literal["refuse", "known_keys"] = "refuse"
    """Treatment of virtual keys while the store is unavailable.
    `refuse` rejects their requests with 503. `known_keys` accepts keys that this process has seen before, with the
    permissions they had then."""
    metrics: bool = True
    """True serves metrics in Prometheus format at `/metrics`, to requests with a key."""
    metrics_listen: str | None = None
    """`host:port` on loopback that serves `/metrics` without a key. By default none."""
    metrics_per_key: bool = False
    """True also has metrics by key and team: requests, tokens, cost, and the rest of budgets.
    Then `/metrics` requires the master key."""
    metrics_max_keys: Count = 1000
    """Maximum keys, teams and users that metrics name. Others count as `other`."""
    otel: OtelSettings | None = None
    """Export of OpenTelemetry spans. By default off. It needs the extra `unisono[otel]`."""
    traces: TraceSettings = Field(default_factory=TraceSettings)
    """Recording of answers."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the messages that are logged."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """Format of the log on stderr: `json`, `text` for people, or `auto`.
    `auto` is `text` on a terminal and `json` elsewhere. A change takes effect with a reload."""
    failed_authentication: FailedAuthenticationSettings = Field(default_factory=FailedAuthenticationSettings)
    """Limit of requests with invalid keys."""
    request_log: RequestLogSettings = Field(default_factory=RequestLogSettings)
    """Log of all requests."""
    request_records: RequestRecordSettings = Field(default_factory=RequestRecordSettings)
    """Records of requests in the store, for `/v1/requests`."""
    request_files: RequestFileSettings | None = None
    """Records of requests as JSON lines in files. By default none."""
    alerts: AlertSettings | None = None
    """Alerts about budgets and health. By default none."""
    hedge: HedgeSettings | None = None
    """Second request to another backend while the first one sends nothing. By default off."""
    fidelity: dict[Name, FidelitySettings] = Field(default_factory=dict)
    """Comparison of live answers with a reference, by `model_name`. By default none."""
    current_date: date | Literal["today", "none"] = "today"
    """Date in prompts: `today` in UTC, `none` to omit it, or a fixed date for reproducible runs."""

    @model_validator(mode="after")
    def _salt_is_long_enough(self) -> GatewaySettings:
        if self.salt_key is not None and len(self.salt_key.get_secret_value().strip()) < MIN_SALT_LENGTH:
            raise ValueError(
                f"`salt_key` must have at least {MIN_SALT_LENGTH} characters; remove it to have one generated"
            )
        return self


class Config(Section):
    """The whole configuration. A component receives only its own section."""

    model_list: tuple[ModelEntry, ...] = ()
    """Models and the backends that serve them."""
    general_settings: GeneralSettings = Field(default_factory=GeneralSettings)
    """Access to the gateway, and the default model."""
    litellm_settings: LitellmSettings = Field(default_factory=LitellmSettings)
    """Defaults in the section where LiteLLM has them."""
    router_settings: RouterSettings = Field(default_factory=RouterSettings)
    """Choice of backends, retries and fallback models."""
    store: StoreSettings = Field(default_factory=StoreSettings)
    """Storage of state."""
    mcp_servers: dict[ServerLabel, McpServerSettings] = Field(default_factory=dict)
    """Tool servers by label. Requests use the label."""
    unisono: GatewaySettings = Field(default_factory=GatewaySettings)
    """Settings of the gateway itself."""
    credential_list: tuple[CredentialSettings, ...] = ()
    """Values that several entries of `model_list` share."""
    guardrails: tuple[GuardrailSettings, ...] = ()
    """Checks of requests and answers, before [hooks](hooks.md)."""
    include: tuple[str, ...] = ()
    """Further files, relative to the folder of this one.
    Their lists are appended and their sections are merged. A key that has different values in two files is an
    error."""
    environment_variables: dict[str, SecretStr] = Field(default_factory=dict)
    """Values for `os.environ/NAME`; they win over the environment.
    Providers that litellm serves see them too."""

    @property
    def num_retries(self) -> int:
        # LiteLLM reads `num_retries` in both sections; the section of the router wins.
        for value in (self.router_settings.num_retries, self.litellm_settings.num_retries):
            if value is not None:
                return value
        return 2

    def timeouts(self, entry: ModelEntry) -> Timeouts:
        """Return the timeouts of an entry, each from the first setting that has it.

        The order is: the entry, `router_settings`, `litellm_settings` (only the total time), the default.
        """
        # LiteLLM's precedence: the entry, then the router, then the defaults of all requests. Only the limits for
        # connecting and for the first token are settings of this gateway alone.
        params, router, default = entry.litellm_params, self.router_settings, Timeouts()
        return Timeouts(
            connect_s=entry.unisono.connect_timeout_s,
            first_token_s=entry.unisono.first_token_timeout_s,
            silence_s=params.stream_timeout or router.stream_timeout or default.silence_s,
            total_s=params.timeout or router.timeout or self.litellm_settings.request_timeout or default.total_s,
        )
