"""Section `unisono`: settings of the gateway itself, such as files, hooks and fidelity.

`telemetry_settings` contains `unisono.otel` and `unisono.alerts`, and the sections for request logs, request records
and recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, SecretStr

from unisono.config.addresses import check_listener, check_origin
from unisono.config.general_settings import Networks
from unisono.config.mcp_settings import AllowedHostEntry, ServerLabel
from unisono.config.router_settings import HedgeSettings
from unisono.config.section_base import Count, Name, Seconds, Section
from unisono.config.telemetry_settings import (
    AlertSettings,
    OtelSettings,
    RequestFileSettings,
    RequestLogSettings,
    RequestRecordSettings,
    TraceSettings,
)


class HookSettings(Section):
    """One entry of `unisono.hooks`: a name, or `{name: {options}}`."""

    name: Name
    """Name of the hook's entry point."""
    timeout_s: Seconds = 5.0
    """Time limit for each call of the hook, in seconds."""
    fail: Literal["closed", "open"] = "closed"
    """What happens when the hook fails or exceeds its time limit.
    `closed` ends the generation with an error, `open` continues without the hook."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options that are passed to the hook."""


# Options that the gateway reads. All other options are passed to the hook.
OURS = frozenset({"timeout_s", "fail"})


def _to_hook(value: Any) -> Any:
    """Convert an entry from a name or `{name: {options}}` to the fields of `HookSettings`."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, HookSettings):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError("must be the name of a hook, or `{name: {options}}`")
    [(name, options)] = value.items()
    # In YAML, the options of `- name:` are null.
    values = {} if options is None else options
    if not isinstance(values, Mapping):
        raise ValueError("the options of a hook must be a mapping")  # noqa: TRY004 - pydantic expects ValueError
    own_options = {key: option for key, option in values.items() if key in OURS}
    return {"name": name, **own_options, "options": {key: option for key, option in values.items() if key not in OURS}}


HookEntry: TypeAlias = Annotated[HookSettings, BeforeValidator(_to_hook)]


class FileSettings(Section):
    """Reading of the files in requests."""

    allowed_hosts: tuple[AllowedHostEntry, ...] = ()
    """Hosts from which the gateway downloads files whose URLs are in requests.
    By default none."""
    max_bytes: Count = 10 * 1024 * 1024
    """Maximum size of a file, in bytes.
    A file in a request is encoded as base64, whose size is also limited by `max_body_bytes`."""
    max_pages: Count = 500
    """Maximum number of pages of a PDF."""
    max_characters: Count = 1_000_000
    """Maximum length of the text in a file, in characters."""
    timeout_s: Seconds = 20.0
    """Time limit in seconds for downloading a file, and the same limit for reading its text."""
    memory_bytes: Count = 256 * 1024 * 1024
    """Maximum memory of a process that reads an HTML or PDF file, in bytes.
    Each worker runs up to two such processes. macOS does not enforce the limit."""


class FailedAuthenticationSettings(Section):
    """Limit for requests with invalid keys from one address. Each process counts separately."""

    max_per_minute: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Maximum number of requests with an invalid key per minute from one client address.
    Further requests from the address get 429. A key that this process has accepted from the address before is always
    accepted. 0 means no limit."""
    trusted_proxies: Networks = ()
    """Addresses and networks of proxies whose `X-Forwarded-For` contains the client address.
    By default `general_settings.trusted_proxy_ranges` if `use_x_forwarded_for` is true. Otherwise no proxy is
    trusted."""


Share = Annotated[float, Field(ge=0, le=1)]


class FidelityThresholds(Section):
    """Limits for differences that rounding can explain."""

    agreement: Share = 0.995
    """Minimum share of positions at which both backends consider the same token the most likely."""
    divergence: Annotated[float, Field(gt=0)] = 0.002
    """Maximum mean divergence of the probability distributions, in nats."""
    implausible: Share = 0.0003
    """Maximum share of generated tokens that the reference considers practically impossible.
    A token is practically impossible if its probability is below one in a million."""


