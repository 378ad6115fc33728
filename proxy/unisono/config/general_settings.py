"""Section `general_settings`: access to the gateway, and the default model."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, model_validator

from unisono.config.section import Name, Section
from unisono.net.client_networks import ClientNetworks


def _check_networks(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values. Raises ValueError for one that is neither an address nor a network."""
    ClientNetworks(values)
    return values


Networks = Annotated[tuple[str, ...], AfterValidator(_check_networks)]


class GeneralSettings(Section):
    """Access to the gateway, and the default model."""

    master_key: SecretStr | None = None
    """Key of the operator, which clients send as their API key.
    Without it, the gateway serves on loopback only and needs no key."""
    # An empty list permits nobody in LiteLLM, so it must not mean all.
    allowed_ips: Annotated[Networks, Field(min_length=1)] | None = None
    """Addresses and networks that may send requests, such as `10.0.0.0/8`.
    Health checks and the page's files are open to all. The address is that of the connection, behind a proxy that of
    the proxy, unless `use_x_forwarded_for` is set. By default all."""
    use_x_forwarded_for: bool = False
    """True reads the addresses of clients for `allowed_ips` from `X-Forwarded-For`.
    It needs `trusted_proxy_ranges`."""
    trusted_proxy_ranges: Networks = ()
    """Addresses and networks of the proxies whose `X-Forwarded-For` is believed."""
    enforce_user_param: bool = False
    """True rejects requests to models that name no end user.
    They name it in `user` or `safety_identifier`, in Messages in `metadata.user_id`."""
    completion_model: Name | None = None
    """Model for requests that name no model or an unknown one.
    By default such requests are rejected."""

    @property
    def proxies(self) -> tuple[str, ...]:
        """Networks of the trusted proxies; none if `X-Forwarded-For` is ignored."""
        return self.trusted_proxy_ranges if self.use_x_forwarded_for else ()

    # Anybody can send the header, so it must not be believed from every address.
    @model_validator(mode="after")
    def _proxies_are_known(self) -> GeneralSettings:
        if self.allowed_ips and self.use_x_forwarded_for and not self.trusted_proxy_ranges:
            raise ValueError("`use_x_forwarded_for` needs the addresses of the proxies; set `trusted_proxy_ranges`")
        return self

    # An empty key would make every request pass that sends an empty key. This usually means that an environment
    # variable is not set.
    @model_validator(mode="after")
    def _key_is_usable(self) -> GeneralSettings:
        if self.master_key is None:
            return self
        key = self.master_key.get_secret_value()
        if not key.strip():
            raise ValueError("`master_key` is empty; set a key, or remove it to serve on loopback without a key")
        if not all("!" <= letter <= "~" for letter in key):
            raise ValueError("`master_key` must be printable ASCII without spaces, because clients send it in a header")
        return self
