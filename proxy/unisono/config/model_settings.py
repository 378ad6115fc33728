"""Sections of `model_list`: addresses, properties and settings of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, SecretStr, model_validator

from unisono.config.mcp_settings import ServerLabel
from unisono.config.prices import MODE_UNITS, UNIT_KEYS, Costs, PriceSettings
from unisono.config.section import Count, Name, Seconds, Section
from unisono.config.wake_settings import WakeSettings
from unisono.core.passthrough_request import ModelMode

KINDS = ("vllm", "sglang", "llamacpp", "ollama", "mlx_server", "mlx", "replay")
"""Backend kinds of Unisono. Each one needs an installed adapter."""

KIND_ALIASES = {"hosted_vllm": "vllm", "ollama_chat": "ollama"}
"""LiteLLM's names for the same backend kinds."""


class RequestDefaults(Section):
    """Defaults for fields that a request does not give, under their names in Chat Completions.

    They apply to all APIs and must be equal in all entries of a `model_name`. Entries that litellm serves pass them to
    litellm.
    """

    temperature: float | None = None
    """Default for the field of this name."""
    top_p: float | None = None
    """Default for the field of this name."""
    top_k: int | None = None
    """Default for the field of this name."""
    min_p: float | None = None
    """Default for the field of this name."""
    presence_penalty: float | None = None
    """Default for the field of this name."""
    frequency_penalty: float | None = None
    """Default for the field of this name."""
    logit_bias: dict[str, float] | None = None
    """Default for the field of this name."""
    seed: int | None = None
    """Default for the field of this name."""
    max_tokens: int | None = None
    """Default for the maximum number of tokens, `max_output_tokens` in Responses."""
    max_completion_tokens: int | None = None
    """Same as `max_tokens`."""
    stop: str | tuple[str, ...] | None = None
    """Default for the stop strings, `stop_sequences` in Messages."""
    reasoning_effort: str | None = None
    """Default for the reasoning effort: `low`, `medium` or `high`."""
    response_format: dict[str, JsonValue] | None = None
    """Default for the format of the answer, such as `{type: json_object}`."""
    parallel_tool_calls: bool | None = None
    """Default for the field of this name."""
    extra_body: dict[str, JsonValue] = Field(default_factory=dict)
    """Defaults for other fields of Chat Completions, such as `repetition_penalty`.
    Sampling fields, structured outputs and reasoning limits are possible."""

    @property
    def request_defaults(self) -> dict[str, Any]:
        """Values that are set, by the name of the field."""
        set_here = {name: getattr(self, name) for name in RequestDefaults.model_fields if name != "extra_body"}
        own = {name: value for name, value in set_here.items() if value is not None}
        return {**self.extra_body, **{name: [*v] if isinstance(v, tuple) else v for name, v in own.items()}}


class LitellmParams(Costs, RequestDefaults):
    """Address of a backend, limits of its load, and defaults for requests."""

    model: Name
    """`<backend kind>/<model name on the backend>`, such as `vllm/openai/gpt-oss-20b`."""
    api_base: str | None = None
    """Address of the backend, with or without a trailing `/v1`.
    Every backend kind except `mlx` and `replay` needs one."""
    litellm_credential_name: Name | None = None
    """Entry of `credential_list` with values for other keys of this section.
    The section's own keys win."""
    api_key: SecretStr | None = None
    """API key that the gateway sends to the backend. Keys of clients are never forwarded."""
    guardrails: tuple[Name, ...] = ()
    """Names of `guardrails` that apply to requests for this model.
    Those with `default_on` apply anyway."""
    timeout: Seconds | None = None
    """Limit for a whole answer, in seconds.
    By default `router_settings.timeout`, else `litellm_settings.request_timeout`, else 600."""
    stream_timeout: Seconds | None = None
    """Longest silence between tokens, in seconds.
    By default `router_settings.stream_timeout`, else 120."""
    max_parallel_requests: Count | None = None
    """Maximum concurrent requests on this backend.
    Further requests go to other backends or wait. By default no limit. The limit is divided among workers."""
    rpm: Count | None = None
    """Maximum requests that begin on this backend within any minute.
    Further requests go to other backends or wait. By default no limit. The limit is divided among workers."""
    tpm: Count | None = None
    """Maximum tokens of prompts and answers on this backend within any minute.
    A request above the limit has a minute of its own. By default no limit. The limit is divided among workers."""
    weight: Count = 1
    """Share of this entry among the entries of the same `model_name`.
    Under load it is the relative speed of the backend."""
    order: Annotated[int, Field(ge=0)] = 0
    """Priority among the entries of the same `model_name`, lowest first.
    A higher order gets only requests that no lower one can accept."""
    tags: tuple[Name, ...] = ()
    """Tags for `router_settings.enable_tag_filtering`.
    Entries with the tag `default` get the requests without a tag, and those with tags that no entry has."""
    provider: dict[str, JsonValue] = Field(default_factory=dict)
    """Not written in the file: the other keys of an entry that litellm serves.
    They are passed to litellm unchanged."""


