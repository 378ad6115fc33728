"""Sections of `model_list` and `credential_list`: deployments, and how to wake them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, SecretStr, model_validator

from unisono.config.mcp_settings import ServerLabel
from unisono.config.price_settings import MODE_UNITS, UNIT_KEYS, Costs, PriceSettings
from unisono.config.section_base import Count, Name, Seconds, Section
from unisono.core.passthrough_request import ModelMode
from unisono.net.ssrf_guard import parse_url


def _check_url(url: SecretStr) -> SecretStr:
    if parse_url(url.get_secret_value()) is None:
        raise ValueError("must be a plain http or https URL, such as http://10.0.0.2:9000/wake")
    return url


class WakeSettings(Section):
    """How to wake a backend: a URL or a command."""

    url: Annotated[SecretStr, AfterValidator(_check_url)] | None = None
    """URL to which the gateway sends a POST request."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Program and its arguments, run without a shell and with few environment variables.
    It may exit before the backend is ready."""
    timeout_s: Seconds = 300.0
    """Maximum time until the backend is ready, in seconds. Requests wait during this time."""

    @model_validator(mode="after")
    def _has_one_call(self) -> WakeSettings:
        if (self.url is None) == (not self.command):
            raise ValueError("must have either `url` or `command`")
        return self


KINDS = ("vllm", "sglang", "llamacpp", "ollama", "mlx_server", "mlx", "replay")
"""Kinds of backends that Unisono supports. For each kind there must be an installed adapter."""

KIND_ALIASES = {"hosted_vllm": "vllm", "ollama_chat": "ollama"}
"""LiteLLM's names of backend kinds, with Unisono's names for the same kinds."""


class RequestDefaults(Section):
    """Defaults for request fields, named as in Chat Completions.

    A default applies, in every API, if a request does not set the field. All entries of a `model_name` must have the
    same defaults. For an entry that litellm serves, the defaults are passed to litellm.
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
    """Default for the maximum number of tokens to generate, `max_output_tokens` in Responses."""
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
    Fields for sampling, structured outputs and reasoning limits are allowed."""

    @property
    def request_defaults(self) -> dict[str, Any]:
        """Defaults that are set, by the name of the request field."""
        set_here = {name: getattr(self, name) for name in RequestDefaults.model_fields if name != "extra_body"}
        own = {name: value for name, value in set_here.items() if value is not None}
        return {**self.extra_body, **{name: [*v] if isinstance(v, tuple) else v for name, v in own.items()}}


class LitellmParams(Costs, RequestDefaults):
    """Address of a backend, limits of its load, and defaults for requests."""

    model: Name
    """`<backend kind>/<model name on the backend>`, such as `vllm/openai/gpt-oss-20b`."""
    api_base: str | None = None
    """Address of the backend, with or without a trailing `/v1`.
    Required for every backend kind except `mlx` and `replay`."""
    litellm_credential_name: Name | None = None
    """Entry of `credential_list` whose values are used for keys that this section does not set."""
    api_key: SecretStr | None = None
    """API key that the gateway sends to the backend. Keys of clients are never forwarded."""
    guardrails: tuple[Name, ...] = ()
    """Names of guardrails that apply to requests for this model.
    Guardrails with `default_on` apply even if they are not listed here."""
    timeout: Seconds | None = None
    """Time limit for a whole answer, in seconds.
    By default `router_settings.timeout`, else `litellm_settings.request_timeout`, else 600."""
    stream_timeout: Seconds | None = None
    """Maximum time between two tokens of an answer, in seconds.
    By default `router_settings.stream_timeout`, else 120."""
    max_parallel_requests: Count | None = None
    """Maximum number of concurrent requests on this backend.
    Further requests use other backends or wait. By default no limit. The limit is divided among the workers."""
    rpm: Count | None = None
    """Maximum number of requests that begin on this backend within any 60 seconds.
    Further requests use other backends or wait. By default no limit. The limit is divided among the workers."""
    tpm: Count | None = None
    """Maximum number of prompt and answer tokens on this backend within any 60 seconds.
    Further requests use other backends or wait. A single request with more tokens is accepted if no other request
    has used tokens within the last 60 seconds. By default no limit. The limit is divided among the workers."""
    weight: Count = 1
    """Share of the requests, relative to the weights of the other entries of the `model_name`.
    Under load, the gateway assumes that the speed of a backend is proportional to its weight."""
    order: Annotated[int, Field(ge=0)] = 0
    """Priority among the entries of the same `model_name`. A lower number has priority.
    An entry gets only requests that no entry with a lower number can accept."""
    tags: tuple[Name, ...] = ()
    """Tags for `router_settings.enable_tag_filtering`.
    Entries with the tag `default` get the requests that have no tags, and requests whose tags no entry has."""
    provider: dict[str, JsonValue] = Field(default_factory=dict)
    """Do not write this key. If litellm serves the entry, it contains the keys not listed here.
    They are passed to litellm unchanged."""


class ModelInfo(Costs):
    """Properties of the model, independent of its address."""

    id: Name | None = None
    """Name of this deployment in responses, logs and metrics.
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
    """Type of the model: a type of LiteLLM, or `score`. The first three have the same effect.
    Requests for models of the other listed types
    [pass through](passthrough.md#serve-models-that-generate-no-text). Entries of types that are not listed, such as
    `ocr`, are skipped with a warning."""
    harmony: bool | None = None
    """True if the model uses the Harmony format, as gpt-oss does.
    By default true if the backend kind is one of Unisono's and `model_name` or `model` contains `gpt-oss`. Requests
    for models without Harmony pass through."""
    access_groups: tuple[Name, ...] = ()
    """Names of groups that the model belongs to.
    A key with permission for such a group may use the model."""
    blocked: bool = False
    """True excludes the entry, so that it gets no requests."""
    max_input_tokens: Count | None = None
    """Context window in tokens.
    Set it if the backend does not report its context window, or if requests should use less of it."""


