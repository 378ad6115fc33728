"""Section `general_settings`: access to the gateway, and the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, model_validator

from unisono.config.section_base import Name, Section
from unisono.net.client_addresses import ClientNetworks


def _check_networks(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return `values`. Raises ValueError if one of them is not an IP address or network."""
    ClientNetworks(values)
    return values


Networks = Annotated[tuple[str, ...], AfterValidator(_check_networks)]


def _check_master_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    # With an empty master key, every request with an empty key would be accepted. An empty key usually means that an
    # environment variable is empty.
    if not text.strip():
        raise ValueError("must not be empty; set a key, or remove `master_key` to serve on loopback only")
    if not all("!" <= letter <= "~" for letter in text):
        raise ValueError("must be printable ASCII without spaces, because clients send it in a header")
    return key


class GeneralSettings(Section):
    """Access to the gateway, and the default model."""

    master_key: Annotated[SecretStr, AfterValidator(_check_master_key)] | None = None
    """API key of the operator, which has all permissions.
    Without a master key, the gateway serves only on loopback, and requests need no key."""
    # In LiteLLM, an empty list permits no address. So it must not mean all addresses here.
    allowed_ips: Annotated[Networks, Field(min_length=1)] | None = None
    """Addresses and networks that may send requests, such as `10.0.0.0/8`.
    Health checks and the files of the web page are open to all addresses. The checked address is that of the
    connection, which may be a proxy. If `use_x_forwarded_for` is true, the client's address in the header is checked
    instead. By default all addresses."""
    use_x_forwarded_for: bool = False
    """True reads the addresses of clients for `allowed_ips` from `X-Forwarded-For`.
    The header is read only from the proxies in `trusted_proxy_ranges`. If `allowed_ips` is set, `trusted_proxy_ranges`
    is required."""
    trusted_proxy_ranges: Networks = ()
    """Addresses and networks of the proxies whose `X-Forwarded-For` is trusted."""
    enforce_user_param: bool = False
    """True rejects a request to a model if the request does not name an end user.
    A request names the end user in `user` or `safety_identifier`, and in Messages in `metadata.user_id`."""
    completion_model: Name | None = None
    """Model for requests that name no model or an unknown model.
    By default such requests are rejected."""

    @property
    def proxies(self) -> tuple[str, ...]:
        """Networks of the trusted proxies; empty if `X-Forwarded-For` is ignored."""
        return self.trusted_proxy_ranges if self.use_x_forwarded_for else ()

    def hints(self) -> Iterator[str]:
        """Yield messages about settings without effect. Each message begins with the key."""
        # With `allowed_ips`, this combination is an error.
        if self.use_x_forwarded_for and not self.trusted_proxy_ranges:
            yield "use_x_forwarded_for: has no effect without the addresses of the proxies; set `trusted_proxy_ranges`"

    # Any client can send the header, so it must be trusted only from the proxies.
    @model_validator(mode="after")
    def _proxies_are_known(self) -> GeneralSettings:
        if self.allowed_ips and self.use_x_forwarded_for and not self.trusted_proxy_ranges:
            raise ValueError("`use_x_forwarded_for` requires the addresses of the proxies; set `trusted_proxy_ranges`")
        return self
