"""Section `wake`, for backends that are not always running."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, model_validator

from unisono.config.section import Seconds, Section
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
