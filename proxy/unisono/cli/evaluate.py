"""Command group `unisono eval`."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.cli.options import CommandGroup

EFFORTS = ("low", "medium", "high")
# Exit code of `compare` if the second scorecard is significantly worse.
WORSE = 1


@click.group("eval", cls=CommandGroup)
def evaluate() -> None:
    """Evaluate the models of a running gateway, and compare scorecards."""


@evaluate.command()
@click.option("--url", default="http://localhost:4000", show_default=True, help="Address of the gateway.")
@click.option(
    "--key-env",
    default="UNISONO_API_KEY",
    show_default=True,
    metavar="NAME",
    help="Environment variable with the key of the gateway.",
)
@click.option("--model", "models", multiple=True, required=True, help="Model to evaluate; may be repeated.")
@click.option(
    "--deployment",
    "deployments",
    multiple=True,
    help="Deployment to evaluate, which needs the key of an admin; may be repeated.",
)
@click.option(
    "--effort", "efforts", multiple=True, type=click.Choice(EFFORTS), help="Reasoning effort; may be repeated."
)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    default=("compatibility",),
    show_default=True,
    help="compatibility, bfcl, bfcl:CATEGORY or lm-eval:TASK; may be repeated.",
)
@click.option("--limit", type=click.IntRange(1), help="Maximum cases per suite; the seed determines which.")
@click.option("--seed", default=1, show_default=True, type=int, help="Seed of the selection and of the sampling.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0, 2), help="Temperature.")
@click.option(
    "--max-tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(1),
    help="Maximum tokens per answer, including reasoning.",
)
@click.option("--concurrency", default=4, show_default=True, type=click.IntRange(1, 256), help="Concurrent requests.")
@click.option(
    "--timeout", default=600.0, show_default=True, type=click.FloatRange(1), help="Time limit per answer, in seconds."
)
@click.option(
    "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File for the scorecard, as JSON."
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="File for the scorecard as an HTML page.")
@click.option("--lm-eval", default="lm_eval", show_default=True, help="Command of lm-eval.")
@click.option(
    "--lm-eval-tasks",
    "include",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with further tasks of lm-eval.",
)
def run(
    *,
    url: str,
    key_env: str,
    models: tuple[str, ...],
    deployments: tuple[str, ...],
    efforts: tuple[str, ...],
    suites: tuple[str, ...],
    limit: int | None,
    seed: int,
    temperature: float,
    max_tokens: int,
    concurrency: int,
    timeout: float,
    output: Path,
    html: Path | None,
    lm_eval: str,
    include: Path | None,
) -> None:
    """Run the cases of the suites and write a scorecard.

    An interrupted run continues if it is started again with the same options.
    """
    from unisono.cli.evaluation import EvaluationPlan, key_of, start
    from unisono.evaluation.runner import Settings

    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} does not begin with http:// or https://", param_hint="--url")
    plan = EvaluationPlan(suites, models, deployments, efforts, limit, lm_eval, include)
    settings = Settings(
        url=url.rstrip("/").removesuffix("/v1"),
        key=key_of(key_env),
        seed=seed,
        temperature=temperature,
        max_tokens=max_tokens,
        concurrency=concurrency,
        timeout_s=timeout,
    )
    start(plan, settings, output, html)


@evaluate.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(before: Path, after: Path, *, as_json: bool) -> None:
    """Compare two scorecards, case by case.

    Exit code 1: a suite has significantly fewer correct answers than before.
    """
    from unisono.cli.evaluation import show_comparison

    if show_comparison(before, after, as_json=as_json):
        raise SystemExit(WORSE)
