"""`unisono eval run` against a running gateway with a scripted backend."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm, Refusal, VllmScript
from unisono.cli import main
from unisono.evaluation.cases import bundled_cases
from unisono.evaluation.runner import FinishedCases
from unisono.evaluation.scorecard import CaseResult, EvaluationTarget, Run
from unisono.harmony.encoding import load_encoding

HELLO = load_encoding().encode_marked(
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>BLUE<|return|>"
)
CASES = len(bundled_cases())


async def evaluated(url: str, output: Path, *arguments: str, model: str = "gpt-oss") -> Result:
    command = ["eval", "run", "--url", url, "--model", model, "--output", str(output), *arguments]
    return await asyncio.to_thread(CliRunner().invoke, main, command)


def results_of(path: Path, run: int = 0) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in json.loads(path.read_text())["runs"][run]["results"]}


async def test_a_scorecard_has_every_case_of_every_target(tmp_path: Path) -> None:
    card, page = tmp_path / "card.json", tmp_path / "card.html"
    options = ["--effort", "low", "--effort", "high", "--html", str(page), "--max-tokens", "50", "--temperature", "0.5"]
    async with FakeVllm(tokens=HELLO) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        result = await evaluated(running.url, card, *options)
        sent = [seen.json for seen in fake.requests if not seen.is_probe]
    assert result.exit_code == 0, result.output
    written = json.loads(card.read_text())
    assert [(run["effort"], run["cases"], run["failed"]) for run in written["runs"]] == [
        ("low", CASES, 0),
        ("high", CASES, 0),
    ]
    assert running.url not in card.read_text()
    results = results_of(card)
    assert results["one-word"]["fault"] == ""
    assert results["one-word"]["output_tokens"] == len(HELLO)
    assert results["call-one-argument"]["fault"] == "0 calls instead of 1"
    assert {body["temperature"] for body in sent} == {0.5}
    efforts = [load_encoding().decode(body["prompt"]).partition("Reasoning: ")[2].partition("\n")[0] for body in sent]
    assert set(efforts) == {"low", "high"}
    assert "0 calls instead of 1" in page.read_text()
    assert not (tmp_path / "card.json.partial").exists()


async def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    card = tmp_path / "card.json"
    async with FakeVllm(tokens=HELLO) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        whole = await evaluated(running.url, tmp_path / "whole.json", "--limit", "6")
        assert whole.exit_code == 0, whole.output
        written = json.loads((tmp_path / "whole.json").read_text())
        address = sha256(running.url.encode()).hexdigest()
        settings = {**written["settings"], "url": address, "gateway": written["gateway"]}
        target = {"model": "gpt-oss", "deployment": "", "effort": ""}
        results = [*results_of(tmp_path / "whole.json").values()]
        # Two finished cases, one without an answer, and half a line.
        rows = [settings, *([["compatibility", target, each]] for each in results[:2])]
        rows.append([["compatibility", target, {**results[2], "has_failed": True, "fault": "no answer"}]])
        (tmp_path / "card.json.partial").write_text("".join(json.dumps(row) + "\n" for row in rows) + '[["compat')
        fake.requests.clear()
        other = await evaluated(running.url, card, "--limit", "5")
        assert "belongs to an interrupted run that differs in: limit;" in other.output
        result = await evaluated(running.url, card, "--limit", "6")
        assert result.exit_code == 0, result.output
        sent = [load_encoding().decode(seen.json["prompt"]) for seen in fake.requests if not seen.is_probe]
    questions = {case.id: str(case.body["messages"][-1]["content"]) for case in bundled_cases()}
    asked = [any(questions[each["id"]] in prompt for prompt in sent) for each in results]
    assert asked == [False, False, True, True, True, True]
    assert results_of(card).keys() == results_of(tmp_path / "whole.json").keys()
    faults = {id: each["fault"] for id, each in results_of(card).items()}
    assert faults == {each["id"]: each["fault"] for each in results}
    again = await evaluated(running.url, card)
    assert "exists; choose another --output, or delete the file" in again.output


async def test_a_run_without_all_answers_has_no_scorecard(tmp_path: Path) -> None:
    card = tmp_path / "card.json"
    async with FakeVllm(tokens=HELLO) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        unknown = await evaluated(running.url, tmp_path / "other.json", "--limit", "2", model="other")
        assert unknown.exit_code == 1
        assert "HTTP 404" in unknown.output
        fake.script = lambda _: Refusal(500, b"{}")
        failed = await evaluated(running.url, card, "--limit", "2")
        assert failed.exit_code == 1
        assert "2 cases have no answer, the first one because of: HTTP 50" in failed.output
        assert not card.exists()
        fake.script = lambda _: VllmScript(tokens=HELLO)
        again = await evaluated(running.url, card, "--limit", "2")
    assert again.exit_code == 0, again.output
    assert [each["has_failed"] for each in results_of(card).values()] == [False, False]


async def test_a_case_with_nested_garbage_is_a_fault(tmp_path: Path) -> None:
    nested = load_encoding().encode_marked("<|channel|>final<|message|>" + "[" * 5000 + "\u2028<|return|>")
    async with FakeVllm(tokens=nested) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        result = await evaluated(running.url, tmp_path / "card.json", "--limit", "3")
    assert result.exit_code == 0, result.output


async def test_wrong_options_are_named(tmp_path: Path) -> None:
    async with FakeVllm(tokens=HELLO) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        suite = await evaluated(running.url, tmp_path / "card.json", "--suite", "other")
        missing = await evaluated(running.url, tmp_path / "card.json", "--suite", "bfcl")
        harness = await evaluated(running.url, tmp_path / "card.json", "--suite", "lm-eval:x", "--lm-eval", "/none")
    nobody = await evaluated(running.url, tmp_path / "card.json")
    assert "'other' is not a suite; the suites are compatibility, bfcl" in suite.output
    assert "pip install --no-deps bfcl-eval" in missing.output
    assert "lm-eval cannot be started (No such file or directory)" in harness.output
    assert running.url in nobody.output
    assert not (tmp_path / "card.json").exists()


def test_partly_written_results_of_a_task_count_as_none(tmp_path: Path) -> None:
    path, target = tmp_path / "card.json.partial", EvaluationTarget("gpt-oss", "", "")
    finished = FinishedCases(path, {})
    finished.add(Run("lm-eval:one", target, [CaseResult(str(number), "") for number in range(3)]))
    finished.add(Run("lm-eval:two", target, [CaseResult(str(number), "") for number in range(3)]))
    finished.close()
    path.write_text(path.read_text()[:-40])
    again = FinishedCases(path, {})
    again.close()
    assert len(again.runs_of("lm-eval:one", target)[0].results) == 3
    assert again.runs_of("lm-eval:two", target) == []
