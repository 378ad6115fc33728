"""Conversion of a LiteLLM configuration to a Unisono configuration.

Settings without effect are listed in comments with the reason. References to the environment stay references, so no
secret is read from the environment or written to the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml

from unisono.config.config_file import read
from unisono.config.environment import ENVIRONMENT_PREFIX
from unisono.config.load import effective_part, parse
from unisono.config.model_settings import KIND_ALIASES

HEAD: Final = "# Converted from a LiteLLM configuration by `unisono import-litellm`."
LEFT_OUT: Final = "# Settings without effect, left out:"
TO_SEE: Final = "# Settings to review:"
TRANSLATED: Final = "# Settings with another form here:"
_NAMED: Final = re.compile(rf"{ENVIRONMENT_PREFIX}([^\s\"',}}\]]+)")


def imported(path: Path, kinds: Mapping[str, str] | None = None) -> str:
    """Return the text of the configuration that is equivalent to a LiteLLM file.

    `kinds` maps the `api_base` of an entry to the backend kind of its server. Raises ConfigError if the file cannot
    be read or the result is invalid.
    """
    raw = read(path).tree
    tree, left_out = effective_part(raw)
    # The files that it included are part of the result.
    tree.pop("include", None)
    translated: list[str] = []
    for index, entry in enumerate(tree.get("model_list") or []):
        _as_ours(entry)
        if (kind := _set_kind(entry, kinds or {})) is not None:
            translated.append(f"model_list[{index}].litellm_params.model: the server is {kind}")
    if (url := _store_url(raw)) is not None:
        tree.setdefault("store", {"url": url})
        translated.append("store.url: the Redis of LiteLLM's cache or router")
        if url == REDIS_VARIABLE:
            translated.append(
                "store.url: set REDIS_URL to redis://:PASSWORD@HOST:PORT, because a value cannot join variables"
            )
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    # Validate the result as at start. Every environment variable counts as set.
    loaded = parse(yaml.safe_load(text), dict.fromkeys(_NAMED.findall(text), "1"), keeps_protective=True)
    # A warning that the result still causes is listed once, under the settings to review.
    left_out = tuple(line for line in left_out if line not in loaded.warnings)
    notes = (
        *_comment_block(LEFT_OUT, left_out),
        *_comment_block(TRANSLATED, tuple(translated)),
        *_comment_block(TO_SEE, loaded.warnings),
    )
    return "\n".join([HEAD, *notes, text])


def own_servers(path: Path) -> list[str]:
    """Return the addresses of gpt-oss servers that the file calls `openai/...`.

    Their kind is unknown. Addresses in the environment are left out. Raises ConfigError.
    """
    tree, _ = effective_part(read(path).tree)
    params = [entry.get("litellm_params") or {} for entry in tree.get("model_list") or [] if _is_generic(entry)]
    addresses = [str(each.get("api_base") or "") for each in params]
    return [*dict.fromkeys(address for address in addresses if address.startswith(("http://", "https://")))]


def _is_generic(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is a gpt-oss model on a server of unknown kind."""
    params = entry.get("litellm_params") or {}
    names = f"{entry.get('model_name')} {params.get('model')}".lower().replace("_", "-")
    return str(params.get("model", "")).startswith("openai/") and "gpt-oss" in names


def _set_kind(entry: Mapping[str, Any], kinds: Mapping[str, str]) -> str | None:
    """Write the kind of the server into an entry of unknown kind, and return it."""
    params = entry.get("litellm_params") or {}
    kind = kinds.get(str(params.get("api_base"))) if _is_generic(entry) else None
    if kind is not None:
        params["model"] = f"{kind}/{params['model'].removeprefix('openai/')}"
    return kind


REDIS_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}REDIS_URL"


def _store_url(raw: object) -> str | None:
    """Return the address of the Redis that a file of LiteLLM uses; None if it uses none."""
    sections = raw if isinstance(raw, Mapping) else {}
    router, settings = (sections.get(name) or {} for name in ("router_settings", "litellm_settings"))
    cache = settings.get("cache_params") or {} if isinstance(settings, Mapping) else {}
    for values, prefix in ((router, "redis_"), (cache, "")):
        if not isinstance(values, Mapping) or (not prefix and values.get("type") not in (None, "redis")):
            continue
        url, host = values.get(f"{prefix}url"), values.get(f"{prefix}host")
        if isinstance(url, str):
            return url
        if not isinstance(host, str):
            continue
        parts = [values.get(f"{prefix}{name}") for name in ("port", "password", "db")]
        if any(isinstance(part, str) and part.startswith(ENVIRONMENT_PREFIX) for part in (host, *parts)):
            return REDIS_VARIABLE
        port, password, database = parts
        secret = f":{quote(str(password), safe='')}@" if password else ""
        scheme = "rediss" if values.get(f"{prefix}ssl") else "redis"
        return f"{scheme}://{secret}{host}:{port or 6379}/{database or 0}"
    return None


def _as_ours(entry: dict[str, Any]) -> None:
    """Replace LiteLLM's names by Unisono's, in place."""
    params = entry.get("litellm_params")
    if not isinstance(params, dict):
        return
    # The loader collects litellm's own options under `provider`. In a file they are siblings of the other keys.
    params |= params.pop("provider", {})
    kind, slash, name = str(params.get("model", "")).partition("/")
    if slash and kind in KIND_ALIASES:
        params["model"] = f"{KIND_ALIASES[kind]}/{name}"


def _comment_block(heading: str, lines: tuple[str, ...]) -> list[str]:
    return [heading, *(f"#   {line}" for line in lines)] if lines else []