class ModelInfo(Costs):
    """Properties of the model, independent of its address."""

    id: Name | None = None
    """Public name of this deployment, in answers, logs and metrics.
    By default the backend kind and a number, such as `vllm-1`."""
    mode: Literal[
        "chat",
        "responses",
        "completion",
        "embedding",
        "rerank",
        "score",
        "moderation",
        "image_generation",
        "audio_speech",
        "audio_transcription",
    ] = "chat"
    """LiteLLM's type of the model, or `score`. The first three values have the same effect.
    Models of the others [pass through](passthrough.md#serve-models-that-generate-no-text). Entries of any other type,
    such as `ocr`, are skipped with a warning."""
    harmony: bool | None = None
    """Whether the model speaks Harmony.
    By default true for the backend kinds above if `model_name` or `model` contains `gpt-oss`. Requests for other
    models pass through."""
    access_groups: tuple[Name, ...] = ()
    """Names of groups of models. A key that may use such a group may use the model."""
    blocked: bool = False
    """True excludes the entry, so that it gets no requests."""
    max_input_tokens: Count | None = None
    """Context window in tokens. Set it if the backend does not report one, or to use less of it."""


class ModelSettings(Section):
    """Settings of one model that LiteLLM does not have.

    Settings that clients can observe must be equal in all entries of a `model_name`.
    """

    reasoning_field: Literal["both", "reasoning", "reasoning_content", "none"] = "both"
    """Fields of Chat Completions answers that contain the reasoning.
    `none` omits its text in every API."""
    stream_tool_arguments: bool = False
    """True streams the arguments of tool calls while they are generated.
    By default a call is sent only once it is complete."""
    connect_timeout_s: Seconds = 10.0
    """Limit for connecting to the backend, in seconds."""
    first_token_timeout_s: Seconds = 300.0
    """Limit for the first token, in seconds.
    It includes the backend's own queue and the reading of a long prompt."""
    min_first_token_timeout_s: Seconds = 10.0
    """Minimum of the learned limit for the first token, in seconds.
    The gateway learns this limit from recent requests, up to `first_token_timeout_s`. It is shorter only to leave
    time for another backend."""
    min_silence_timeout_s: Seconds = 10.0
    """Minimum of the learned limit for silence between tokens, in seconds.
    The gateway learns this limit from recent requests, up to `stream_timeout`. It is shorter only to leave time for
    another backend."""
    mcp_servers: tuple[ServerLabel, ...] | None = None
    """Labels of the servers in `mcp_servers` that requests for this model may use.
    By default all."""
    run_tools: bool = False
    """True runs tools that need no approval also in Chat Completions and Messages.
    A request overrides it with `unisono.run_tools`."""
    reasoning_budget: Annotated[int, Field(ge=0)] | None = None
    """Maximum reasoning tokens in one answer. A request may set a lower limit.
    By default no limit."""
    forbidden_tools: Literal["remove", "note"] = "remove"
    """Treatment of the tools in the prompt if `tool_choice` is `none`. `remove` omits them.
    `note` keeps them and adds a message that forbids calls: the cached prefix stays valid, but small models ignore
    the message."""
    media: Literal["refuse", "strip", "describe"] = "refuse"
    """Treatment of images and other media in the newest user message.
    `refuse` rejects the request with 400. `strip` replaces them by a line of text, as in all earlier messages and in
    tool results. `describe` is `strip` with descriptions of images by `media_model`, in all messages."""
    media_model: Name | None = None
    """Model that describes images if `media` is `describe`.
    A `model_name` of this file that passes through and reads images."""
    failover: bool = True
    """True lets another backend continue an answer whose backend failed.
    With false, an answer that the client has partly received ends with an error."""
    max_embedding_batch_size: Count | None = None
    """Maximum inputs of one request for embeddings to this backend.
    Longer lists are split over the backends of the model, which has the smallest limit of its entries, and the
    answers are joined in order. By default lists are not split."""
    price: PriceSettings = Field(default_factory=PriceSettings)
    """Prices of tokens, for budgets and usage records."""
    max_tokens_in_flight: Count | None = None
    """Maximum tokens of concurrent requests on this backend.
    A request counts with its prompt and up to 1,024 tokens of its answer. A request above the limit runs alone. By
    default no limit. The limit is divided among workers."""
    recoveries: dict[Name, bool] = Field(default_factory=dict)
    """[Recovery rules](recoveries.md) to switch off, such as `{repetition: off}`.
    By default all rules are on."""
    canary: Annotated[float, Field(ge=0, lt=100)] = 0.0
    """Percentage of the requests for the `model_name` that this entry gets, such as 5.
    Others go there only if no other entry works. With 0, the entry shares the load as usual."""
    shadow: Name | None = None
    """Name of another entry of the same `model_name`, whose requests this entry repeats.
    Its answers are compared and never sent to a client, and it serves no requests. By default none."""
    wake: WakeSettings | None = None
    """Call that wakes the backend when requests find it unreachable. By default none.
    Entries that are added at run time may not have it."""
    backend: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the backend's adapter. [config.example.yaml](../config.example.yaml) lists
    them by backend kind."""

    @property
    def disabled_recoveries(self) -> frozenset[str]:
        """Names of the recovery rules that are off."""
        return frozenset(rule for rule, on in self.recoveries.items() if not on)


def is_of_litellm(model: object) -> bool:
    """Return whether a `litellm_params.model` names no backend kind of Unisono."""
    kind, slash, name = model.partition("/") if isinstance(model, str) else ("", "", "")
    # Without a slash, the whole text is a model name that litellm knows, such as `gpt-4o`.
    if not slash:
        return bool(kind)
    return bool(kind and name) and KIND_ALIASES.get(kind, kind) not in KINDS


TEXT_MODES = frozenset({"chat", "responses", "completion"})
"""Modes of models that generate text."""


class ModelEntry(Section):
    """One deployment of a model. Entries with the same `model_name` share the load."""

    model_name: Name
    """Name in the requests of clients.
    `*` matches any text; an exact name wins, then the most specific pattern."""
    litellm_params: LitellmParams
    """Address of the backend, limits of its load, and defaults for requests."""
    model_info: ModelInfo = Field(default_factory=ModelInfo)
    """Properties of the model."""
    unisono: ModelSettings = Field(default_factory=ModelSettings)
    """Settings that LiteLLM does not have."""

    @model_validator(mode="after")
    def _mode_is_consistent(self) -> ModelEntry:
        if self.model_info.harmony and self.mode is not ModelMode.CHAT:
            raise ValueError(f"`model_info.harmony` is true, but the mode `{self.mode}` is not Harmony; remove one")
        return self

    @property
    def by_litellm(self) -> bool:
        """True if the model belongs to another provider and litellm serves it."""
        # A gpt-oss without a backend kind is a mistake.
        named = bool(self.kind) or not self.is_gpt_oss
        return not self.harmony and named and is_of_litellm(self.litellm_params.model)

    @property
    def kind(self) -> str:
        """Backend kind with aliases resolved; empty if `model` names none."""
        kind, slash, _ = self.litellm_params.model.partition("/")
        return KIND_ALIASES.get(kind, kind) if slash else ""

    @property
    def backend_model(self) -> str:
        """Model name on the backend."""
        return self.litellm_params.model.partition("/")[2]

    @property
    def display_kind(self) -> str:
        """Backend kind for output on a terminal, with a mark for pass-through models."""
        if self.harmony:
            return self.kind
        if self.by_litellm:
            return f"litellm ({self.kind})" if self.kind else "litellm"
        return f"{self.kind} (pass-through)"

    @property
    def mode(self) -> ModelMode:
        """Kind of output; all modes that generate text are equal."""
        return ModelMode.CHAT if self.model_info.mode in TEXT_MODES else ModelMode(self.model_info.mode)

    @property
    def harmony(self) -> bool:
        if self.mode is not ModelMode.CHAT:
            return False
        if self.model_info.harmony is not None:
            return self.model_info.harmony
        # Other providers render Harmony themselves. Their gpt-oss models are reached through their own APIs.
        return self.kind in KINDS and self.is_gpt_oss

    @property
    def is_gpt_oss(self) -> bool:
        # Aliases and folders may have any name, so either of the two names may identify the model. Some spell it
        # `gpt_oss`.
        names = f"{self.model_name} {self.litellm_params.model}".lower().replace("_", "-")
        return "gpt-oss" in names

    @property
    def harmony_hint(self) -> str:
        """Advice for a gpt-oss model configured as `openai/...` with an address; else empty."""
        if self.kind != "openai" or not self.is_gpt_oss or not self.litellm_params.api_base:
            return ""
        return (
            "if api_base is your own server, use its backend kind to serve the model as Harmony, such as "
            f"`model: vllm/{self.backend_model}`"
        )

    def hints(self) -> Iterator[str]:
        """Yield advice for the operator, each after the path of a key."""
        if self.harmony_hint:
            yield f"litellm_params.model: {self.harmony_hint}"
        mode = self.model_info.mode
        unused = [key for unit, keys in UNIT_KEYS.items() if unit not in MODE_UNITS.get(mode, ()) for key in keys]
        for section in ("litellm_params", "model_info"):
            for key in unused:
                if getattr(self, section).get_price(key):
                    yield f"{section}.{key}: this price has no effect for models of the mode `{mode}`"


class CredentialSettings(Section):
    """Values for entries of `model_list` that name this credential."""

    credential_name: Name
    """Name, for `litellm_params.litellm_credential_name`."""
    credential_values: dict[Name, JsonValue] = Field(default_factory=dict, repr=False)
    """Values for keys of `litellm_params`, such as `api_base` and `api_key`."""
    credential_info: dict[Name, JsonValue] = Field(default_factory=dict)
    """Description for people; no effect."""
