"""The whole configuration file (`Config`), as frozen pydantic models of its sections.

Structure and key names are LiteLLM's where LiteLLM has them. All times are in seconds; the names of Unisono's own keys
contain the unit. The string under a field is the description of the key in `docs/configuration.md`.
"""

from __future__ import annotations

from datetime import tzinfo
from typing import Annotated

from pydantic import Field, SecretStr

from unisono.config.budget_settings import Duration, Money, ZoneName, to_zone
from unisono.config.general_settings import GeneralSettings
from unisono.config.guardrail_settings import GuardrailSettings
from unisono.config.mcp_settings import McpServerSettings, ServerLabel
from unisono.config.model_settings import CredentialSettings, ModelEntry
from unisono.config.router_settings import Fallbacks, RouterSettings
from unisono.config.section_base import Seconds, Section
from unisono.config.store_settings import StoreSettings
from unisono.config.unisono_settings import GatewaySettings
from unisono.core.generation import Timeouts


class LitellmSettings(Fallbacks):
    """Defaults that LiteLLM has in this section. Keys in `router_settings` take precedence."""

    request_timeout: Seconds | None = None
    """Default for `timeout` of every model, in seconds.
    `router_settings.timeout` takes precedence."""
    num_retries: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of further attempts after a failure, each on another backend.
    `router_settings.num_retries` takes precedence."""
    turn_off_message_logging: bool = False
    """True prevents the content of requests and answers from being recorded.
    It turns off `unisono.traces` and `unisono.otel.content`. Metrics and logs never contain such content."""
    max_budget: Money | None = None
    """Maximum cost of all answers in USD per `budget_duration`; 0 means no limit.
    Further requests are refused with 429. Costs are known only for models with prices. By default no limit."""
    budget_duration: Duration | None = None
    """Period after which `max_budget` renews, such as `30d`, `12h` or `1mo` (calendar month).
    By default the budget never renews."""
    timezone: ZoneName = "UTC"
    """IANA time zone for the days, weeks and months of budgets, such as `Europe/Berlin`.
    All gateways that share a store must have the same time zone. A change begins new budget periods."""
    drop_params: bool = False
    """True removes request fields that the provider of a litellm model does not support.
    By default requests with such fields are rejected."""

    @property
    def zone(self) -> tzinfo:
        """Time zone of budget periods."""
        return to_zone(self.timezone)


class Config(Section):
    """The whole configuration. Most components receive only the section that they need."""

    model_list: tuple[ModelEntry, ...] = ()
    """Models and the backends that serve them."""
    general_settings: GeneralSettings = Field(default_factory=GeneralSettings)
    """Access to the gateway, and the default model."""
    litellm_settings: LitellmSettings = Field(default_factory=LitellmSettings)
    """Defaults that LiteLLM has in this section."""
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
    """Further configuration files, with paths relative to the folder of this file.
    Their lists are appended and their sections are merged. It is an error if two files set a key to different
    values."""
    environment_variables: dict[str, SecretStr] = Field(default_factory=dict)
    """Values for `os.environ/NAME`. They take precedence over the environment.
    litellm uses them too, for the models that it serves."""

    @property
    def num_retries(self) -> int:
        # LiteLLM reads `num_retries` in both sections; `router_settings` takes precedence.
        for value in (self.router_settings.num_retries, self.litellm_settings.num_retries):
            if value is not None:
                return value
        return 2

    def timeouts(self, entry: ModelEntry) -> Timeouts:
        """Return the timeouts of an entry.

        As in LiteLLM, a timeout is that of the entry, else that of `router_settings`, else that of `litellm_settings`
        (only the total time), else the default. LiteLLM has no limits for connecting and for the first token.
        """
        params, router, default = entry.litellm_params, self.router_settings, Timeouts()
        return Timeouts(
            connect_s=entry.unisono.connect_timeout_s,
            first_token_s=entry.unisono.first_token_timeout_s,
            silence_s=params.stream_timeout or router.stream_timeout or default.silence_s,
            total_s=params.timeout or router.timeout or self.litellm_settings.request_timeout or default.total_s,
        )
