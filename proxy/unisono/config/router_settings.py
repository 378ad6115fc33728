"""Sections `router_settings` (choice of backends, retries, fallbacks) and `unisono.hedge`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from unisono.config.budget_settings import ProviderBudget
from unisono.config.section_base import Name, Seconds, Section

FallbackList = tuple[dict[Name, tuple[Name, ...]], ...]
"""Fallback models in LiteLLM's form: `[{model: [fallback, ...]}, ...]`.
The key `*` means every model that has no list of its own."""


class Fallbacks(Section):
    """Fallback models."""

    fallbacks: FallbackList | None = None
    """Models to use when the backends of the requested model have failed or have no free slot.
    The form is `[{model: [fallback, ...]}]`. The key `*` means every model that has no list of its own."""
    default_fallbacks: tuple[Name, ...] | None = None
    """Fallback models for every model that `fallbacks` does not list."""
    context_window_fallbacks: FallbackList | None = None
    """Models to use when a prompt is too long for the requested model, as in `fallbacks`."""


class AliasTarget(Section):
    """Alias with options, as in LiteLLM."""

    model: Name
    """Name of the model in `model_list`."""
    hidden: bool = False
    """True omits the alias from `GET /v1/models`."""


class RouterSettings(Fallbacks):
    """Choice of backends, retries and fallback models."""

    # The names are LiteLLM's names, except for `prefix-aware` and `quality-aware`.
    routing_strategy: Literal["prefix-aware", "least-busy", "simple-shuffle", "quality-aware"] = "prefix-aware"
    """How to choose among the backends of a model.
    `prefix-aware` prefers backends that have cached the prompt and have the least work to do. `least-busy` prefers
    the backend with the fewest requests. `simple-shuffle` alternates by weight. `quality-aware` is like
    `prefix-aware`, but lowers the weight of backends whose answers are faulty more often than those of the others."""
    num_retries: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of further attempts after a failure, each on another backend.
    By default `litellm_settings.num_retries`, else 2."""
    enable_tag_filtering: bool = False
    """True restricts a request with tags to backends that have the tags.
    A request has its tags in `tags` or `metadata.tags`, and an entry in `litellm_params.tags`."""
    tag_filtering_match_any: bool = True
    """True if a backend needs only one of the request's tags, false if it needs all of them."""
    allowed_fails: Annotated[int, Field(ge=0)] = 3
    """Number of consecutive failures of the same kind that are tolerated.
    The next failure opens the circuit breaker of the backend."""
    provider_budget_config: dict[Name, ProviderBudget] = Field(default_factory=dict)
    """Budgets by provider: the first part of `litellm_params.model`, such as `openai` or `vllm`.
    When a budget is spent, requests use deployments of the model at other providers. If the model has no such
    deployment, its requests get 429."""
    cooldown_time: Annotated[float, Field(ge=0)] = 30.0
    """Time without requests for a backend whose circuit breaker has opened, in seconds.
    It doubles with every further failure, up to five minutes."""
    timeout: Seconds | None = None
    """Default for `timeout` of every model, in seconds."""
    stream_timeout: Seconds | None = None
    """Default for `stream_timeout` of every model, in seconds."""
    model_group_alias: dict[Name, Name | AliasTarget] = Field(default_factory=dict)
    """Other names for models in `model_list`, such as `{gpt-4o: gpt-oss-120b}`.
    A `*` in such a name is not a wildcard."""


class HedgeSettings(Section):
    """Second request to another backend if the first backend sends no token for some time."""

    after: Literal["p95"] | Seconds = "p95"
    """Time without a token after which the request is also sent to a second backend, in seconds.
    `p95` is the 95th percentile of the times to the first token in the backend's recent answers."""
