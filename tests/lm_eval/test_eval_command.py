"""`unisono eval run` with a task of lm-eval, against a gateway with a scripted backend."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from string import Template

import pytest
from click.testing import CliRunner

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from tests.lm_eval.evaluation import PROGRAM, TASKS
from unisono.cli import main
from unisono.harmony.encoding import load_encoding

GREEN = load_encoding().encode_marked("<|channel|>final<|message|>Green<|return|>")


@pytest.mark.slow
async def test_a_task_becomes_a_run_of_the_scorecard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    questions = TASKS / "questions.jsonl"
    (tasks / "echo.yaml").write_text(Template((TASKS / "echo.yaml").read_text()).substitute(QUESTIONS=questions))
    card = tmp_path / "card.json"
    async with FakeVllm(tokens=GREEN) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        command = [
            *("eval", "run", "--url", running.url, "--model", "gpt-oss", "--deployment", "vllm-1", "--effort", "high"),
            *("--suite", "lm-eval:echo", "--lm-eval", str(PROGRAM), "--lm-eval-tasks", str(tasks)),
            *("--output", str(card)),
        ]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
        sent = [seen.json for seen in fake.requests if not seen.is_probe]
    assert result.exit_code == 0, result.output
    [run] = json.loads(card.read_text())["runs"]
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    assert (run["suite"], run["deployment"], run["cases"]) == ("lm-eval:echo", "vllm-1", len(rows))
    correct = {str(at) for at, row in enumerate(rows) if row["choices"][row["answer"]] == "green"}
    assert {each["id"] for each in run["results"] if not each["fault"]} == correct != set()
    assert "exact_match is 0" in {each["fault"].removesuffix(".0") for each in run["results"]}
    assert all("Reasoning: high" in load_encoding().decode(body["prompt"]) for body in sent)
