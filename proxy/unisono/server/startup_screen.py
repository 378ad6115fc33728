"""Startup screen for the operator: models, backends, and one command to try."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from unisono.bootstrap.gateway import Gateway
from unisono.config.environment_and_credentials import MASTER_KEY_VARIABLE
from unisono.core.deployments import DeploymentState
from unisono.core.passthrough_request import ModelMode

STATES: Final[Mapping[DeploymentState, str]] = {
    DeploymentState.READY: "ready",
    DeploymentState.UNKNOWN: "not probed yet",
    DeploymentState.FAILING: "last probe failed, will be probed again",
    DeploymentState.RESTING: "failed too often, in cooldown",
    DeploymentState.HALF_OPEN: "recovering from failures",
    DeploymentState.UNFIT: "not usable, run `unisono check` for the reason",
    DeploymentState.DRAINED: "drained, gets no new requests",
    DeploymentState.SHADOW: "shadow, repeats requests of another deployment",
    DeploymentState.QUARANTINED: "quarantined, its tokens differ from those of the reference",
}


def screen_lines(
    gateway: Gateway, address: str, remarks: Sequence[str], key_variable: str = MASTER_KEY_VARIABLE
) -> list[str]:
    """Return the lines of the screen: remarks, address, models with backends, one command.

    `key_variable` is the environment variable of the master key.
    """
    lines = [*remarks, ""] if remarks else []
    lines += [f"Unisono listens on {address}/v1 (web page: {address}/)", ""]
    states = {status.name: status for status in gateway.pool.status()}
    for model, deployments in gateway.pool.members().items():
        lines.append(f"  {model}")
        for deployment in deployments:
            status = states[deployment.name]
            lines.append(f"    {deployment.name}: {STATES[status.state]}")
    names = [name for name, model in gateway.catalogue.listed() if model.mode is ModelMode.CHAT]
    if names:
        lines += ["", "Try it:", "", f"  {curl_line(address, names[0], key_variable if _keyed(gateway) else '')}"]
    lines += ["", "Ctrl-C stops the gateway."]
    return lines


def _keyed(gateway: Gateway) -> bool:
    return gateway.config.general_settings.master_key is not None


def curl_line(address: str, model: str, key_variable: str) -> str:
    """Return a curl command that sends one request to `model`.

    The command reads the key from the environment variable `key_variable`; "" for a gateway without keys.
    """
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"
