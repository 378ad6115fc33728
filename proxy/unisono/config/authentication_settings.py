"""Settings for requests without a valid key."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from unisono.config.section import Section
from unisono.net.client_networks import ClientNetworks


def _check_networks(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the value. Raises ValueError for a text that is no address or network."""
    ClientNetworks(value)
    return value


class FailedAuthenticationSettings(Section):
    """Limit of requests with invalid keys, for each client address and process."""

    max_per_minute: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Invalid keys that a client address may send in a minute.
    Further ones get 429. 0 is unlimited. Keys that this process accepted from the address before always pass."""
    trusted_proxies: Annotated[tuple[str, ...], AfterValidator(_check_networks)] = ()
    """Addresses and networks of proxies whose `X-Forwarded-For` names the client address.
    By default `general_settings.trusted_proxy_ranges` with `use_x_forwarded_for`, else no proxy is trusted."""
