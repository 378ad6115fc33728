"""Runs of lm-eval on a local task, without network access."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = ROOT / ".envs/lm-eval/bin/lm_eval"
TASKS: Final = Path(__file__).parent / "tasks"
VOCABULARY: Final = ROOT / "proxy/unisono/harmony/vocab/o200k_base.tiktoken"
# tiktoken reads downloaded files by the hash of their address.
ADDRESS: Final = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
# tiktoken uses the tokens of gpt-oss for names with this beginning.
MODEL: Final = "gpt-oss-tiny"
TIMEOUT_S: Final = 240


@dataclass(frozen=True)
class Evaluation:
    """Result of a run: metrics, and for each choice of each question its log-likelihood and whether it is greedy."""

    metrics: dict[str, float]
    likelihoods: list[tuple[float, bool]]


async def evaluate(folder: Path, url: str, *, batch_size: int, key: str = "none") -> Evaluation:
    """Run the task on the server at `url`. Raise AssertionError if lm-eval fails."""
    cache = folder / "tiktoken"
    cache.mkdir(parents=True)
    shutil.copy(VOCABULARY, cache / hashlib.sha1(ADDRESS.encode(), usedforsecurity=False).hexdigest())
    task = Template((TASKS / "colours.yaml").read_text()).substitute(QUESTIONS=TASKS / "questions.jsonl")
    (folder / "colours.yaml").write_text(task)
    arguments = {
        "base_url": f"{url}/v1/completions",
        "model": MODEL,
        "tokenizer_backend": "tiktoken",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--include_path", folder, "--tasks", "colours", "--batch_size", str(batch_size),
        "--output_path", folder / "results", "--log_samples",
        env={
            **os.environ,
            "OPENAI_API_KEY": key,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(folder / "hub"),
            "TIKTOKEN_CACHE_DIR": str(cache),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode(errors="replace")[-4000:]
    return _results(folder / "results")


def _results(folder: Path) -> Evaluation:
    [results] = folder.rglob("results_*.json")
    [samples] = folder.rglob("samples_*.jsonl")
    found: dict[str, Any] = json.loads(results.read_text())["results"]["colours"]
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: int(row["doc_id"]))
    return Evaluation(
        metrics={name: found[name] for name in ("acc,none", "acc_norm,none")},
        likelihoods=[
            (float(value), str(is_greedy) == "True")
            for row in rows
            for [value, is_greedy] in (_pair(answer) for answer in row["filtered_resps"])
        ],
    )


def _pair(answer: Any) -> Any:
    return answer[0] if len(answer) == 1 else answer
