"""Implementation of `unisono keys --url`: the admin API of a running gateway."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from http.client import HTTPException
from math import ceil
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

import click

from unisono.api.admin.fields import NO_MODELS
from unisono.api.admin.key_import import ImportedKey
from unisono.cli.keyring import limit_texts, litellm_rows, print_imported, print_keys, print_new_key
from unisono.cli.param_types import MICRO, written_period
from unisono.cli.terminal import on_one_line
from unisono.core.json_syntax import parsed_json

# Timeout of one request, in seconds.
TIMEOUT_S: Final = 30.0
PAGE_SIZE: Final = 100
# Maximum number of keys in one import request.
IMPORT_SIZE: Final = 100
# Names of states in `unisono keys`, by the status in LiteLLM's API; all other names are the same.
STATES: Final = {"deleted": "revoked", "revoked": "blocked"}
# Fields of the API for limits, keyed by the name of the option.
LIMIT_FIELDS: Final = {
    "rpm": "rpm_limit",
    "tpm": "tpm_limit",
    "max_parallel": "max_parallel_requests",
    "token_budget": "token_budget",
}


Arguments = ParamSpec("Arguments")
Client = TypeVar("Client", bound="AdminClient")
Result = TypeVar("Result")


class AdminClient:
    """Client of the admin API at `url` with the key in the environment variable `key_env`."""

    def __init__(self, url: str, key_env: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise click.BadParameter(f"{url!r} does not begin with http:// or https://", param_hint="--url")
        self._url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._key = os.environ.get(key_env, "")
        if not self._key:
            raise click.ClickException(f"${key_env} is not set; set it to the master key or to the key of an admin")
        if not (self._key.isascii() and self._key.isprintable()):
            raise click.ClickException(
                f"${key_env} contains characters that are not allowed in a header; set it to a valid key"
            )

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a POST request with `body`, or a GET request if it is None. Return the parsed answer.

        Raises `ClickException` with the gateway's error message, or if the gateway does not answer.
        """
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            # The scheme of the address was checked.
            request = Request(quote(self._url + path, safe=":/?&=%[]"), data=data, headers=headers)  # noqa: S310
            with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return parsed_json(answer.read())
        except HTTPError as error:
            raise click.ClickException(_message(error)) from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            raise click.ClickException(f"{self._url}: {error}") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise `ClickException` if the enclosed code cannot read or print an answer."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise click.ClickException(
                f"{self._url}: the answer does not come from a Unisono gateway of this version; check the address"
            ) from error


def reads_answers(
    method: Callable[Concatenate[Client, Arguments], Result],
) -> Callable[Concatenate[Client, Arguments], Result]:
    """Decorate a method of an `AdminClient`, so that it runs in the context `reading`."""

    @wraps(method)
    def read(self: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.reading():
            return method(self, *args, **kwargs)

    return read


class RemoteKeys(AdminClient):
    """Commands on keys of a running gateway."""

    @reads_answers
    def create(self, tenant: str, options: Mapping[str, Any], *, as_json: bool) -> None:
        team = {"team_id": tenant} if tenant else {}
        _print_key(self.send("/key/generate", {**to_body(options), **team}), as_json=as_json)

    @reads_answers
    def show(self, *, as_json: bool) -> None:
        keys = [*self._pages()]
        print_keys(keys, map(_row, keys), as_json=as_json)

    @reads_answers
    def update(self, key_id: str, options: Mapping[str, Any], *, as_json: bool) -> None:
        key = self.send("/key/update", {"key": key_id, **to_body(options)})
        click.echo(json.dumps(key, ensure_ascii=False, indent=2) if as_json else f"Changed {key['token']}.")

    def revoke(self, key_id: str) -> None:
        self.send("/key/delete", {"keys": [key_id]})
        click.echo(f"{key_id} was revoked.")

    @reads_answers
    def rotate(self, key_id: str, grace_s: int, *, as_json: bool) -> None:
        grace = {"grace_period": f"{grace_s}s"} if grace_s else {}
        _print_key(self.send("/key/regenerate", {"key": key_id, **grace}), as_json=as_json)

    @reads_answers
    def import_litellm(self, export: Path, ignored: Sequence[str], *, creates_owners: bool) -> None:
        options = {"ignore": [*ignored], "create_owners": creates_owners}
        rows, found = litellm_rows(export), []
        for first in range(0, len(rows), IMPORT_SIZE):
            answer = self.send("/key/import", {"keys": rows[first : first + IMPORT_SIZE], **options})
            found += [
                ImportedKey(one["name"], one["token"] or "", one["error"] or "", one["created"])
                for one in answer["keys"]
            ]
        print_imported(found)

    def _pages(self) -> Iterator[dict[str, Any]]:
        # Without a status, the API leaves out revoked keys, as LiteLLM does.
        for status in ("", "&status=deleted"):
            page, pages = 1, 1
            while page <= pages:
                query = f"return_full_object=true&sort_order=asc&size={PAGE_SIZE}&page={page}{status}"
                found = self.send(f"/key/list?{query}")
                yield from found["keys"]
                page, pages = page + 1, found["total_pages"]


def _print_key(key: Mapping[str, Any], *, as_json: bool) -> None:
    print_new_key(key, key["token"], key["team_id"] or key["token"], as_json=as_json)


def _message(error: HTTPError) -> str:
    try:
        with error:
            return on_one_line(str(parsed_json(error.read())["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered with status {error.code}"


def to_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request body for options, which are named after fields of a key or its limits."""
    converted: Mapping[str, Callable[[Any], dict[str, Any]]] = {
        "name": lambda name: {"key_alias": name},
        "models": lambda names: {"models": [] if names is None else sorted(names) or [NO_MODELS]},
        "mcp_servers": lambda names: {"object_permission": {"mcp_servers": None if names is None else sorted(names)}},
        # Rounded up, so that a key never expires before the given date.
        "expires_at": lambda at: {"duration": "-1" if at is None else f"{max(1, ceil(at - time.time()))}s"},
        "money_budget": lambda micro: {"max_budget": None if micro is None else micro / MICRO},
        "soft_budget": lambda micro: {"soft_budget": None if micro is None else micro / MICRO},
        "budget_period": lambda period: {"budget_duration": written_period(period)},
        "tags": lambda tags: {"tags": [f"{name}={value}" for name, value in tags.items()]},
        "raw": lambda raw: {"raw": raw},
    }
    body: dict[str, Any] = {}
    for option, given in options.items():
        body |= {LIMIT_FIELDS[option]: given} if option in LIMIT_FIELDS else converted[option](given)
    return body


def _row(key: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        key["token"],
        key["key_alias"] or "-",
        key["team_id"] or key["token"],
        STATES.get(key["status"], key["status"]),
        "never" if key["expires"] is None else str(key["expires"])[:16].replace("T", " "),
        "none" if key["models"] == [NO_MODELS] else ",".join(key["models"]) or "all",
        limit_texts(key),
        str(key["key_name"]).removeprefix("sk-"),
    )
