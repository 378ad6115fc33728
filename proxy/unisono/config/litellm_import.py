"""Conversion of a LiteLLM configuration to a Unisono configuration.

Settings without effect are listed in comments with the reason. References to the environment stay references, so no
secret is read from the environment or written to the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from unisono.config.config_file import read
from unisono.config.load import ENVIRONMENT_PREFIX, effective_part, parse
from unisono.config.model_settings import KIND_ALIASES

HEAD: Final = "# Converted from a LiteLLM configuration by `unisono import-litellm`."
LEFT_OUT: Final = "# Settings without effect, left out:"
TO_SEE: Final = "# Settings to review:"
_NAMED: Final = re.compile(rf"{ENVIRONMENT_PREFIX}([^\s\"',}}\]]+)")


def imported(path: Path) -> str:
    """Return the text of the configuration that is equivalent to the LiteLLM file at `path`.

    Raises ConfigError if the file cannot be read or the result is invalid.
    """
    tree, left_out = effective_part(read(path))
    # The files that it included are part of the result.
    tree.pop("include", None)
    entries = tree.get("model_list") or []
    for entry in entries:
        _as_ours(entry)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    # Validate the result as at start. Every environment variable counts as set.
    loaded = parse(yaml.safe_load(text), dict.fromkeys(_NAMED.findall(text), "1"), keeps_protective=True)
    # A warning that the result still causes is listed once, under the settings to review.
    left_out = tuple(line for line in left_out if line not in loaded.warnings)
    return "\n".join([HEAD, *_comment_block(LEFT_OUT, left_out), *_comment_block(TO_SEE, loaded.warnings), text])


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
