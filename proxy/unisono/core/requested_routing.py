"""Routing that a client chooses for one request, instead of the operator's configuration."""

from __future__ import annotations

from typing import Final

from unisono.core.frozen import dataclass

# Request header with which the operator selects the deployment of a request.
DEPLOYMENT_HEADER: Final = "x-unisono-deployment"


@dataclass(frozen=True, slots=True)
class RequestedRouting:
    """Fallbacks, retries, tags and deployment of one request.

    `fallbacks` are model groups that replace the configured fallbacks; None keeps the configured fallbacks. It was
    checked that these groups exist and that the caller may use them. With `no_fallbacks`, only the requested model may
    answer, even if the prompt is too long for it. `num_retries` is the number of attempts after the first attempt in
    each group; None for the configured number. `tags` select deployments. `deployment` is the name of the only
    deployment that may answer; empty for no restriction.
    """

    fallbacks: tuple[str, ...] | None = None
    no_fallbacks: bool = False
    num_retries: int | None = None
    tags: tuple[str, ...] = ()
    deployment: str = ""


NO_ROUTING: Final = RequestedRouting()
