"""Command line interface: declarations of all commands, with one module per implementation.

Implementations are imported when a command runs, so `unisono --version` starts fast.
"""

from __future__ import annotations

import gc
import signal
import sys
from datetime import datetime
from pathlib import Path

import click

from unisono import __version__
from unisono.cli.evaluate import evaluate
from unisono.cli.keys import is_remote, keys, store_or_gateway
from unisono.cli.mcp import mcp
from unisono.cli.models import models
from unisono.cli.options import CONFIG, CONFIG_REQUIRED, CommandGroup, for_gateway, require_host


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="unisono")
def main() -> None:
    """One OpenAI-compatible gateway that makes every gpt-oss backend reliable."""


@main.command()
@CONFIG
@click.option("--host", default="127.0.0.1", show_default=True, callback=require_host, help="Address to listen on.")
@click.option(
    "--port",
    default=4000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 selects a free one.",
)
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Number of worker processes.")
def serve(config_path: Path | None, host: str, port: int, workers: int) -> None:
    """Serve the models of a configuration.

    Without a configuration, the gateway serves the gpt-oss backends on this machine, or the demo model if there are
    none.
    """
    # Imports take seconds, during which signals may arrive. Without a handler, the system would ignore SIGTERM for the
    # first process of a container. SIGHUP would end the process; blocked, it stays pending until the server handles it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # Startup creates hardly any garbage, so the collector is off until the end of `GatewayServer.startup`.
    gc.disable()
    from unisono.cli.serve import serve as run

    run(config_path, host, port, workers)


@main.command()
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def check(config_path: Path | None, as_json: bool) -> None:
    """Probe every backend of a configuration and the store.

    Without a configuration, the command probes the gpt-oss backends on this machine, or the demo model if there are
    none. Exit code 0: all are usable; 1: some are not; 2: the configuration is invalid.
    """
    from unisono.cli.check import check as run

    run(config_path, as_json=as_json)


@main.command()
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of the model; by default its main branch.")
def pull(model: str, revision: str | None) -> None:
    """Download a model for the `mlx` backend.

    The source is the Hugging Face hub. MODEL is a name such as mlx-community/gpt-oss-20b-MXFP4-Q8. The tokenizer of the
    model is checked. An interrupted download continues where it stopped. `serve` never downloads anything.
    """
    from unisono.cli.pull import run

    run(model, revision)


@main.command()
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(path_type=Path),
    default=Path("config.yaml"),
    show_default=True,
    help="File to write.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(target: Path, force: bool) -> None:
    """Write a first configuration for the backends on this machine.

    It contains the gpt-oss backends on their default ports, or the demo model if there are none.
    """
    from unisono.cli.new_config import init as run

    run(target, force=force)


@main.command("import-litellm")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(path_type=Path),
    help="New file to write; by default the result is printed.",
)
@click.option("--no-probe", is_flag=True, help="Do not probe the servers of `openai/...` models.")
def import_litellm(source: Path, target: Path | None, no_probe: bool) -> None:
    """Convert a LiteLLM configuration for Unisono.

    Settings without effect are listed in comments, with the reason. For gpt-oss models named `openai/...`, the server
    is probed to find its kind.
    """
    from unisono.cli.new_config import import_litellm as run

    run(source, target, probes=not no_probe)


# The choices repeat the keys of the tables in `agent_configs`, because that module is imported only when a command
# runs.
@main.command()
@click.argument("program", type=click.Choice(["codex", "claude", "opencode", "open-webui", "continue"]))
@for_gateway
def config(program: str, url: str, model: str | None, key_env: str) -> None:
    """Print the configuration of a program for a running gateway.

    A comment in the output states where to put the configuration. If the gateway does not answer, --model is required.
    """
    from unisono.cli.agents import show_config

    show_config(program, url, model, key_env)


