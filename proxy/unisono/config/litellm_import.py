"""A file of LiteLLM's as one of ours: what has an effect here, and why the rest is not in it.

References to the environment stay references: no secret is read, and none is written that did not stand in the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from unisono.config.load import ENVIRONMENT_PREFIX, parse, read, used
from unisono.config.sections import KIND_ALIASES

HEAD: Final = "# Made from a LiteLLM configuration by `unisono import-litellm`."
LEFT_OUT: Final = "# Not taken over:"
TO_SEE: Final = "# To be looked at:"
_NAMED: Final = re.compile(rf"{ENVIRONMENT_PREFIX}([^\s\"',}}\]]+)")


def imported(path: Path) -> str:
    """The text of a configuration that does the same as far as it can be done. Raises ConfigError."""
    tree, left_out = used(read(path))
    entries = tree.get("model_list") or []
    for entry in entries:
        _as_ours(entry)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    # What it says is checked as at start; what stands in the environment may be anything.
    loaded = parse(yaml.safe_load(text), dict.fromkeys(_NAMED.findall(text), "1"))
    left_out = tuple(line for line in left_out if line not in loaded.warnings)
    return "\n".join([HEAD, *_told(LEFT_OUT, left_out), *_told(TO_SEE, loaded.warnings), text])


def _as_ours(entry: dict[str, Any]) -> None:
    """By the names that things have here."""
    params = entry.get("litellm_params")
    if not isinstance(params, dict):
        return
    params |= params.pop("provider", {})
    kind, slash, name = str(params.get("model", "")).partition("/")
    if slash and kind in KIND_ALIASES:
        params["model"] = f"{KIND_ALIASES[kind]}/{name}"


def _told(heading: str, lines: tuple[str, ...]) -> list[str]:
    return [heading, *(f"#   {line}" for line in lines)] if lines else []
