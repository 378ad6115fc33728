"""Choice of the configuration: the given one, else local backends, else the demo model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from unisono.cli.discover import DiscoveredBackend, discover
from unisono.config import Loaded, load, parse
from unisono.config.environment_and_credentials import MASTER_KEY_VARIABLE
from unisono.core.frozen import dataclass
from unisono.core.install_commands import install_command

# Entry-point group of functions that check whether a `demo` model can run here. Entries are named after backend
# kinds. A function returns None if the model can run, otherwise a text about what is missing.
DEMOS = "unisono.demo"

# Number of recorded demo answers.
MAX_DEMO_RECORDINGS = 50
DEMO_NAME = "gpt-oss-demo"


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Configuration to serve. `remarks` explain to the operator how it was chosen."""

    loaded: Loaded
    remarks: tuple[str, ...] = ()


def prepared(config_path: Path | None, environ: Mapping[str, str] | None = None) -> ResolvedConfig:
    """Return the configuration to serve.

    Local backends are searched only if `config_path` is None.
    """
    if config_path is not None:
        return ResolvedConfig(load(config_path))
    return without_config(asyncio.run(discover()), demo_missing(), os.environ if environ is None else environ)


def without_config(found: list[DiscoveredBackend], missing: str | None, environ: Mapping[str, str]) -> ResolvedConfig:
    """Return a configuration for the backends found, or for the demo model if there are none.

    `missing` is what the embedded demo model lacks, or None if it can run.
    """
    raw, remarks = found_config(found, missing, environ)
    return ResolvedConfig(parse(raw, environ), remarks)


def found_config(
    found: list[DiscoveredBackend], missing: str | None, environ: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration before parsing, and remarks that explain it to the operator.

    The configuration contains the backends found or, if there are none, the embedded demo model. `missing` describes
    what the demo model lacks, or is None if it can run. If the demo model cannot run, every request gets a recorded
    answer.
    """
    if found:
        models = [_entry(backend.model_name, backend.kind, backend.model, backend.api_base) for backend in found]
        remarks = [f"No configuration given; found {b.kind} at {b.api_base} serving {b.model_name}." for b in found]
    elif missing is None:
        models = [_entry(DEMO_NAME, "mlx", "demo")]
        remarks = [
            "No configuration given and no gpt-oss backend found on the usual local ports.",
            "Serving the embedded demo model. It is a tiny model with real Harmony output and no knowledge.",
        ]
    else:
        models = [_entry(DEMO_NAME, "replay", "demo")]
        remarks = [
            "No configuration given and no gpt-oss backend found on the usual local ports.",
            f"The embedded demo model cannot run: {missing}.",
            "Every request gets the same recorded answer instead.",
        ]
    raw: dict[str, Any] = {"model_list": models, "general_settings": {}}
    if found:
        # Applications that request a different, built-in model name also get an answer.
        raw["general_settings"]["completion_model"] = models[0]["model_name"]
    else:
        # The demo model answers only to its own name, so that its answers cannot be mistaken for those of another
        # model. They are recorded to demonstrate the inspector. Answers of a user's own model are private and not
        # recorded.
        raw["unisono"] = {"traces": {"mode": "all", "keep": MAX_DEMO_RECORDINGS}}
        remarks.append("All answers are recorded for the inspector on the web page.")
    if environ.get(MASTER_KEY_VARIABLE):
        raw["general_settings"]["master_key"] = f"os.environ/{MASTER_KEY_VARIABLE}"
    return raw, tuple(remarks)


def _entry(name: str, kind: str, model: str, api_base: str | None = None) -> dict[str, Any]:
    # Discovery has identified the model as gpt-oss. Its name alone may not show it, so `harmony` is set.
    params = {"model": f"{kind}/{model}"} | ({"api_base": api_base} if api_base else {})
    return {"model_name": name, "litellm_params": params, "model_info": {"harmony": True}}


def demo_missing() -> str | None:
    """Return why the embedded demo model cannot run here, or None if it can."""
    for point in entry_points(group=DEMOS, name="mlx"):
        missing: Callable[[], str | None] = point.load()
        return missing()
    return f"the demo model is not installed (`{install_command('demo')}`)"