@main.command()
@click.argument("agent", type=click.Choice(["codex", "claude", "opencode"]))
@click.argument("arguments", metavar="[-- ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@for_gateway
def launch(agent: str, arguments: tuple[str, ...], url: str, model: str | None, key_env: str) -> None:
    """Start an installed coding agent that uses a running gateway.

    No file is changed: the configuration applies to this process only. Arguments after -- are passed to the agent.
    """
    from unisono.cli.agents import launch as run

    run(agent, url, model, key_env, arguments)


@main.command()
def openapi() -> None:
    """Print the OpenAPI document of the gateway.

    GET /openapi.json returns the same document.
    """
    import json

    from unisono.api.openapi import to_document
    from unisono.bootstrap.fastapi_routes import ROUTES

    click.echo(json.dumps(to_document(ROUTES), indent=2))


@main.command()
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Plan to simulate; see docs/simulate.md.")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Configuration whose backends are simulated."
)
@click.option("--model", help="Model of the configuration to simulate.")
@click.option(
    "--speed",
    "speeds",
    multiple=True,
    metavar="NAME=PREFILL,DECODE",
    help="Speed of a deployment in tokens per second.",
)
@click.option("--rate", type=float, help="Conversations that start per second.")
@click.option("--requests", type=int, help="Number of requests.")
@click.option("--seed", type=int, help="Seed of the random traffic.")
@click.option(
    "--strategy", "strategies", multiple=True, help="prefix-aware, least-busy or simple-shuffle; by default all three."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def simulate(
    plan_path: Path | None,
    config_path: Path | None,
    model: str | None,
    speeds: tuple[str, ...],
    rate: float | None,
    requests: int | None,
    seed: int | None,
    strategies: tuple[str, ...],
    as_json: bool,
) -> None:
    """Simulate traffic on planned backends.

    The result contains waiting times, cache hits and rejected requests.
    """
    from unisono.cli.simulate import run

    overrides = {"rate": rate, "requests": requests, "seed": seed, "strategies": strategies or None}
    run(plan_path, config_path, model, speeds, overrides, as_json=as_json)


@main.command()
@store_or_gateway
@click.option(
    "--by",
    type=click.Choice(["key", "model", "served-model", "day", "tenant"]),
    default="key",
    show_default=True,
    help="Grouping of the sums; with --url key, model or day.",
)
@click.option(
    "--since", type=click.DateTime(["%Y-%m-%d"]), help="First day in UTC; by default the first one with usage."
)
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="Last day in UTC; by default the last one with usage.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--chart", "as_chart", is_flag=True, help="Print a bar chart of tokens.")
def usage(
    config_path: Path | None,
    url: str | None,
    key_env: str,
    by: str,
    since: datetime | None,
    until: datetime | None,
    as_csv: bool,
    as_json: bool,
    as_chart: bool,
) -> None:
    """Print token usage and cost.

    With --config, the sums cover all usage records in the store. With --url, they cover the usage that the key may see
    on a running gateway.
    """
    from unisono.cli.usage import days_of, form_of, show, show_remote

    form = form_of(csv=as_csv, json=as_json, chart=as_chart)
    first, last = days_of(since, until)
    if is_remote(config_path, url) and url is not None:
        show_remote(url, key_env, by, first, last, form)
        return
    assert config_path is not None
    show(config_path, by, first, last, form)


