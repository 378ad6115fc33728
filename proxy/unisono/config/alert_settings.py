"""Section `alerts`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from unisono.config.section import Name, Seconds, Section
from unisono.net.ssrf_guard import parse_url


def _check_url(url: SecretStr) -> SecretStr:
    if parse_url(url.get_secret_value()) is None:
        raise ValueError("must be a plain http or https URL, such as https://hooks.example.com/alerts")
    return url


Fraction = Annotated[float, Field(gt=0, le=1)]


class WebhookSettings(Section):
    """Address that receives each alert as a POST request with JSON."""

    url: Annotated[SecretStr, AfterValidator(_check_url)]
    """URL of the receiver, which is treated as secret. Private addresses are allowed.
    Addresses of cloud metadata services are not allowed."""
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    """Headers to send with the requests, such as a token."""
    secret: SecretStr | None = None
    """Secret for the signature in `x-unisono-signature`. By default requests are not signed."""
    timeout_s: Seconds = 10.0
    """Time limit for a request, in seconds."""
    retries: Annotated[int, Field(ge=0, le=10)] = 3
    """Maximum number of retries after a network error, or after status 429 or 5xx."""


class AlertSettings(Section):
    """Alerts about budgets and health."""

    webhook: WebhookSettings
    """Receiver of the alerts."""
    budget_thresholds: tuple[Fraction, ...] = (0.8, 1.0)
    """Fractions of a budget. When such a fraction is spent, an alert is sent.
    Each fraction causes at most one alert per budget period."""
    health: bool = True
    """True sends alerts when a backend or the store fails, and when it works again."""
    down_after_s: Seconds = 30.0
    """Time for which a backend or the store must fail before an alert is sent, in seconds."""
    repeat_s: Seconds = 3600.0
    """Time within which the same alert is sent only once, in seconds."""
