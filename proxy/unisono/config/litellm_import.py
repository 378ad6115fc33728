"""Conversion of a LiteLLM configuration to a Unisono configuration.

The result lists settings without effect in comments, with the reason. References to environment variables stay
references. So no secret is read from the environment or written to the result.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml

from unisono.config.config_file import read
from unisono.config.environment_and_credentials import ENVIRONMENT_PREFIX
from unisono.config.load import effective_part, parse
from unisono.config.model_settings import KIND_ALIASES
from unisono.errors import ConfigError

HEAD: Final = "# Converted from a LiteLLM configuration by `unisono import-litellm`."
LEFT_OUT: Final = "# Settings without effect, left out:"
TO_SEE: Final = "# Settings to review:"
TRANSLATED: Final = "# Settings with another form here:"
# Sample values, by section and key, for required keys that do not accept every text.
SAMPLES: Final = {("mcp_servers", "url"): "https://example.com", ("guardrails", "mode"): "pre_call"}


def imported(path: Path, kinds: Mapping[str, str] | None = None) -> str:
    """Return the text of a Unisono configuration that is equivalent to a LiteLLM file.

    `kinds` maps the `api_base` of entries to the backend kinds of their servers. Raises ConfigError if the file cannot
    be read or the result is invalid.
    """
    raw = read(path).tree
    tree, left_out = effective_part(raw)
    # The content of included files is part of the result.
    tree.pop("include", None)
    translated: list[str] = []
    router = tree.get("router_settings")
    # The budget of a provider applies to the entries with its name, so no entry gains or loses such a name.
    budgets = (router.get("provider_budget_config") if isinstance(router, dict) else None) or {}
    for index, entry in enumerate(tree.get("model_list") or []):
        _as_ours(entry, budgets)
        if (kind := _set_kind(entry, kinds or {})) is not None:
            translated.append(f"model_list[{index}].litellm_params.model: the server is {kind}")
    if (url := _store_url(raw)) is not None:
        tree.setdefault("store", {"url": url})
        translated.append("store.url: the Redis of LiteLLM's cache or router")
        if url == REDIS_VARIABLE:
            translated.append(
                "store.url: set REDIS_URL to redis://USER:PASSWORD@HOST:PORT (rediss:// for TLS), because a value "
                "cannot join variables"
            )
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    warnings = _startup_warnings(yaml.safe_load(text))
    # A warning that the result causes too is listed only under the settings to review.
    left_out = tuple(line for line in left_out if line not in warnings)
    notes = (
        *_comment_block(LEFT_OUT, left_out),
        *_comment_block(TRANSLATED, tuple(translated)),
        *_comment_block(TO_SEE, warnings),
    )
    return "\n".join([HEAD, *notes, text])


def _startup_warnings(tree: object) -> tuple[str, ...]:
    """Return the warnings that the result will cause at startup; `tree` is the parsed result.

    The values of environment variables are unknown here, so errors about these values are ignored. Raises ConfigError
    for all other errors.
    """
    references = dict(_references(tree, ""))
    environ = dict.fromkeys((each.removeprefix(ENVIRONMENT_PREFIX) for each in references.values()), "1")
    rejected: set[str] = set()
    while True:
        try:
            return parse(_with_samples(tree, rejected, ""), environ, keeps_protective=True).warnings
        except ConfigError as error:
            # If the value of a variable is read as a list, the error names an element of the list.
            paths = {message.partition(":")[0] for message in error.messages}
            paths |= {re.sub(r"\[\d+\]$", "", path) for path in paths}
            if paths & references.keys() <= rejected:
                raise
            rejected |= paths & references.keys()


def _parts(value: object, path: str) -> list[tuple[Any, object, str]]:
    """Return each key or index in `value`, with the value there and its path."""
    if isinstance(value, Mapping):
        return [(key, inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()]
    return [(i, inner, f"{path}[{i}]") for i, inner in enumerate(value)] if isinstance(value, list) else []


def _references(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each reference to an environment variable, with the reference.

    The path of a list with references is yielded too, because an error about an element may name the list.
    """
    if isinstance(value, str) and value.startswith(ENVIRONMENT_PREFIX):
        yield path, value
    for _, inner, inner_path in _parts(value, path):
        for inside, reference in _references(inner, inner_path):
            yield inside, reference
            if inside == inner_path and isinstance(value, list):
                yield path, reference