@main.command()
@CONFIG
@click.argument("reference")
@click.argument("other")
@click.option("--traces", metavar="N", type=click.IntRange(1), help="Score the newest N recordings of the store.")
@click.option(
    "--prompts",
    "prompts_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Score greedy answers to these prompts: one body of Chat Completions per line. By default a bundled set.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--min-agreement",
    default=0.999,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Minimum share of tokens that both backends consider most likely.",
)
@click.option(
    "--max-divergence",
    default=0.0005,
    show_default=True,
    type=click.FloatRange(0),
    help="Maximum mean divergence of the distributions, in nats.",
)
@click.option(
    "--max-tokens", default=256, show_default=True, type=click.IntRange(1), help="Maximum tokens of each greedy answer."
)
def compare(
    config_path: Path | None,
    reference: str,
    other: str,
    traces: int | None,
    prompts_path: Path | None,
    as_json: bool,
    min_agreement: float,
    max_divergence: float,
    max_tokens: int,
) -> None:
    """Compare the model of two backends, token by token.

    REFERENCE and OTHER are deployments of the configuration, or KIND/MODEL@ADDRESS. Both backends score the same
    answers: recorded answers, or answers that the reference generates greedily. Exit code 0: equal within the limits;
    1: different; 2: the comparison failed.
    """
    from unisono.cli.compare import run
    from unisono.fidelity.comparison import Thresholds

    if traces and prompts_path:
        raise click.UsageError("--traces cannot be combined with --prompts")
    run(
        (reference, other),
        config_path,
        traces=traces or 0,
        prompts_path=prompts_path,
        as_json=as_json,
        limits=Thresholds(min_agreement, max_divergence),
        max_tokens=max_tokens,
    )


@main.command()
@CONFIG
@click.argument("trace", metavar="[ID|FILE.json]", required=False, type=click.Path())
@click.option("--tenant", default="", help="Tenant of the recordings; by default all tenants.")
@click.option("--json", "as_json", is_flag=True, help="Print the recording as JSON.")
@click.option("--replay", is_flag=True, help="Parse the recorded tokens with this version and compare the results.")
@click.option(
    "--last", default=20, show_default=True, type=click.IntRange(1, 10_000), help="Maximum number of listed recordings."
)
@click.option("--fork-at", metavar="N", type=click.IntRange(0), help="Generate the answer again from its token N.")
@click.option(
    "--backend", default="", help="Deployment of the fork, or KIND/MODEL@ADDRESS; by default the recorded one."
)
@click.option(
    "--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="Temperature of the fork."
)
@click.option("--effort", type=click.Choice(["low", "medium", "high"]), help="Different reasoning effort for the fork.")
@click.option("--tool-result", metavar="TEXT", help="Different text for the last tool result before the fork.")
def trace(
    config_path: Path | None,
    trace: str | None,
    tenant: str,
    as_json: bool,
    replay: bool,
    last: int,
    fork_at: int | None,
    backend: str,
    temperature: float,
    effort: str | None,
    tool_result: str | None,
) -> None:
    """Print the recording of an answer.

    A recording contains the prompts, all tokens, and the repairs of the gateway. ID is the x-request-id of the answer.
    Without an argument, the last recordings are listed. Exit codes of --replay: 0 for the same result, 1 for a
    different one, 2 if the recording cannot be replayed.
    """
    if fork_at is not None:
        from unisono.cli.trace import ForkOptions, document_of, fork

        if trace is None or replay:
            raise click.UsageError("--fork-at needs a recording and cannot be combined with --replay")
        options = ForkOptions(fork_at, backend, temperature, effort, tool_result)
        fork(document_of(trace, config_path, tenant), options, config_path, as_json=as_json)
        return
    from unisono.cli.trace import trace as run

    run(trace, config_path, tenant, as_json=as_json, replay=replay, last=last)


@mcp.command("list")
@CONFIG_REQUIRED
@click.argument("server", required=False)
def list_tools(config_path: Path, server: str | None) -> None:
    """List the tools of configured tool servers.

    The list states for each tool whether its calls need approval.
    """
    from unisono.cli.mcp_tools import show

    show(config_path, server)


@mcp.command("call")
@CONFIG_REQUIRED
@click.argument("server")
@click.argument("tool")
@click.argument("arguments", metavar="JSON", default="{}")
def call_tool(config_path: Path, server: str, tool: str, arguments: str) -> None:
    """Run a tool of a configured tool server.

    The result is printed in the form that the model receives.
    """
    from unisono.cli.mcp_tools import call

    call(config_path, server, tool, arguments)


main.add_command(mcp)
main.add_command(keys)
main.add_command(models)
main.add_command(evaluate)
