"""Exclusion of deployments that lack an ability which a request requires."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.route_protocol import RouteRequirements
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_choice import REQUIRED
from unisono.routing.group import DeploymentGroup


def unable_mask(groups: Sequence[DeploymentGroup], demand: RouteRequirements, ruled_out: int) -> int:
    """Return the mask of the deployments that lack an ability which `demand` requires.

    `ruled_out` is the mask of deployments that cannot be used at all. If none of the other deployments may have the
    abilities, returns 0. The request then goes to any deployment, and is refused because of its field. Otherwise, a
    deployment that lacks an ability must not be used, even if all able deployments have failed: these failures are
    temporary, but a refusal of the field is permanent.
    """
    required = demand.preferred_abilities & REQUIRED
    if not required:
        return 0
    unable, is_one_able = 0, False
    for group in groups:
        for live in group.members:
            if live.candidate.bit & ruled_out or live.terms.shadow_of:
                continue
            if _lacks(live, required):
                unable |= live.candidate.bit
            else:
                is_one_able = True
    return unable if is_one_able else 0


def _lacks(live: LiveDeployment, required: frozenset[str]) -> bool:
    """Return whether a deployment is known to lack an ability.

    Before the first successful probe, the abilities are unknown, and the result is False.
    """
    abilities = live.candidate.abilities
    return not required <= abilities and (live.known is not None or bool(abilities))
