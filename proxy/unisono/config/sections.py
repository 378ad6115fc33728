"""The sections of the configuration as frozen pydantic models: LiteLLM's shape and key names where it has one.

Seconds throughout. Keys of our own carry their unit; keys of LiteLLM keep their spelling. Every field's description
is what `config.example.yaml` explains.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import Field, JsonValue, SecretStr, model_validator

from unisono.config.hooks import HookEntry
from unisono.config.mcp_settings import AllowedHostEntry, McpServerSettings, ServerLabel
from unisono.config.prices import Costs, PriceSettings
from unisono.config.section import Count, Name, Seconds, Section
from unisono.config.telemetry_settings import OtelSettings, TraceSettings
from unisono.core.generation import Timeouts

KINDS = ("vllm", "sglang", "llamacpp", "ollama", "mlx_server", "mlx", "replay")
"""Backend kinds of our own; which of them work is for the installed adapters to say."""

KIND_ALIASES = {"hosted_vllm": "vllm", "ollama_chat": "ollama"}
"""LiteLLM's names for the same servers."""


class LitellmParams(Costs):
    """Where a model's backend is and how hard it may be used."""

    model: Name
    """`<backend kind>/<the backend's own name for the model>`"""
    api_base: str | None = None
    """The server's address, with or without a trailing `/v1`."""
    api_key: SecretStr | None = None
    """Sent to the backend; nothing a client sends is."""
    timeout: Seconds | None = None
    """A whole answer, in seconds."""
    stream_timeout: Seconds | None = None
    """The longest silence between tokens, in seconds."""
    max_parallel_requests: Count | None = None
    """Requests this backend gets at once; further ones wait for a place."""
    rpm: Count | None = None
    """Requests this backend gets in any minute; further ones go to others, or wait."""
    tpm: Count | None = None
    """Tokens of prompts and answers this backend gets in any minute; a request that is larger has one alone."""
    weight: Count = 1
    """Share of this entry among the entries of the same model_name, and its speed beside theirs."""
    order: Annotated[int, Field(ge=0)] = 0
    """Entries of a higher order get requests only while those of a lower one cannot take them."""
    provider: dict[str, JsonValue] = Field(default_factory=dict)
    """Of an entry that litellm serves: everything else that stands here, which is handed to it."""


class ModelInfo(Costs):
    """What is known about the model besides where it is."""

    id: Name | None = None
    """The deployment's public name; by default the backend kind and a number."""
    mode: Literal["chat", "responses", "completion"] = "chat"
    """What LiteLLM calls the model's use; embeddings, images and audio are not served."""
    harmony: bool | None = None
    """Whether the model speaks Harmony; by default yes when one of its two names says gpt-oss."""
    max_input_tokens: Count | None = None
    """The context window in tokens, where the backend does not say or less of it is to be used."""


class ModelSettings(Section):
    """What is ours alone about one model; equal for all entries of one model_name."""

    reasoning_field: Literal["both", "reasoning", "reasoning_content", "none"] = "both"
    """Under which name Chat Completions shows the reasoning."""
    stream_tool_arguments: bool = False
    """True shows a tool call's arguments while they are generated, before the call is known to be whole."""
    connect_timeout_s: Seconds = 10.0
    """Until a connection to the backend stands, in seconds."""
    first_token_timeout_s: Seconds = 300.0
    """Until the first token, in seconds; covers the backend's own queue and a long prompt."""
    min_first_token_timeout_s: Seconds = 10.0
    """Shortest learned limit for the first token, in seconds; shorter only to leave time for another backend."""
    min_silence_timeout_s: Seconds = 10.0
    """Shortest learned limit for silence between tokens, in seconds; shorter only to leave time for another backend."""
    mcp_servers: tuple[ServerLabel, ...] | None = None
    """Tool servers of `mcp_servers` that requests for this model may use; by default all."""
    run_tools: bool = False
    """True runs those of them that need no approval in Chat Completions too, unless a request says otherwise."""
    reasoning_budget: Annotated[int, Field(ge=0)] | None = None
    """The most tokens of thoughts in one answer; requests may ask for fewer."""
    forbidden_tools: Literal["remove", "note"] = "remove"
    """Tools in the prompt where `tool_choice` is `none`: `remove` them, or keep them and `note` that none may be
    called."""
    failover: bool = True
    """False ends an answer that a client has begun to read where its backend failed, instead of going on elsewhere."""
    price: PriceSettings = Field(default_factory=PriceSettings)
    """What tokens cost, for budgets and the ledger."""
    max_tokens_in_flight: Count | None = None
    """Tokens of prompts and answers this backend gets at once; a request that is larger runs alone."""
    recoveries: dict[Name, bool] = Field(default_factory=dict)
    """Rules by which answers are mended that are switched `off`; all others are on."""
    backend: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the backend's adapter, as its documentation lists them."""

    @property
    def unmended(self) -> frozenset[str]:
        """The rules that are off."""
        return frozenset(rule for rule, on in self.recoveries.items() if not on)


