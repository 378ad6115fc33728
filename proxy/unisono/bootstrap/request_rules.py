"""Rules for requests of a configuration. Part of the composition root."""

from __future__ import annotations

from functools import partial

from unisono.access.failed_authentications import FailedAuthentications
from unisono.api.body import ApplyEndUser, RequestRules
from unisono.api.routing_fields import RoutingFields
from unisono.bootstrap.models import fallback_model
from unisono.config import Config, ModelRegistry
from unisono.config.authentication_settings import FailedAuthenticationSettings
from unisono.net.client_networks import ClientNetworks


def build_failures(settings: FailedAuthenticationSettings) -> FailedAuthentications | None:
    """Return the limit of requests with invalid keys; None without a limit."""
    if not settings.max_per_minute:
        return None
    return FailedAuthentications(settings.max_per_minute, ClientNetworks(settings.trusted_proxies))


def request_rules(config: Config, catalogue: ModelRegistry, apply_end_user: ApplyEndUser | None = None) -> RequestRules:
    """Return the operator's rules for requests to models."""
    return RequestRules(
        needs_user=config.general_settings.enforce_user_param,
        guardrails=frozenset(guardrail.guardrail_name for guardrail in config.guardrails),
        routing=RoutingFields(partial(fallback_model, catalogue), config.router_settings.enable_tag_filtering),
        apply_end_user=apply_end_user,
    )
