"""Tasks of lm-eval as runs of a scorecard.

lm-eval (MIT, https://github.com/EleutherAI/lm-evaluation-harness) runs as a separate program, in any environment.
Only tasks that generate text are possible through Chat Completions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from unisono.core.route_protocol import DEPLOYMENT_HEADER
from unisono.evaluation.cases import MissingCases
from unisono.evaluation.runner import Settings
from unisono.evaluation.scorecard import CaseResult, EvaluationTarget, Run

PREFIX: Final = "lm-eval"
MAX_ERROR: Final = 2_000


async def run_task(
    task: str, settings: Settings, target: EvaluationTarget, program: str, *, limit: int | None, include: Path | None
) -> list[Run]:
    """Run a task on a target. Return a run for each filter that lm-eval applies to answers.

    `program` is the command that starts lm-eval. `limit` is the maximum number of cases (None: all). `include` is a
    folder with further tasks, or None. Raises MissingCases if lm-eval cannot be started or fails.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        # The key is in this file, which only its owner can read. Every user can read the arguments of a process.
        file = folder / "config.yaml"
        file.touch(0o600)
        file.write_text(json.dumps(_config(task, settings, target, folder, limit, include)))
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *("run", "--config", str(file)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as error:
            raise MissingCases(
                f"lm-eval cannot be started ({error.strerror or error}); run `pip install 'lm-eval[api]'`, "
                "or name its command with --lm-eval."
            ) from error
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        samples = await asyncio.to_thread(_samples, folder)
        if process.returncode or not samples:
            # lm-eval logs its options, including the key.
            text = output.decode(errors="replace").strip().replace(settings.key or "\0", "***")
            raise MissingCases(f"lm-eval returned no samples: {text[-MAX_ERROR:]}")
    return [*_runs(task, target, samples)]


def _config(
    task: str, settings: Settings, target: EvaluationTarget, folder: Path, limit: int | None, include: Path | None
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {settings.key or 'none'}"}
    if target.deployment:
        headers[DEPLOYMENT_HEADER] = target.deployment
    options: dict[str, Any] = {"temperature": settings.temperature, "max_gen_toks": settings.max_tokens}
    if target.effort:
        options["reasoning_effort"] = target.effort
    return {
        "model": "local-chat-completions",
        "model_args": {
            "model": target.model,
            "base_url": f"{settings.url}/v1/chat/completions",
            "num_concurrent": settings.concurrency,
            "timeout": settings.timeout_s,
            "seed": settings.seed,
            "header": headers,
        },
        "tasks": [task],
        "gen_kwargs": options,
        "apply_chat_template": True,
        "log_samples": True,
        "output_path": str(folder / "results"),
        "seed": [settings.seed] * 4,
        **({} if limit is None else {"limit": limit}),
        **({} if include is None else {"include_path": str(include)}),
    }


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of a task. If the task is a group, return those of all its tasks.

    Each sample gets a unique id.
    """
    paths = sorted(folder.rglob("samples_*.jsonl"))
    return [
        {**row, "doc_id": f"{path.stem.removeprefix('samples_').rpartition('_')[0]}/{row['doc_id']}"}
        for path in paths
        # `splitlines` would also split at other line separators, which texts may contain.
        for row in map(json.loads, filter(None, path.read_text("utf-8").split("\n")))
    ]


def _runs(task: str, target: EvaluationTarget, rows: Sequence[dict[str, Any]]) -> Iterator[Run]:
    filters = list(dict.fromkeys(row.get("filter", "none") for row in rows))
    for name in filters:
        suite = f"{PREFIX}:{task}" if len(filters) == 1 else f"{PREFIX}:{task}/{name}"
        results = [_result(row) for row in rows if row.get("filter", "none") == name]
        yield Run(suite, target, results)


def _result(row: dict[str, Any]) -> CaseResult:
    # The first metric of a task is its main one.
    metric = row["metrics"][0]
    if (value := row[metric]) not in (0, 1):
        raise MissingCases(f"The metric '{metric}' of lm-eval must be 0 or 1, but is {value}; choose a different task.")
    return CaseResult(str(row["doc_id"]), "" if value else f"{metric} is 0")