class ModelSettings(Section):
    """Settings of an entry that LiteLLM does not have.

    Settings whose effect clients can observe must be equal in all entries of a `model_name`.
    """

    reasoning_field: Literal["both", "reasoning", "reasoning_content", "none"] = "both"
    """Fields of Chat Completions responses that contain the reasoning.
    `none` omits the text of the reasoning in every API."""
    stream_tool_arguments: bool = False
    """True streams the arguments of tool calls while they are generated.
    By default a call is sent only after it is complete."""
    connect_timeout_s: Seconds = 10.0
    """Time limit for connecting to the backend, in seconds."""
    first_token_timeout_s: Seconds = 300.0
    """Time limit for the first token of an answer, in seconds.
    It includes the time in the backend's own queue, and the time to read the prompt."""
    min_first_token_timeout_s: Seconds = 10.0
    """Minimum of the learned time limit for the first token, in seconds.
    The gateway learns the limit from recent requests, up to `first_token_timeout_s`. A shorter limit leaves time to
    try another backend."""
    min_silence_timeout_s: Seconds = 10.0
    """Minimum of the learned time limit between two tokens, in seconds.
    The gateway learns the limit from recent requests, up to `stream_timeout`. A shorter limit leaves time to try
    another backend."""
    mcp_servers: tuple[ServerLabel, ...] | None = None
    """Labels of the servers in `mcp_servers` that requests for this model may use.
    By default all servers."""
    run_tools: bool = False
    """True also runs server tools in Chat Completions and Messages, if they need no approval.
    A request can override this setting with `unisono.run_tools`."""
    reasoning_budget: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of reasoning tokens in one answer. A request may set a lower limit.
    By default no limit."""
    forbidden_tools: Literal["remove", "note"] = "remove"
    """What to do with the tools in the prompt if `tool_choice` is `none`. `remove` omits them.
    `note` keeps the tools and adds a message that forbids calls. Then the prompt still begins with the same tokens,
    which the backend may have cached, but small models ignore the message."""
    media: Literal["refuse", "strip", "describe"] = "refuse"
    """What to do with images and other media in the newest user message.
    `refuse` rejects the request with 400. `strip` replaces media with a line of text. Media in earlier messages and in
    tool results are always replaced in this way. `describe` is like `strip`, but replaces images in all messages with
    descriptions from `media_model`."""
    media_model: Name | None = None
    """Model that describes images if `media` is `describe`.
    It must be a `model_name` of this file whose requests pass through, and must accept images."""
    failover: bool = True
    """True lets another backend continue an answer after the backend that began it has failed.
    With false, an answer that the client has partly received ends with an error."""
    max_embedding_batch_size: Count | None = None
    """Maximum number of inputs in one request for embeddings to this backend.
    A longer list is split over the backends of the model, and the results are joined in order. The smallest limit of
    all entries of the model applies. By default lists are not split."""
    price: PriceSettings = Field(default_factory=PriceSettings)
    """Prices of tokens, for budgets and usage records."""
    max_tokens_in_flight: Count | None = None
    """Maximum number of tokens of all concurrent requests on this backend together.
    For each request, the tokens of its prompt and up to 1,024 tokens of its answer are counted. A request that is
    larger than the limit runs alone. By default no limit. The limit is divided among the workers."""
    recoveries: dict[Name, bool] = Field(default_factory=dict)
    """[Recovery rules](recoveries.md) to switch off, such as `{repetition: off}`.
    By default all rules are on."""
    canary: Annotated[float, Field(ge=0, lt=100)] = 0.0
    """Percentage of the requests for the `model_name` that this entry gets, such as 5.
    It gets other requests only if no other entry works. With 0, the entry shares the load as usual."""
    shadow: Name | None = None
    """Name of another entry of the same `model_name`, whose requests this entry repeats.
    The answers are compared and never sent to a client. The entry gets no other requests. By default none."""
    wake: WakeSettings | None = None
    """How to wake the backend when it is unreachable. By default the backend is not woken.
    Entries that are added at run time must not have this key."""
    backend: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the backend's adapter.
    [config.example.yaml](../config.example.yaml) lists them by backend kind."""

    @property
    def disabled_recoveries(self) -> frozenset[str]:
        """Names of the recovery rules that are off."""
        return frozenset(rule for rule, on in self.recoveries.items() if not on)


