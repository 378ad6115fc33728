"""Routing that a client chooses for one request, instead of the operator's configuration."""

from __future__ import annotations

from typing import Final

from unisono.core.frozen import dataclass

# Header by which the operator selects the deployment of a request.
DEPLOYMENT_HEADER: Final = "x-unisono-deployment"


@dataclass(frozen=True, slots=True)
class RequestedRouting:
    """Fallbacks, retries, tags and deployment of one request.

    `fallbacks` are model groups that replace the configured fallbacks; None keeps those. They exist, and the caller may
    use them. With `no_fallbacks`, no other model answers, even if the prompt is too long. `num_retries` is the number
    of attempts after the first one in each group, None for the configured number. `tags` select deployments.
    `deployment` is the name of the only one that may answer, or empty.
    """

    fallbacks: tuple[str, ...] | None = None
    no_fallbacks: bool = False
    num_retries: int | None = None
    tags: tuple[str, ...] = ()
    deployment: str = ""


NO_ROUTING: Final = RequestedRouting()
