"""Implementation of `unisono trace --fork-at`: generates the rest of an answer again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import click

from unisono.cli.backends import open_backends
from unisono.cli.terminal import harmless
from unisono.core.conversation import Effort
from unisono.core.frozen import dataclass
from unisono.core.generation import OutputForm, Sampling
from unisono.errors import UnisonoError
from unisono.fidelity.fork import Fork, common_length, first_difference
from unisono.fidelity.runner import generate
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import Document
from unisono.web.trace_fork import MORE_TOKENS, ForkChanges, fork_of


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """Options of a fork.

    `position` is the 0-based index of the first token of the answer that is generated again. An empty `backend` means
    the deployment that generated the answer. None leaves the effort or the tool result unchanged.
    """

    position: int
    backend: str = ""
    temperature: float = 0.0
    effort: str | None = None
    tool_result: str | None = None


def fork(document: Document, options: ForkOptions, config_path: Path | None, *, as_json: bool) -> None:
    """Generate the forked answer, and print it next to the recorded answer."""
    try:
        effort = None if options.effort is None else Effort(options.effort)
        start = fork_of(document, ForkChanges(options.position, None, effort, options.tool_result))
        tokens = asyncio.run(_generate(start, options, options.backend or str(document["backend"]), config_path))
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    except LookupError as error:
        raise click.ClickException("this recording is damaged") from error
    same = common_length(start.recorded, tokens)
    is_equal = first_difference(start.recorded, tokens) is None
    if as_json:
        found = {"same": is_equal, "first_difference": None if is_equal else options.position + same}
        click.echo(json.dumps(found | {"recorded": list(start.recorded), "forked": tokens}))
        return
    click.echo(f"in both from token {options.position}: {_text(tokens[:same])}")
    if is_equal:
        click.echo("The fork is the same as the recording.")
        return
    click.echo(f"first difference at token {options.position + same}")
    click.echo(f"recorded: {_text(start.recorded[same:])}")
    click.echo(f"forked:   {_text(tokens[same:])}")


async def _generate(start: Fork, options: ForkOptions, name: str, config_path: Path | None) -> list[int]:
    async with open_backends([name], config_path) as [live]:
        capabilities = (await live.backend.probe()).capabilities
        if not capabilities.prompt is capabilities.output is OutputForm.IDS:
            raise click.ClickException(f"{name}: a fork needs a backend with token ids, such as vllm, llamacpp or mlx")
        sampling = Sampling(temperature=options.temperature)
        return await generate(live.backend, start.prompt, len(start.recorded) + MORE_TOKENS, live.timeouts, sampling)


def _text(tokens: Sequence[int]) -> str:
    return harmless(load_encoding().decode(tokens))
