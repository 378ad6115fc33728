"""`unisono simulate` as a planner meets it: a table, JSON, and words for what is wrong."""

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


def simulated(*arguments: str) -> str:
    done = subprocess.run([UNISONO, "simulate", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*arguments: str) -> str:
    done = subprocess.run([UNISONO, "simulate", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr


def written(folder: Path, name: str, data: object) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.slow
def test_the_sample_of_the_documentation_is_what_comes_out(tmp_path: Path) -> None:
    plan, sample = re.findall(r"```(?:yaml)?\n((?:# plan|\d+ requests).*?)```", DOCS.read_text(), re.DOTALL)
    path = tmp_path / "plan.yaml"
    path.write_text(plan)
    printed = simulated("--plan", str(path))
    assert printed == sample, f"docs/simulate.md shows another run; what the policy makes of its plan now:\n{printed}"


def test_every_field_is_in_the_documentation() -> None:
    from dataclasses import fields

    from unisono.simulation import BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan

    text = DOCS.read_text()
    for kind in (BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan):
        for each in fields(kind):
            assert re.search(rf"\b{each.name}\b", text), each.name


@pytest.mark.slow
def test_json_holds_every_figure_and_equal_seeds_are_equal(tmp_path: Path) -> None:
    plan = written(tmp_path, "plan.yaml", SMALL)
    said = simulated("--plan", plan, "--json")
    assert simulated("--plan", plan, "--json") == said
    assert simulated("--plan", plan, "--json", "--seed", "2") != said
    figures = json.loads(said)["strategies"]
    assert list(figures) == ["prefix-aware", "least-busy", "simple-shuffle"]
    for each in figures.values():
        assert (each["requests"], each["done"], each["refused"]) == (300, 300, 0)
        assert [backend["name"] for backend in each["backends"]] == ["a-1", "a-2"]
        assert 0 < each["first_token_s"]["p50"] <= each["first_token_s"]["p99"] <= each["whole_s"]["p99"]


def test_options_win_over_the_file(tmp_path: Path) -> None:
    plan = written(tmp_path, "plan.yaml", SMALL)
    figures = json.loads(
        simulated("--plan", plan, "--json", "--requests", "50", "--rate", "5", "--strategy", "least-busy")
    )["strategies"]
    assert list(figures) == ["least-busy"]
    assert figures["least-busy"]["requests"] == 50


@pytest.mark.slow
def test_ten_thousand_requests_take_a_few_seconds() -> None:
    began = time.monotonic()
    said = simulated("--requests", "10000")
    assert "10000 requests" in said
    # A few on an idle machine.
    assert time.monotonic() - began < 30


def test_a_configuration_gives_backends_with_their_weights_and_limits(tmp_path: Path) -> None:
    config = written(tmp_path, "config.yaml", CONFIG)
    traffic = written(tmp_path, "plan.yaml", {"traffic": {"rate": 0.4}, "requests": 500})
    said = simulated("--config", config, "--model", "gpt-oss", "--plan", traffic, *SPEEDS, "--json")
    shares = {
        name: {backend["name"]: backend["share"] for backend in figures["backends"]}
        for name, figures in json.loads(said)["strategies"].items()
    }
    assert shares["simple-shuffle"].keys() == {"vllm-1", "ollama-1"}
    # Three turns of four, or more where the other one has no room.
    assert shares["simple-shuffle"]["vllm-1"] >= 0.74
    assert all(each["vllm-1"] > each["ollama-1"] for each in shares.values())


WRONG: dict[str, tuple[dict[str, Any] | str, str]] = {
    "a field": ({**SMALL, "backends": [{**SMALL["backends"][0], "weight": 0}]}, "backends[0].weight: must be from 1"),
    "no YAML": ("backends: [", "plan.yaml: the plan cannot be read"),
    "a list": ("- 1", "plan.yaml: the plan must be a mapping"),
    "traffic that is none": ({**SMALL, "traffic": 7}, "traffic: must be a mapping of names to values"),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_a_plan_that_cannot_be_is_an_error_that_names_the_field(
    data: dict[str, Any] | str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    assert message in refused("--plan", str(path))


def test_a_file_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    assert "cannot be read" in refused("--plan", str(tmp_path / "none.yaml"))


UNCLEAR: dict[str, tuple[tuple[str, ...], str]] = {
    "no speed": (("--model", "gpt-oss", "--speed", "vllm-1=1,1"), "--speed ollama-1=PREFILL,DECODE: required"),
    "a speed of nobody": (("--model", "gpt-oss", *SPEEDS, "--speed", "x=1,1"), "--speed x: unknown deployment"),
    "a speed that is none": (("--model", "gpt-oss", "--speed", "vllm-1=fast"), "must be NAME=PREFILL,DECODE"),
    "half a speed": (("--model", "gpt-oss", "--speed", "vllm-1=1"), "must be NAME=PREFILL,DECODE"),
    "a speed below nothing": (
        ("--model", "gpt-oss", "--speed", "vllm-1=-1,1", "--speed", "ollama-1=1,1"),
        "backends[0].prefill_tps: must be from 1",
    ),
    "one of several groups": (
        SPEEDS,
        "--model: required, because the configuration has several models: gpt-oss, gpt-oss-20b",
    ),
    "no such group": (("--model", "x", *SPEEDS), "--model: unknown model `x`"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), UNCLEAR.values(), ids=UNCLEAR)
def test_what_a_configuration_does_not_say_is_asked_for(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    assert message in refused("--config", written(tmp_path, "config.yaml", CONFIG), *arguments)


@pytest.mark.slow
def test_backends_come_from_one_place(tmp_path: Path) -> None:
    config, plan = written(tmp_path, "config.yaml", CONFIG), written(tmp_path, "plan.yaml", SMALL)
    assert "both the plan and the configuration define backends" in refused("--config", config, "--plan", plan, *SPEEDS)
    assert "--speed and --model need --config" in refused("--plan", plan, *SPEEDS)