def is_of_litellm(model: object) -> bool:
    """Whether a `litellm_params.model` is none of our backend kinds'."""
    kind, slash, name = model.partition("/") if isinstance(model, str) else ("", "", "")
    if not slash:
        return bool(kind)
    return bool(kind and name) and KIND_ALIASES.get(kind, kind) not in KINDS


class ModelEntry(Section):
    """One backend for one name that clients ask for; entries of equal name share the load."""

    model_name: Name
    """What clients ask for; with stars, any name of that pattern."""
    litellm_params: LitellmParams
    """Where the backend is."""
    model_info: ModelInfo = Field(default_factory=ModelInfo)
    """What is known about the model."""
    unisono: ModelSettings = Field(default_factory=ModelSettings)
    """What is ours alone."""

    @property
    def by_litellm(self) -> bool:
        """Whether it is another provider's, which litellm serves."""
        # A gpt-oss without a backend kind is a mistake.
        named = bool(self.kind) or not self.says_gpt_oss
        return not self.harmony and named and is_of_litellm(self.litellm_params.model)

    @property
    def kind(self) -> str:
        """The backend kind, aliases resolved; empty when `model` names none."""
        kind, slash, _ = self.litellm_params.model.partition("/")
        return KIND_ALIASES.get(kind, kind) if slash else ""

    @property
    def backend_model(self) -> str:
        """The backend's own name for the model."""
        return self.litellm_params.model.partition("/")[2]

    @property
    def shown_kind(self) -> str:
        """What it is, for people: `vllm`, or who serves what passes through."""
        if self.harmony:
            return self.kind
        if self.by_litellm:
            return f"litellm ({self.kind})" if self.kind else "litellm"
        return f"{self.kind} (passes)"

    @property
    def harmony(self) -> bool:
        if self.model_info.harmony is not None:
            return self.model_info.harmony
        return self.kind in KINDS and self.says_gpt_oss

    @property
    def says_gpt_oss(self) -> bool:
        names = f"{self.model_name} {self.litellm_params.model}".lower().replace("_", "-")
        return "gpt-oss" in names

    @property
    def harmony_hint(self) -> str:
        """For a gpt-oss behind a generic OpenAI address: how to have it served as Harmony; empty for any other."""
        if self.kind != "openai" or not self.says_gpt_oss or not self.litellm_params.api_base:
            return ""
        return (
            "if a server of your own answers at api_base, name its kind and it is served as Harmony: "
            f"`model: vllm/{self.backend_model}`"
        )


class GeneralSettings(Section):
    master_key: SecretStr | None = None
    """The key clients send. Without one the gateway answers on loopback only."""
    completion_model: Name | None = None
    """The model for requests that name none, and for names nothing else matches."""

    @model_validator(mode="after")
    def _key_is_usable(self) -> GeneralSettings:
        if self.master_key is None:
            return self
        key = self.master_key.get_secret_value()
        if not key.strip():
            raise ValueError("master_key is empty; leave it out to serve on loopback without a key")
        if not all("!" <= letter <= "~" for letter in key):
            raise ValueError("master_key must be plain ASCII without spaces: it travels in a header")
        return self


FallbackList = tuple[dict[Name, tuple[Name, ...]], ...]
"""LiteLLM's shape: `[{model: [others, ...]}, ...]`; `*` stands for every model that is not named."""

STRATEGIES = ("prefix-aware", "least-busy", "simple-shuffle")


class Fallbacks(Section):
    """Which models stand in for which."""

    fallbacks: FallbackList | None = None
    """Other models of the list for requests that a model's own backends failed or had no place for."""
    default_fallbacks: tuple[Name, ...] | None = None
    """The same for every model that has none of its own."""
    context_window_fallbacks: FallbackList | None = None
    """Other models for prompts that are too long for a model's own backends."""


