"""`unisono simulate` as a command: table, JSON and error messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

UNISONO = str(Path(sys.executable).with_name("unisono"))
DOCS = Path(__file__).parents[2] / "docs" / "simulate.md"
SMALL: dict[str, Any] = {
    "backends": [{"name": "a", "count": 2, "prefill_tps": 8000, "decode_tps": 100}],
    "traffic": {"rate": 0.5},
    "requests": 300,
}
CONFIG: dict[str, Any] = {
    "model_list": [
        {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/gpt-oss", "api_base": "http://a:1", "weight": 3}},
        {
            "model_name": "gpt-oss",
            "litellm_params": {"model": "ollama/gpt-oss", "api_base": "http://b:1", "max_parallel_requests": 2},
        },
        {"model_name": "gpt-oss-20b", "litellm_params": {"model": "vllm/gpt-oss-20b", "api_base": "http://c:1"}},
    ]
}
SPEEDS = ("--speed", "vllm-1=8000,100", "--speed", "ollama-1=1000,30")


def simulate(*arguments: str) -> str:
    completed = subprocess.run(
        [UNISONO, "simulate", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def failed_simulation(*arguments: str) -> str:
    completed = subprocess.run(
        [UNISONO, "simulate", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 1
    assert completed.stdout == ""
    return completed.stderr


def write_file(folder: Path, name: str, data: object) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.slow
def test_the_documented_sample_matches_the_output(tmp_path: Path) -> None:
    plan, sample = re.findall(r"```(?:yaml)?\n((?:# plan|\d+ requests).*?)```", DOCS.read_text(), re.DOTALL)
    path = tmp_path / "plan.yaml"
    path.write_text(plan)
    printed = simulate("--plan", str(path))
    assert printed == sample, f"docs/simulate.md shows another result; its plan now gives:\n{printed}"


def test_every_plan_field_is_documented() -> None:
    from dataclasses import fields

    from unisono.simulation import BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan

    text = DOCS.read_text()
    for kind in (BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan):
        for each in fields(kind):
            assert re.search(rf"\b{each.name}\b", text), each.name


@pytest.mark.slow
def test_json_has_all_figures_and_equal_seeds_give_equal_results(tmp_path: Path) -> None:
    plan = write_file(tmp_path, "plan.yaml", SMALL)
    output = simulate("--plan", plan, "--json")
    assert simulate("--plan", plan, "--json") == output
    assert simulate("--plan", plan, "--json", "--seed", "2") != output
    figures = json.loads(output)["strategies"]
    assert list(figures) == ["prefix-aware", "least-busy", "simple-shuffle"]
    for result in figures.values():
        assert (result["requests"], result["done"], result["refused"]) == (300, 300, 0)
        assert [backend["name"] for backend in result["backends"]] == ["a-1", "a-2"]
        assert 0 < result["first_token_s"]["p50"] <= result["first_token_s"]["p99"] <= result["whole_s"]["p99"]


def test_options_override_the_plan(tmp_path: Path) -> None:
    plan = write_file(tmp_path, "plan.yaml", SMALL)
    figures = json.loads(
        simulate("--plan", plan, "--json", "--requests", "50", "--rate", "5", "--strategy", "least-busy")
    )["strategies"]
    assert list(figures) == ["least-busy"]
    assert figures["least-busy"]["requests"] == 50


@pytest.mark.slow
def test_ten_thousand_requests_take_a_few_seconds() -> None:
    started = time.monotonic()
    output = simulate("--requests", "10000")
    assert "10000 requests" in output
    # A few seconds on an idle machine.
    assert time.monotonic() - started < 30


def test_backends_of_a_configuration_have_its_weights_and_limits(tmp_path: Path) -> None:
    config = write_file(tmp_path, "config.yaml", CONFIG)
    traffic = write_file(tmp_path, "plan.yaml", {"traffic": {"rate": 0.4}, "requests": 500})
    output = simulate("--config", config, "--model", "gpt-oss", "--plan", traffic, *SPEEDS, "--json")
    shares = {
        name: {backend["name"]: backend["share"] for backend in figures["backends"]}
        for name, figures in json.loads(output)["strategies"].items()
    }
    assert shares["simple-shuffle"].keys() == {"vllm-1", "ollama-1"}
    # Three of four requests, or more while the other backend is at its limit.
    assert shares["simple-shuffle"]["vllm-1"] >= 0.74
    assert all(each["vllm-1"] > each["ollama-1"] for each in shares.values())


INVALID_PLANS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "invalid field": (
        {**SMALL, "backends": [{**SMALL["backends"][0], "weight": 0}]},
        "backends[0].weight: must be from 1",
    ),
    "invalid YAML": ("backends: [", "invalid YAML"),
    "a list": ("- 1", "plan.yaml: the plan must be a mapping"),
    "traffic a number": ({**SMALL, "traffic": 7}, "traffic: must be a mapping of names to values"),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("data", "message"), INVALID_PLANS.values(), ids=INVALID_PLANS)
def test_an_invalid_plan_is_an_error_that_names_the_field(
    data: dict[str, Any] | str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    assert message in failed_simulation("--plan", str(path))


def test_a_missing_plan_is_an_error(tmp_path: Path) -> None:
    assert "cannot read the file" in failed_simulation("--plan", str(tmp_path / "none.yaml"))


INVALID_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "a deployment without a speed": (
        ("--model", "gpt-oss", "--speed", "vllm-1=1,1"),
        "--speed ollama-1=PREFILL,DECODE: required",
    ),
    "a speed of an unknown deployment": (
        ("--model", "gpt-oss", *SPEEDS, "--speed", "x=1,1"),
        "--speed x: unknown deployment",
    ),
    "a speed that is not a number": (("--model", "gpt-oss", "--speed", "vllm-1=fast"), "must be NAME=PREFILL,DECODE"),
    "half a speed": (("--model", "gpt-oss", "--speed", "vllm-1=1"), "must be NAME=PREFILL,DECODE"),
    "a negative speed": (
        ("--model", "gpt-oss", "--speed", "vllm-1=-1,1", "--speed", "ollama-1=1,1"),
        "backends[0].prefill_tps: must be from 1",
    ),
    "several models without --model": (
        SPEEDS,
        "--model: required, because the configuration has several models: gpt-oss, gpt-oss-20b",
    ),
    "unknown model": (("--model", "x", *SPEEDS), "--model: unknown model `x`"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), INVALID_OPTIONS.values(), ids=INVALID_OPTIONS)
def test_missing_or_invalid_options_are_reported(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in failed_simulation("--config", write_file(tmp_path, "config.yaml", CONFIG), *arguments)


@pytest.mark.slow
def test_conflicting_sources_of_backends_are_refused(tmp_path: Path) -> None:
    config, plan = write_file(tmp_path, "config.yaml", CONFIG), write_file(tmp_path, "plan.yaml", SMALL)
    assert "both the plan and the configuration define backends" in failed_simulation(
        "--config", config, "--plan", plan, *SPEEDS
    )
    assert "--speed and --model need --config" in failed_simulation("--plan", plan, *SPEEDS)
