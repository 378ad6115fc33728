"""Settings for requests without a valid key."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from unisono.config.section_base import Section
from unisono.net.client_addresses import ClientNetworks


def _check_networks(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return `value` unchanged. Raises ValueError if an entry is not an IP address or network."""
    ClientNetworks(value)
    return value


class FailedAuthenticationSettings(Section):
    """Limit for requests with invalid keys from one address. Each process counts separately."""

    max_per_minute: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Maximum number of requests with an invalid key per minute from one client address.
    Further requests from the address get 429. A key that this process has accepted from the address before is always
    accepted. 0 means no limit."""
    trusted_proxies: Annotated[tuple[str, ...], AfterValidator(_check_networks)] = ()
    """Addresses and networks of proxies whose `X-Forwarded-For` contains the client address.
    By default `general_settings.trusted_proxy_ranges` if `use_x_forwarded_for` is true. Otherwise no proxy is
    trusted."""
