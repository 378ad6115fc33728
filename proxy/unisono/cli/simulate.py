"""`unisono simulate`: predicts the performance of backends before they are bought.

The plan is read from a file, from a configuration with the speeds of its deployments, or from options. Options override
the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from unisono.config import Config, load
from unisono.config.config_file import parsed_yaml
from unisono.errors import ConfigError
from unisono.simulation import SimulationPlan, StrategyResult, parse, simulate, to_json, to_table
from unisono.simulation.strategies import serving

# Plan used if neither file nor configuration is given.
EXAMPLE: Mapping[str, object] = {
    "backends": [
        {"name": "fast", "count": 2, "prefill_tps": 8000, "decode_tps": 120, "cache_tokens": 400_000, "weight": 2},
        {"name": "slow", "count": 2, "prefill_tps": 3000, "decode_tps": 50, "cache_tokens": 150_000, "max_batch": 16},
    ],
    "traffic": {"rate": 0.4},
}


def run(
    plan_path: Path | None,
    config_path: Path | None,
    model: str | None,
    speeds: Sequence[str],
    overrides: Mapping[str, object],
    *,
    as_json: bool,
) -> None:
    """Simulate every strategy and print the results.

    `overrides` are fields of the plan and of its traffic. Fields with the value None are ignored.
    """
    plan = build_plan(plan_path, config_path, model, speeds, overrides)
    results: list[StrategyResult] = [simulate(plan, name, serving(plan)) for name in plan.strategies]
    if as_json:
        click.echo(json.dumps(to_json(plan, results), indent=2))
    else:
        for line in to_table(plan, results):
            click.echo(line)


def build_plan(
    plan_path: Path | None,
    config_path: Path | None,
    model: str | None,
    speeds: Sequence[str],
    overrides: Mapping[str, object],
) -> SimulationPlan:
    """Build the plan from file, configuration and options. Raises ConfigError."""
    data = dict(_read(plan_path) if plan_path is not None else EXAMPLE)
    if config_path is not None:
        if plan_path is not None and "backends" in data:
            raise ConfigError(
                "backends: both the plan and the configuration define backends; remove them from the plan"
            )
        # The configuration replaces the backends of the example and the queue settings.
        data |= _configured(config_path, model, speeds)
    elif speeds or model:
        raise ConfigError("--speed and --model need --config")
    traffic = data.get("traffic", {})
    fields = {name: value for name, value in overrides.items() if value is not None}
    # `rate` belongs to the traffic; all other options are fields of the plan.
    if isinstance(traffic, Mapping) and "rate" in fields:
        data["traffic"] = {**traffic, "rate": fields.pop("rate")}
    return parse(data | fields)


def _read(path: Path) -> dict[str, object]:
    data = parsed_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the plan must be a mapping")
    return data


def _configured(path: Path, model: str | None, speeds: Sequence[str]) -> dict[str, object]:
    """Return the backends of one model group, with the given speeds, and the queue settings.

    `speeds` has one NAME=PREFILL,DECODE text for each deployment. `model` may be None if the configuration has one
    model.
    """
    from unisono.bootstrap.deployments import deployment_names

    config = load(path).config
    names = deployment_names(config.model_list)
    groups = list(dict.fromkeys(entry.model_name for entry in config.model_list))
    if model is None and len(groups) > 1:
        raise ConfigError(f"--model: required, because the configuration has several models: {', '.join(groups)}")
    group = model or next(iter(groups), "")
    if group not in groups:
        raise ConfigError(f"--model: unknown model `{group}`; models: {', '.join(groups) or 'none'}")
    by_backend = dict(_speed(speed) for speed in speeds)
    if unknown := by_backend.keys() - set(names):
        raise ConfigError(f"--speed {min(unknown)}: unknown deployment; deployments: {', '.join(names)}")
    return {
        "backends": [
            _backend(config, index, name, by_backend)
            for index, name in enumerate(names)
            if config.model_list[index].model_name == group
        ],
        "max_queue": config.unisono.max_queue,
        "queue_timeout_s": config.unisono.queue_timeout_s,
    }


def _backend(config: Config, index: int, name: str, speeds: Mapping[str, tuple[float, float]]) -> dict[str, object]:
    if name not in speeds:
        raise ConfigError(f"--speed {name}=PREFILL,DECODE: required, because the configuration does not contain speeds")
    prefill, decode = speeds[name]
    entry = config.model_list[index]
    return {
        "name": name,
        "prefill_tps": prefill,
        "decode_tps": decode,
        "weight": entry.litellm_params.weight,
        "order": entry.litellm_params.order,
        "max_parallel_requests": entry.litellm_params.max_parallel_requests,
        "max_tokens_in_flight": entry.unisono.max_tokens_in_flight,
        "rpm": entry.litellm_params.rpm,
        "tpm": entry.litellm_params.tpm,
    }


def _speed(text: str) -> tuple[str, tuple[float, float]]:
    name, equals, values = text.partition("=")
    try:
        prefill, decode = (float(value) for value in values.split(","))
    except ValueError:
        equals = ""
    if not equals or not name:
        raise ConfigError(f"--speed {text}: must be NAME=PREFILL,DECODE in tokens per second")
    return name, (prefill, decode)
