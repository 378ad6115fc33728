"""Section of alerts."""

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
    """URL, which is secret. Private addresses are allowed.
    Metadata services of clouds are not."""
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    """Headers of the requests, such as a token."""
    secret: SecretStr | None = None
    """Secret of the signature in `x-unisono-signature`. By default requests are not signed."""
    timeout_s: Seconds = 10.0
    """Limit for a request, in seconds."""
    retries: Annotated[int, Field(ge=0, le=10)] = 3
    """Repetitions after a network error, a status 429 or 5xx."""


class AlertSettings(Section):
    """Alerts about budgets and health."""

    webhook: WebhookSettings
    """Receiver of the alerts."""
    budget_thresholds: tuple[Fraction, ...] = (0.8, 1.0)
    """Spent fractions of a budget that cause an alert, once in each of its periods."""
    health: bool = True
    """True alerts when a backend or the store does not work, and when it works again."""
    down_after_s: Seconds = 30.0
    """Time after which a backend or a store that does not work causes an alert, in seconds."""
    repeat_s: Seconds = 3600.0
    """Time within which equal alerts are sent once, in seconds."""
