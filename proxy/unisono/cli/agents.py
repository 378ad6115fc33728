"""`unisono config` and `unisono launch`: other programs use the models of a running gateway."""

from __future__ import annotations

import os
import re
import shutil
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click

from unisono.cli.agent_configs import LAUNCHES, PROGRAMS, GatewayTarget
from unisono.cli.terminal import on_one_line
from unisono.core.generation import DEFAULT_CONTEXT
from unisono.core.json_syntax import parsed_json

TIMEOUT_S = 5.0
MAX_LIST_BYTES = 4 * 1024 * 1024
KEY_REJECTED = (401, 403)


class GatewayUnreachable(click.ClickException):
    """The gateway did not return a valid list of models."""


def show_config(program: str, url: str, model: str | None, key_env: str) -> None:
    """Print the configuration of a program for the gateway at `url`.

    If the gateway does not answer, `model` is required, and the context window of gpt-oss is assumed.
    """
    _check_names(url, key_env)
    try:
        target, others = find_target(url, model, key_env)
    except GatewayUnreachable as error:
        if model is None:
            raise
        click.echo(f"Warning: {error.message}. The context window is assumed to be that of gpt-oss.", err=True)
        target, others = GatewayTarget(_origin(url), model, DEFAULT_CONTEXT, key_env), []
    click.echo(PROGRAMS[program].render(target), nl=False)
    if model is None and others:
        # Standard error, so that the configuration can be piped into a file.
        click.echo(f"Other models of this gateway, for --model: {on_one_line(', '.join(others))}", err=True)


def launch(program: str, url: str, model: str | None, key_env: str, arguments: tuple[str, ...]) -> None:
    """Replace this process with an agent that is configured for the gateway."""
    _check_names(url, key_env)
    start = LAUNCHES[program]
    path = shutil.which(program)
    if path is None:
        raise click.ClickException(f"`{program}` is not installed; run `npm install -g {start.package}`")
    target, _ = find_target(url, model, key_env)
    # A gateway without keys accepts any key, but the agents require one.
    key = os.environ.get(key_env) or "none"
    changes = {key_env: key, **start.variables(target, key)}
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    try:
        os.execve(path, [program, *start.arguments(target), *arguments], environment)  # noqa: S606
    except OSError as error:
        raise click.ClickException(
            f"`{path}` cannot be run ({error.strerror}); install it again with `npm install -g {start.package}`"
        ) from error


def find_target(url: str, model: str | None, key_env: str) -> tuple[GatewayTarget, list[str]]:
    """Return `model` of a gateway (None: its first model), and the names of its other models.

    Raises ClickException if the gateway does not answer, rejects the key, or has no model for it.
    """
    contexts = {
        entry["id"]: entry.get("context_length")
        for entry in _list_models(_origin(url), key_env)
        # Models of other modes generate no text.
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry.get("mode", "chat") == "chat"
    }
    if not contexts:
        raise click.ClickException(f"the gateway at {_shown(url)} has no model for this key; use another key")
    name = next(iter(contexts)) if model is None else model
    # The list omits hidden aliases, and names that are accepted only because they match a pattern.
    if name not in contexts:
        click.echo(f"Warning: the gateway does not list the model `{on_one_line(name)}`.", err=True)
    context = contexts.get(name)
    window = context if isinstance(context, int) and context > 0 else DEFAULT_CONTEXT
    return GatewayTarget(_origin(url), name, window, key_env), [other for other in contexts if other != name]


def _list_models(origin: str, key_env: str) -> list[Any]:
    key = os.environ.get(key_env) or "none"
    if not (key.isascii() and key.isprintable()):
        raise click.ClickException(
            f"{key_env} contains characters that are not allowed in a header; set it to a valid key"
        )
    try:
        # The scheme of the address was checked.
        request = Request(f"{origin}/v1/models", headers={"authorization": f"Bearer {key}"})  # noqa: S310
        with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            listed = parsed_json(response.read(MAX_LIST_BYTES))["data"]
    except HTTPError as error:
        error.close()
        if error.code in KEY_REJECTED:
            raise click.ClickException(
                f"the gateway at {_shown(origin)} rejects the key; set {key_env} to a valid key (`unisono keys create`)"
            ) from error
        raise GatewayUnreachable(f"{_shown(origin)}/v1/models answers with status {error.code}; check --url") from error
    except (URLError, OSError, HTTPException) as error:
        raise GatewayUnreachable(
            f"no gateway answers at {_shown(origin)}; start one with `unisono serve`, or pass its URL with --url"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise GatewayUnreachable(
            f"{_shown(origin)} is not a gateway: its model list is invalid; check --url"
        ) from error
    return listed if isinstance(listed, list) else []


def _origin(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _shown(url: str) -> str:
    """Return an address without a user name and password, for a message."""
    before, slashes, address = url.partition("//")
    return before + slashes + address.rpartition("@")[2]


def _check_names(url: str, key_env: str) -> None:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
        raise click.BadParameter("must be an http or https address such as http://localhost:4000", param_hint="--url")
    if not re.fullmatch(r"[A-Za-z_]\w*", key_env, re.ASCII):
        raise click.BadParameter("must be the name of an environment variable", param_hint="--key-env")
