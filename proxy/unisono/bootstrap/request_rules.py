"""Rules for requests, as the configuration states them. Part of the composition root."""

from __future__ import annotations

from functools import partial

from unisono.access.failed_authentications import FailedAuthentications
from unisono.access.model_access import fallback_model
from unisono.api.caller_options import ApplyEndUser, RequestRules
from unisono.api.routing_fields import RoutingFields
from unisono.config import Config, ModelRegistry
from unisono.net.client_networks import ClientNetworks


def build_failures(config: Config) -> FailedAuthentications | None:
    """Return the limit for requests with invalid keys, or None if there is no limit."""
    settings = config.unisono.failed_authentication
    if not settings.max_per_minute:
        return None
    proxies = settings.trusted_proxies or config.general_settings.proxies
    return FailedAuthentications(settings.max_per_minute, ClientNetworks(proxies))


def request_rules(config: Config, catalogue: ModelRegistry, apply_end_user: ApplyEndUser | None = None) -> RequestRules:
    """Return the rules for requests to models.

    `apply_end_user` applies the settings of the end user that a request names; None if there are no such settings.
    """
    return RequestRules(
        needs_user=config.general_settings.enforce_user_param,
        guardrails=frozenset(guardrail.guardrail_name for guardrail in config.guardrails),
        routing=RoutingFields(partial(fallback_model, catalogue), config.router_settings.enable_tag_filtering),
        apply_end_user=apply_end_user,
    )