def _with_samples(value: object, paths: Container[str], path: str) -> object:
    """Replace the values at `paths` by samples; remove a value that has no sample."""
    kept = {}
    for key, inner, inner_path in _parts(value, path):
        if inner_path not in paths:
            kept[key] = _with_samples(inner, paths, inner_path)
        elif (sample := SAMPLES.get((re.split(r"\W", path)[0], key))) is not None:
            kept[key] = sample
    return kept if isinstance(value, Mapping) else [*kept.values()] if isinstance(value, list) else value


def own_servers(path: Path) -> list[str]:
    """Return the addresses of gpt-oss servers whose models are configured as `openai/...`.

    The backend kinds of these servers are unknown. Addresses that are references to environment variables are left out.
    Raises ConfigError if the file cannot be read.
    """
    tree, _ = effective_part(read(path).tree)
    params = [entry.get("litellm_params") or {} for entry in tree.get("model_list") or [] if _is_generic(entry)]
    addresses = [str(each.get("api_base") or "") for each in params]
    return [*dict.fromkeys(address for address in addresses if address.startswith(("http://", "https://")))]


def _is_generic(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is a gpt-oss model that is configured as `openai/...`."""
    params = entry.get("litellm_params") or {}
    names = f"{entry.get('model_name')} {params.get('model')}".lower().replace("_", "-")
    return str(params.get("model", "")).startswith("openai/") and "gpt-oss" in names


def _set_kind(entry: Mapping[str, Any], kinds: Mapping[str, str]) -> str | None:
    """Replace `openai/` in an entry with the backend kind of its server.

    Returns the kind. If the kind is unknown, returns None and leaves the entry unchanged.
    """
    params = entry.get("litellm_params") or {}
    kind = kinds.get(str(params.get("api_base"))) if _is_generic(entry) else None
    if kind is not None:
        params["model"] = f"{kind}/{params['model'].removeprefix('openai/')}"
    return kind


REDIS_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}REDIS_URL"


def _store_url(raw: object) -> str | None:
    """Return the address of the Redis server in a LiteLLM file; None if it names no server.

    Returns `REDIS_VARIABLE` if parts of the address are in different environment variables.
    """
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
        parts = [values.get(f"{prefix}{name}") for name in ("port", "db", "username", "password", "ssl")]
        if any(isinstance(part, str) and part.startswith(ENVIRONMENT_PREFIX) for part in (host, *parts)):
            return REDIS_VARIABLE
        port, database, user, password, ssl = parts
        credentials = quote(str(user or ""), safe="") + (f":{quote(str(password), safe='')}" if password else "")
        # LiteLLM also reads these texts as true.
        scheme = "rediss" if str(ssl).lower() in {"true", "1", "yes"} else "redis"
        return f"{scheme}://{credentials}{'@' if credentials else ''}{host}:{port or 6379}/{database or 0}"
    return None


def _as_ours(entry: dict[str, Any], kept: Container[str]) -> None:
    """Convert an entry to the form of a Unisono file, in place.

    No name of a provider changes from or to a name in `kept`.
    """
    params = entry.get("litellm_params")
    if not isinstance(params, dict):
        return
    # The loader collects the keys for litellm under `provider`. In a file they are directly in `litellm_params`.
    params |= params.pop("provider", {})
    kind, slash, name = str(params.get("model", "")).partition("/")
    if slash and kind in KIND_ALIASES and kind not in kept and KIND_ALIASES[kind] not in kept:
        params["model"] = f"{KIND_ALIASES[kind]}/{name}"


def _comment_block(heading: str, lines: tuple[str, ...]) -> list[str]:
    return [heading, *(f"#   {line}" for line in lines)] if lines else []
