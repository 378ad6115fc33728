"""Scenario of a gateway shared by a team: enabled features are used, disabled ones are not."""

import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import yaml

from bench.contenders import CONTENDERS, gateway_config
from bench.processes import Cpus, http_call
from bench.rig import Rig, RunningContender
from bench.tasks import Arm, Work
from bench.team import PRICE, Team, sections

SMALL = Work(streams=2, tokens=20, requests=2)

ON = {
    "nothing": (Team(), False, "off", None),
    "keys and metrics": (Team(has_key=True), True, "off", None),
    "all": (Team(has_key=True, has_traces=True), True, "all", "http://127.0.0.1:7002/v1/traces"),
}


@pytest.mark.parametrize(("team", "metrics", "traces", "spans"), ON.values(), ids=ON)
def test_a_configuration_contains_the_enabled_features(
    team: Team, metrics: bool, traces: str, spans: str | None
) -> None:
    config = yaml.safe_load(gateway_config(8123, price=PRICE, team=sections(team, 7001, 7002)))
    settings = config["unisono"]
    assert settings["metrics"] is metrics
    assert ("metrics_listen" in settings) is metrics
    assert settings["traces"] == {"mode": traces}
    assert settings.get("otel", {}).get("endpoint") == spans
    assert config["model_list"][0]["unisono"]["price"]["output"] == 0.5


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("rig")
    with Rig(folder, Cpus()) as rig:
        yield rig


def counts_of(started: RunningContender) -> dict[str, int]:
    counts: dict[str, int] = orjson.loads(http_call(started.monitor, "GET", "/seen")[1])
    return counts


@pytest.mark.slow
def test_enabled_features_are_used(rig: Rig) -> None:
    sample = rig.sample(Arm("an arm", "team+all", SMALL))
    assert sample.examples == ()
    started = rig.start("team+all")
    assert started.key.startswith("sk-uni-")
    deadline = time.monotonic() + 20
    while not all(counts_of(started).values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert all(counts_of(started).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, contender in CONTENDERS.items() if contender.team and not contender.team.has_key]
)
def test_disabled_features_are_not_used(rig: Rig, name: str) -> None:
    assert rig.sample(Arm("an arm", name, SMALL)).examples == ()
    started = rig.start(name)
    assert started.monitor == 0
    assert not started.key.startswith("sk-uni-")
    assert http_call(started.port, "GET", "/metrics")[0] in (401, 404)
