"""CPU and memory meter, verdicts, report tables, scenarios and configurations."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from bench import meter, peer_env, report
from bench.__main__ import arguments
from bench.contenders import CONTENDERS, KEY, gateway_config, litellm_config
from bench.sample import COLUMNS, Sample
from bench.scenarios import SCENARIOS, shortened
from bench.tasks import Arm, Scenario, Verdict, Work

SPIN = "import time\nwhile time.process_time() < 0.25: pass\n"
IDLE = "import subprocess, sys, time\n{}\ntime.sleep(60)"
PARENT = IDLE.format(f"subprocess.Popen([sys.executable, '-c', {SPIN + 'time.sleep(60)'!r}])")
REAPER = IDLE.format(f"subprocess.run([sys.executable, '-c', {SPIN!r}])")

WORKERS = {"process itself": SPIN + "time.sleep(60)", "running child": PARENT, "finished child": REAPER}


@pytest.fixture(params=list(WORKERS.values()), ids=list(WORKERS))
def worker(request: pytest.FixtureRequest) -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", request.param], start_new_session=True)
    try:
        yield child.pid
    finally:
        for pid in reversed(meter.process_tree(child.pid)):
            subprocess.run(["kill", str(pid)], check=False)
        child.wait()


def test_the_meter_counts_cpu_and_memory_of_a_process_and_its_children(worker: int) -> None:
    deadline = time.monotonic() + 10
    before, first = -1.0, 0.0
    # The child may still be busy when the sum with its parent reaches this value.
    while (first < 0.25 or first - before > 0.001) and time.monotonic() < deadline:
        time.sleep(0.1)
        before, first = first, meter.cpu_seconds(worker)
    time.sleep(0.1)
    assert 0.25 <= first < 1.0
    assert meter.cpu_seconds(worker) - first < 0.05
    assert 1 < meter.resident_mib(worker) < 200


def test_ps_times_are_parsed_in_all_formats() -> None:
    assert [meter.seconds_of(text) for text in ("0:01.50", " 1:02:03", "2-00:00:01")] == [1.5, 3723.0, 172_801.0]


def sample(cpu: float, faults: int = 0) -> Sample:
    return Sample(cpu_us_per_token=cpu, faults=faults, examples=("text differs",) if faults else ())


RATIO = Scenario(
    "a title",
    (Arm("a", "relay", Work(1, 1)), Arm("b", "unisono", Work(1, 1)), Arm("none", "direct", Work(1, 1))),
    ("cpu_us_per_token", "start_s"),
    (
        Verdict("cpu_us_per_token", "b", "a", aim=7.0),
        Verdict("cpu_us_per_token", "b", "a", difference=True, aim=50),
        Verdict("cpu_us_per_token", "b", "a", aim=6.5, at_least=True),
        Verdict("cpu_us_per_token", "b", "a", aim=8.0, baselines=("none", "none")),
    ),
)


def test_verdicts_compare_rounds_and_use_the_median() -> None:
    samples = {
        "a": [sample(10), sample(20), sample(90)],
        "b": [sample(70), sample(100), sample(540)],
        "none": [sample(2), sample(10), sample(40)],
    }
    ratio, difference, least, added = report.judge(RATIO, samples)
    assert (ratio.value, ratio.is_met) == (6.0, True)
    assert (difference.value, difference.is_met) == (80.0, False)
    assert (least.value, least.is_met) == (6.0, False)
    assert (added.value, added.is_met) == (9.0, False)
    text = report.table("name", RATIO, samples)
    assert "| a | 20.0 (10.0-90.0) | - |" in text
    assert "b / a = **6** (aim ≤ 7: met)" in text
    assert "b - a = **+80.00** (aim ≤ 50: MISSED)" in text
    assert "b / a = **6** (aim ≥ 6.5: MISSED)" in text
    assert "(b - none) / (a - none) = **9** (aim ≤ 8: MISSED)" in text


def test_a_verdict_without_a_baseline_is_the_value() -> None:
    alone = Scenario("t", (Arm("a", "relay", Work(1, 1)),), (), (Verdict("cpu_us_per_token", "a", aim=15.0),))
    [result] = report.judge(alone, {"a": [sample(10), sample(20), sample(90)]})
    assert (result.value, result.is_met) == (20.0, False)
    assert result.line() == "CPU µs/token: a = **20** (aim ≤ 15: MISSED)"


def test_verdicts_of_many_rounds_have_an_interval() -> None:
    rounds = range(20)
    samples = {
        "a": [sample(10 + each) for each in rounds],
        "b": [sample((10 + each) * (5 + each % 3)) for each in rounds],
    }
    ratio, *_ = report.judge(RATIO, samples)
    assert ratio.interval is not None
    low, high = ratio.interval
    assert 5 <= low <= ratio.value == 6 <= high <= 7
    assert f"b / a = **6**, 95 % interval {low:.3f} to {high:.3f} (aim" in ratio.line()


def test_the_aims_are_listed_with_their_results() -> None:
    result = report.judge(RATIO, {"a": [sample(10)], "b": [sample(60)]})
    assert "| name | CPU µs/token: b / a | ≤ 7 | 6 | met |" in report.aims({"name": result})
    assert "| name | CPU µs/token: b - a | ≤ 50 | +50.00 | met |" in report.aims({"name": result})


def test_an_arm_without_samples_has_no_verdict_and_faults_are_reported() -> None:
    samples = {"a": [sample(10, faults=2)], "b": []}
    assert report.judge(RATIO, samples) == []
    assert "**a: 2 FAULTS**, e.g. text differs" in report.table("name", RATIO, samples)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_name_known_contenders_columns_and_arms(name: str) -> None:
    scenario = SCENARIOS[name]
    labels = [arm.label for arm in scenario.arms]
    assert len(set(labels)) == len(labels)
    assert {arm.contender for arm in scenario.arms} <= CONTENDERS.keys()
    assert {*scenario.columns, *(verdict.column for verdict in scenario.verdicts)} <= COLUMNS.keys()
    assert {label for verdict in scenario.verdicts for label in verdict.arms} <= set(labels)
    shorter = [shortened(arm.work) for arm in scenario.arms]
    assert all(work.tokens >= 12 for work in shorter if isinstance(work, Work))


def test_columns_are_fields_of_a_sample() -> None:
    assert COLUMNS.keys() <= set(Sample.__dataclass_fields__)


def test_unknown_names_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["paced", "nonsense"])
    with pytest.raises(SystemExit):
        arguments(["--only", "relay,nobody"])
    assert "nobody" in capsys.readouterr().err


@pytest.mark.parametrize("config", [gateway_config, litellm_config])
def test_gateway_configurations_have_the_backend_and_a_key(config: Callable[[int], str]) -> None:
    assert "api_base: http://127.0.0.1:8123" in config(8123)
    assert f"master_key: {KEY}" in config(8123)


PINNED = {"litellm": (100, "litellm 1.106.2"), "smg": (5, "smg 1.13.0")}


@pytest.mark.parametrize("name", PINNED)
def test_other_gateways_and_their_dependencies_are_pinned(name: str) -> None:
    count, version = PINNED[name]
    pins = [line.partition(" ;")[0] for line in (peer_env.FOLDER / f"{name}.txt").read_text().splitlines()]
    assert len(pins) > count
    assert all(pin.count("==") == 1 for pin in pins)
    assert peer_env.version(name) == version
