"""Implementation of `unisono trace --fork-at`: generates the rest of an answer again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from unisono.cli.backends import open_backends
from unisono.cli.recorded_answers import generated_by_step
from unisono.cli.terminal_escape import harmless
from unisono.core.conversation import Effort
from unisono.core.generation import OutputForm, Sampling
from unisono.errors import UnisonoError
from unisono.fidelity.fork import Fork, common_length, fork_at, with_effort, with_tool_result
from unisono.fidelity.runner import generate
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import Document, prompts_of

# Tokens that a fork may generate beyond the length of the recorded answer.
MORE_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """Changes of a fork. `backend` is empty for the deployment that generated the answer."""

    position: int
    backend: str = ""
    temperature: float = 0.0
    effort: str | None = None
    tool_result: str | None = None


def fork(document: Document, options: ForkOptions, config_path: Path | None, *, as_json: bool) -> None:
    """Generate the forked answer and print it next to the recorded one."""
    try:
        start = _forked(document, options)
        tokens = asyncio.run(_generate(start, options, options.backend or str(document["backend"]), config_path))
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise click.ClickException("this recording is damaged") from error
    same = common_length(start.recorded, tokens)
    is_equal = same == len(start.recorded) == len(tokens)
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


def _forked(document: Document, options: ForkOptions) -> Fork:
    encoding, steps, prompts = load_encoding(), generated_by_step(document), prompts_of(document)
    first = [next(at for at, step in enumerate(document["steps"]) if step["step"] == n) for n in range(len(steps))]
    if any(token is None for at in first for token in prompts[at]):
        raise click.ClickException("this recording is incomplete because of its size limit and cannot be forked")
    whole = [[token for token in prompts[at] if token is not None] for at in first]
    start = fork_at(whole, steps, options.position)
    prompt = list(start.prompt)
    if options.tool_result is not None:
        prompt = with_tool_result(encoding, prompt, options.tool_result)
    if options.effort is not None:
        prompt = with_effort(encoding, prompt, Effort(options.effort))
    return Fork(prompt, start.recorded)


async def _generate(start: Fork, options: ForkOptions, name: str, config_path: Path | None) -> list[int]:
    async with open_backends([name], config_path) as [live]:
        capabilities = (await live.backend.probe()).capabilities
        if not capabilities.prompt is capabilities.output is OutputForm.IDS:
            raise click.ClickException(f"{name}: a fork needs a backend with token ids, such as vllm, llamacpp or mlx")
        sampling = Sampling(temperature=options.temperature)
        return await generate(live.backend, start.prompt, len(start.recorded) + MORE_TOKENS, live.timeouts, sampling)


def _text(tokens: Sequence[int]) -> str:
    return harmless(load_encoding().decode(tokens))
