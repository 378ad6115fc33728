"""Backends that a command names: a deployment of the configuration, or `KIND/MODEL@ADDRESS`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click

from unisono.bootstrap.deployments import build_pool
from unisono.cli.terminal import on_one_line
from unisono.config import Config, ModelRegistry, load, parse
from unisono.core.frozen import dataclass
from unisono.core.generation import Timeouts
from unisono.core.ports import Backend
from unisono.errors import ConfigError
from unisono.routing.pool import RoutingPool


@dataclass(frozen=True, slots=True)
class LiveBackend:
    """Backend that a command uses, with its name on the command line and its time limits."""

    name: str
    backend: Backend
    timeouts: Timeouts


@asynccontextmanager
async def open_backends(names: Sequence[str], config_path: Path | None) -> AsyncIterator[list[LiveBackend]]:
    """Yield the named backends, and close them when the context ends.

    Raises ClickException for an unknown deployment, an invalid address or configuration, or if a name is a deployment
    and there is no configuration.
    """
    pools: dict[str, RoutingPool] = {}
    try:
        if not all(map(_is_address, names)):
            if config_path is None:
                raise click.ClickException("a deployment needs --config; without --config, use KIND/MODEL@ADDRESS")
            pools[""] = _pool(load(config_path).config)
        for name in filter(_is_address, names):
            pools[name] = _pool_at(name)
        yield [_live(name, pools.get(name) or pools[""]) for name in names]
    finally:
        for pool in pools.values():
            await pool.aclose()


def _is_address(name: str) -> bool:
    return "/" in name


def _entry(name: str) -> dict[str, Any]:
    model, _, address = name.partition("@")
    params = {"model": model, **({"api_base": address} if address else {})}
    return {"model_name": "gpt-oss", "litellm_params": params, "model_info": {"harmony": True}}


def _pool_at(name: str) -> RoutingPool:
    """Return a pool with the backend `KIND/MODEL@ADDRESS`.

    Raises ClickException if one of the parts is invalid.
    """
    try:
        return _pool(parse({"model_list": [_entry(name)]}, os.environ).config)
    except ConfigError as error:
        # The messages begin with the path of a key in the generated entry, which the user did not write.
        reasons = "; ".join(message.partition(": ")[2] or message for message in error.messages)
        raise click.ClickException(f"{on_one_line(name)}: not a valid KIND/MODEL@ADDRESS: {reasons}") from error


def _pool(config: Config) -> RoutingPool:
    return build_pool(config, ModelRegistry(config))


def _live(name: str, pool: RoutingPool) -> LiveBackend:
    found = {one.name: one for members in pool.members().values() for one in members if not one.passes}
    deployment = next(iter(found.values())) if _is_address(name) else found.get(name)
    if deployment is None:
        raise click.ClickException(f"unknown deployment {name!r}; the configuration has: {', '.join(found) or 'none'}")
    return LiveBackend(name, deployment.backend, deployment.timeouts)