class LitellmSettings(Fallbacks):
    """Defaults LiteLLM keeps here; the same keys in `router_settings` win."""

    request_timeout: Seconds | None = None
    """Default of every model's `timeout`."""
    num_retries: Annotated[int, Field(ge=0)] | None = None
    """Further backends tried after a failure."""
    drop_params: bool = False
    """True leaves out fields of requests that a provider of litellm's does not know, instead of refusing them."""


class AliasTarget(Section):
    """LiteLLM's long form of an alias."""

    model: Name
    """The model of the list that is meant."""
    hidden: bool = False
    """True leaves the alias out of the model list."""


class RouterSettings(Fallbacks):
    routing_strategy: Literal["prefix-aware", "least-busy", "simple-shuffle"] = "prefix-aware"
    """How one of a model's backends is chosen."""
    num_retries: Annotated[int, Field(ge=0)] | None = None
    """Further backends tried after a failure; 2 when nothing says otherwise."""
    allowed_fails: Annotated[int, Field(ge=0)] = 3
    """Failures of one kind in a row a backend may have before it rests."""
    cooldown_time: Annotated[float, Field(ge=0)] = 30.0
    """How long it rests, in seconds; twice as long each time it comes back and fails again."""
    timeout: Seconds | None = None
    """Default of every model's `timeout`."""
    stream_timeout: Seconds | None = None
    """Default of every model's `stream_timeout`."""
    model_group_alias: dict[Name, Name | AliasTarget] = Field(default_factory=dict)
    """Other names for models of the list: `{gpt-4o: gpt-oss-120b}`."""


class StoreSettings(Section):
    """Where state is kept that outlives a request, and for how long."""

    url: SecretStr | None = None
    """`sqlite:///path`, `memory://`, `redis://...` and its relatives; by default a file in the user's data folder. A
    secret, for it may hold a password."""
    ttl_s: Seconds = 30 * 86400.0
    """How long responses and conversations are kept after their last write, in seconds."""
    log_ttl_s: Seconds = 600.0
    """How long the events of a finished response can be read again, in seconds."""
    deadline_s: Seconds = 0.25
    """How long one operation of a shared store may take, in seconds."""
    replicas: Annotated[int, Field(ge=0)] | None = None
    """Number of Redis replicas that must acknowledge a write. Unset: one, if the primary has a connected
    replica or had one within the last 30 seconds."""
    lease_s: Seconds = 10.0
    """After how long without a sign another process takes over a background response, in seconds."""
    spool_dir: Name | None = None
    """Folder for usage records that the store does not accept yet; by default `spool` beside the SQLite file, or in the
    user's data folder. `memory://` needs none."""
    spool_max_bytes: Count = 64 * 1024 * 1024
    """How large the spool of one process may be, in bytes."""

    @model_validator(mode="after")
    def _url_is_given(self) -> StoreSettings:
        if self.url is not None and not self.url.get_secret_value().strip():
            raise ValueError("url is empty; leave it out to keep state in a file of the user's")
        return self


SHORTEST_SALT = 16