class FidelitySettings(Section):
    """Comparison of live answers with a reference backend, for one model."""

    reference: Name
    """Reference backend of the same `model_name`, which scores answers of the other backends.
    It must support scoring."""
    sample: Share = 0.01
    """Share of the answers that are scored, from 0 to 1.
    Answers of backends with a warning are scored more often."""
    budget: Count = 200_000
    """Maximum number of tokens to score per hour, including the tokens of prompts.
    A token that two backends score is counted twice. Each worker has the whole budget."""
    thresholds: FidelityThresholds = Field(default_factory=FidelityThresholds)
    """Limits for the differences. A backend that violates one of these limits gets a warning."""
    quarantine_s: Annotated[float, Field(ge=0)] = 900.0
    """Duration of a backend's first quarantine, in seconds.
    Each further quarantine is twice as long. With 0, there are only warnings."""


# Minimum number of characters of the salt. Someone who can read the store could guess a shorter salt.
MIN_SALT_LENGTH = 16


def _check_salt(salt: SecretStr) -> SecretStr:
    if len(salt.get_secret_value().strip()) < MIN_SALT_LENGTH:
        raise ValueError(
            f"must have at least {MIN_SALT_LENGTH} characters; use a longer salt, or remove the key to generate one"
        )
    return salt


class GatewaySettings(Section):
    """Settings of the gateway itself."""

    salt_key: Annotated[SecretStr, AfterValidator(_check_salt)] | None = None
    """Secret that protects virtual keys, sealed data of clients, and models in the store.
    It must have at least 16 characters and be the same in all gateways that share a store. A new value makes existing
    keys, sealed data and stored models unusable. By default a salt is generated."""
    model_variables: tuple[Name, ...] = ()
    """Environment variables to which models that are added at run time may refer.
    By default none."""
    acknowledge: tuple[Name, ...] = ()
    """Unsupported LiteLLM settings in this file that are protective, such as `allowed_routes`.
    The gateway starts only if each such setting is listed here. By default none."""
    cors_origins: tuple[Annotated[str, AfterValidator(check_origin)], ...] = ()
    """Origins of web pages that may call the gateway, such as `https://app.example.com`.
    `*` allows all origins. By default none."""
    max_body_bytes: Count = 10 * 1024 * 1024
    """Maximum size of a request body, in bytes. Larger requests are rejected with 413."""
    header_timeout_s: Seconds = 10.0
    """Time limit for receiving the headers of a request, in seconds.
    A change takes effect after a restart."""
    body_timeout_s: Seconds = 60.0
    """Time limit for receiving the body of a request, in seconds."""
    max_upload_bytes: Count = 25 * 1024 * 1024
    """Maximum size of a form with a file, such as audio, in bytes.
    Larger requests are rejected with 413. The form is stored in a temporary file until the request is answered."""
    upload_timeout_s: Seconds = 300.0
    """Time limit for receiving a form with a file, in seconds."""
    write_timeout_s: Seconds = 60.0
    """Time after which a client that does not read its response is disconnected, in seconds.
    A change takes effect after a restart."""
    max_connections: Count = 2048
    """Maximum number of concurrent connections. It is divided among the workers.
    Requests on further connections get 503, except for health checks. A change takes effect after a restart."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Maximum number of requests that wait for a free slot on the backends of one model.
    It is divided among the workers. With 0, no request waits."""
    max_queue_per_key: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of waiting requests of one key for one model.
    By default `max_queue` is the only limit."""
    queue_timeout_s: Seconds = 60.0
    """Maximum time that a request waits for a free slot, in seconds.
    `timeout` includes this time."""
    mcp_allowed_hosts: tuple[AllowedHostEntry, ...] = ()
    """Hosts of tool servers to which requests may refer by URL. By default none."""
    files: FileSettings = Field(default_factory=FileSettings)
    """Reading of the files in requests."""
    builtin_tools: dict[Literal["browser", "python", "container"], ServerLabel] = Field(default_factory=dict)
    """Servers in `mcp_servers` that implement the tools with which gpt-oss was trained.
    In requests, `browser` is called `web_search` and `python` is called `code_interpreter`. By default none."""
    pause_after_rounds: Count = 10
    """Number of rounds of server tools after which a Messages answer pauses with `pause_turn`.
    To continue, the client sends the answer back."""
    raw_completions: bool = False
    """True enables `/v1/completions`, which sends prompts to a backend without rendering.
    A virtual key can use it only if the key was created with `--raw`."""
    library_parser: bool = False
    """True parses generated messages with openai-harmony's parser, not with the gateway's.
    The answers are the same. Each token takes more time, and each process needs 50 MB more memory."""
    share_prompt_caches: bool = False
    """True lets tenants share the prompt caches of backends.
    Prompts that begin with the same tokens are then read faster. But the time to the first token reveals to a tenant
    that another tenant has sent a prompt with the same beginning."""
    hooks: tuple[HookEntry, ...] = ()
    """Hooks that run for every generation, in this order.
    Each entry is a name or `{name: {options}}`. By default none."""
    shutdown_grace_s: Count = 30
    """Time that running answers have to finish after SIGTERM, in whole seconds.
    A change takes effect after a restart."""
    shutdown_delay_s: Annotated[float, Field(ge=0)] = 5.0
    """Time for which new connections are still accepted after SIGTERM, in seconds.
    The readiness check fails immediately after SIGTERM. The delay applies only if readiness was checked within the
    last minute. Raise it if the load balancer needs more time to react."""
    when_store_is_down: Literal["refuse", "known_keys"] = "refuse"
    """How to treat requests with virtual keys while the store is unavailable.
    `refuse` rejects them with 503. `known_keys` accepts keys that this process has seen before, with the permissions
    that the keys had then."""
    metrics: bool = True
    """True serves metrics in Prometheus format at `/metrics`, to requests with a key."""
    metrics_listen: Annotated[str, AfterValidator(check_listener)] | None = None
    """`host:port` on loopback at which `/metrics` is served without a key. By default none."""
    metrics_per_key: bool = False
    """True adds metrics by key and team: requests, tokens, cost, and the remaining budgets.
    Then `/metrics` requires the master key, or the key of an admin or viewer."""
    metrics_max_keys: Count = 1000
    """Maximum number of keys, teams and users with metrics of their own.
    All others are counted as `other`."""
    otel: OtelSettings | None = None
    """Export of OpenTelemetry spans. By default off. Requires the extra `unisono[otel]`."""
    traces: TraceSettings = Field(default_factory=TraceSettings)
    """Recording of answers."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the messages that are logged."""
    log_format: Literal["auto", "json", "text"] = "auto"
    """Format of the log on stderr: `json`, `text` for people, or `auto`.
    `auto` is `text` on a terminal and `json` elsewhere. A change takes effect after a reload."""
    failed_authentication: FailedAuthenticationSettings = Field(default_factory=FailedAuthenticationSettings)
    """Limit for requests with invalid keys."""
    request_log: RequestLogSettings = Field(default_factory=RequestLogSettings)
    """Log of all requests."""
    request_records: RequestRecordSettings = Field(default_factory=RequestRecordSettings)
    """Records of requests in the store, for `/v1/requests`."""
    request_files: RequestFileSettings | None = None
    """Records of requests as JSON lines in files. By default none."""
    alerts: AlertSettings | None = None
    """Alerts about budgets and health. By default none."""
    hedge: HedgeSettings | None = None
    """Second request to another backend if the first backend sends no token. By default off."""
    fidelity: dict[Name, FidelitySettings] = Field(default_factory=dict)
    """Comparison of live answers with a reference backend, by `model_name`. By default none."""
    current_date: date | Literal["today", "none"] = "today"
    """Date in prompts: `today` in UTC, `none` for no date, or a fixed date to repeat runs."""