def is_of_litellm(model: object) -> bool:
    """Return whether a `litellm_params.model` names no backend kind, so that litellm serves it."""
    kind, slash, name = model.partition("/") if isinstance(model, str) else ("", "", "")
    # A text without a slash is a model name that litellm knows, such as `gpt-4o`.
    if not slash:
        return bool(kind)
    return bool(kind and name) and KIND_ALIASES.get(kind, kind) not in KINDS


TEXT_MODES = frozenset({"chat", "responses", "completion"})
"""Values of `mode` for models that generate text."""


class ModelEntry(Section):
    """One deployment of a model. Entries with the same `model_name` share the load."""

    model_name: Name
    """Model name in the requests of clients.
    `*` matches any text. An exact name has priority over patterns, and a more specific pattern over a less specific
    one."""
    litellm_params: LitellmParams
    """Address of the backend, limits of its load, and defaults for requests."""
    model_info: ModelInfo = Field(default_factory=ModelInfo)
    """Properties of the model."""
    unisono: ModelSettings = Field(default_factory=ModelSettings)
    """Settings that LiteLLM does not have."""

    @model_validator(mode="after")
    def _mode_is_consistent(self) -> ModelEntry:
        if self.model_info.harmony and self.mode is not ModelMode.CHAT:
            raise ValueError(
                f"`model_info.harmony` is true, but models of the mode `{self.mode}` cannot use Harmony; remove one of "
                "the two keys"
            )
        return self

    @property
    def by_litellm(self) -> bool:
        """True if litellm serves the model, because it belongs to a provider."""
        # A gpt-oss model without a backend kind is a mistake of the operator.
        named = bool(self.kind) or not self.is_gpt_oss
        return not self.harmony and named and is_of_litellm(self.litellm_params.model)

    @property
    def provider(self) -> str:
        """First part of `model`, as written; empty if `model` has no slash."""
        provider, slash, _ = self.litellm_params.model.partition("/")
        return provider if slash else ""

    @property
    def kind(self) -> str:
        """Backend kind or provider in `model`, with aliases resolved; empty if `model` has no slash."""
        return KIND_ALIASES.get(self.provider, self.provider)

    @property
    def backend_model(self) -> str:
        """Model name on the backend."""
        return self.litellm_params.model.partition("/")[2]

    @property
    def display_kind(self) -> str:
        """Backend kind for output on a terminal; ` (pass-through)` follows for pass-through models.

        If litellm serves the model, the text is `litellm`, followed by the provider in parentheses.
        """
        if self.harmony:
            return self.kind
        if self.by_litellm:
            return f"litellm ({self.kind})" if self.kind else "litellm"
        return f"{self.kind} (pass-through)"

    @property
    def mode(self) -> ModelMode:
        """Mode of the model. All modes that generate text become `ModelMode.CHAT`."""
        return ModelMode.CHAT if self.model_info.mode in TEXT_MODES else ModelMode(self.model_info.mode)

    @property
    def harmony(self) -> bool:
        if self.mode is not ModelMode.CHAT:
            return False
        if self.model_info.harmony is not None:
            return self.model_info.harmony
        # Providers render Harmony themselves, so their gpt-oss models are used through the APIs of the providers.
        return self.kind in KINDS and self.is_gpt_oss

    @property
    def is_gpt_oss(self) -> bool:
        # Either of the two names may identify the model, because aliases and folders can have any name. Some names
        # contain `gpt_oss`.
        names = f"{self.model_name} {self.litellm_params.model}".lower().replace("_", "-")
        return "gpt-oss" in names

    @property
    def harmony_hint(self) -> str:
        """Advice for a gpt-oss model configured as `openai/...` with an address; otherwise empty."""
        if self.kind != "openai" or not self.is_gpt_oss or not self.litellm_params.api_base:
            return ""
        return (
            "if api_base is your own server, write the backend kind of the server instead of `openai`, such as "
            f"`model: vllm/{self.backend_model}`; only then does the gateway use Harmony"
        )

    def hints(self) -> Iterator[str]:
        """Yield advice for the operator. Each text begins with the path of a key."""
        if self.harmony_hint:
            yield f"litellm_params.model: {self.harmony_hint}"
        mode = self.model_info.mode
        unused = [key for unit, keys in UNIT_KEYS.items() if unit not in MODE_UNITS.get(mode, ()) for key in keys]
        for section in ("litellm_params", "model_info"):
            for key in unused:
                if getattr(self, section).get_price(key):
                    yield f"{section}.{key}: this price has no effect for models of the mode `{mode}`"


class CredentialSettings(Section):
    """Values that entries of `model_list` use if they name this credential."""

    credential_name: Name
    """Name of the credential, used in `litellm_params.litellm_credential_name`."""
    credential_values: dict[Name, JsonValue] = Field(default_factory=dict, repr=False)
    """Values for keys of `litellm_params`, such as `api_base` and `api_key`."""
    credential_info: dict[Name, JsonValue] = Field(default_factory=dict)
    """Description for people. It has no effect."""