class GatewaySettings(Section):
    """The gateway itself: top level `unisono:`."""

    salt_key: SecretStr | None = None
    """Seals what clients carry for the gateway (`encrypted_content`), equal on all replicas. Unset, one is made once
    and kept in the store."""
    cors_origins: tuple[str, ...] = ()
    """Web origins (`https://app.example.com`) whose pages may call the gateway."""
    max_body_bytes: Count = 10 * 1024 * 1024
    """Larger requests get 413."""
    header_timeout_s: Seconds = 10.0
    """Until a request's headers are complete, in seconds."""
    body_timeout_s: Seconds = 60.0
    """Until a request's body is complete, in seconds."""
    write_timeout_s: Seconds = 60.0
    """How long a client may take nothing of an answer, in seconds; then it loses its connection."""
    max_connections: Count = 2048
    """Connections at once; further ones get 503, except for health checks."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait for a place at the backends of one model."""
    max_queue_per_key: Annotated[int, Field(ge=0)] | None = None
    """How many of them may be of one key; by default as many as there is room for."""
    queue_timeout_s: Seconds = 60.0
    """How long a request waits for a place, in seconds."""
    mcp_allowed_hosts: tuple[AllowedHostEntry, ...] = ()
    """Hosts whose tool servers requests may name by address; by default none."""
    builtin_tools: dict[Literal["browser", "python", "container"], ServerLabel] = Field(default_factory=dict)
    """Tool servers of `mcp_servers` that stand for tools gpt-oss was trained on: requests ask for them as `web_search`
    and `code_interpreter`."""
    pause_after_rounds: Count = 10
    """Rounds of server tools after which an answer of the Messages API pauses (`pause_turn`) until it is sent back."""
    raw_completions: bool = False
    """True answers `/v1/completions`, whose prompts go to a backend unrendered, for keys that are made `--raw`."""
    share_prompt_caches: bool = False
    """True lets tenants have what backends have cached of each other's prompts: faster where they begin alike, and how
    soon an answer begins then tells that somebody sent the same beginning before."""
    hooks: tuple[HookEntry, ...] = ()
    """Hooks that are asked about every turn, in this order: names, or `{name: {options}}`."""
    shutdown_grace_s: Count = 30
    """How long running answers may go on after SIGTERM, in whole seconds."""
    shutdown_delay_s: Annotated[float, Field(ge=0)] = 5.0
    """How long new connections are taken after SIGTERM, while readiness says no already, in seconds; only where
    somebody asks for readiness."""
    when_store_is_down: Literal["refuse", "known_keys"] = "refuse"
    """What becomes of requests with a virtual key while the store does not answer: `refuse` has them wait for better
    times with 503, `known_keys` lets in keys that this process has seen before, as they were then."""
    metrics: bool = True
    """Whether there is anything at `/metrics`."""
    metrics_listen: str | None = None
    """`host:port` of this machine at which `/metrics` can be read without a key."""
    metrics_per_key: bool = False
    """True counts tokens by key too; then only the master key reads `/metrics`."""
    otel: OtelSettings | None = None
    """Where spans go, for OpenTelemetry; by default nowhere."""
    traces: TraceSettings = Field(default_factory=TraceSettings)
    """Which answers are recorded."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged, and all that is worse."""
    current_date: date | Literal["today", "none"] = "today"
    """The day that prompts tell the model; `none` leaves it out, and a fixed one makes runs repeatable."""

    @model_validator(mode="after")
    def _salt_is_long_enough(self) -> GatewaySettings:
        if self.salt_key is not None and len(self.salt_key.get_secret_value().strip()) < SHORTEST_SALT:
            raise ValueError(
                f"salt_key is shorter than {SHORTEST_SALT} characters, which could be guessed; without one, one is made"
            )
        return self


class Config(Section):
    """The whole configuration. Components get their own section of it."""

    model_list: tuple[ModelEntry, ...] = ()
    """Models, and the backends that serve them."""
    general_settings: GeneralSettings = Field(default_factory=GeneralSettings)
    """The key of the gateway, and the model for requests that name none."""
    litellm_settings: LitellmSettings = Field(default_factory=LitellmSettings)
    """Defaults, where LiteLLM keeps them."""
    router_settings: RouterSettings = Field(default_factory=RouterSettings)
    """How backends are chosen, and what is done when one fails."""
    store: StoreSettings = Field(default_factory=StoreSettings)
    """Where state is kept."""
    mcp_servers: dict[ServerLabel, McpServerSettings] = Field(default_factory=dict)
    """Tool servers by the label that requests know them by."""
    unisono: GatewaySettings = Field(default_factory=GatewaySettings)
    """The gateway itself."""
    environment_variables: dict[str, SecretStr] = Field(default_factory=dict)
    """What `os.environ/NAME` finds before it looks at the environment, and litellm's providers in it."""

    @property
    def num_retries(self) -> int:
        for value in (self.router_settings.num_retries, self.litellm_settings.num_retries):
            if value is not None:
                return value
        return 2

    def timeouts(self, entry: ModelEntry) -> Timeouts:
        """An entry's own timeouts where it has them, else the router's, else LiteLLM's, else ours."""
        params, router, default = entry.litellm_params, self.router_settings, Timeouts()
        return Timeouts(
            connect_s=entry.unisono.connect_timeout_s,
            first_token_s=entry.unisono.first_token_timeout_s,
            silence_s=params.stream_timeout or router.stream_timeout or default.silence_s,
            total_s=params.timeout or router.timeout or self.litellm_settings.request_timeout or default.total_s,
        )
