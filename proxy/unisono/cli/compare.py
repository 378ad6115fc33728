"""Implementation of `unisono compare`: scores the same answers on two backends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

import click
from pydantic import ValidationError

from unisono.api.chat.inbound import to_generation_request
from unisono.api.chat.schema import ChatRequest
from unisono.cli.backends import LiveBackend, open_backends
from unisono.cli.trace import newest_documents
from unisono.config.config_file import text_of
from unisono.core.access import LOCAL_TENANT, Caller
from unisono.core.json_syntax import parsed_json
from unisono.core.scoring import ScoringBackend
from unisono.errors import ConfigError, UnisonoError
from unisono.fidelity.comparison import AnswerSample, ScoredSample, Thresholds, compare
from unisono.fidelity.report import to_json, to_lines
from unisono.fidelity.runner import generate, score_on_both, to_sample
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import plan_tools
from unisono.observe.recording import Document, prompts_of
from unisono.web.trace_fork import generated_by_step


def recorded_samples(config_path: Path | None, last: int) -> list[AnswerSample]:
    """Return the samples of the newest recordings in the store."""
    return [sample for document in newest_documents(config_path, last) for sample in samples_of(document)]


def samples_of(document: Document) -> Iterator[AnswerSample]:
    """Yield a sample for each step of a recording.

    A step without a complete prompt or without generated tokens is skipped. If the recording is damaged, the iteration
    ends early without an exception.
    """
    try:
        outputs, prompts = generated_by_step(document), prompts_of(document)
        for number, tokens in enumerate(outputs):
            attempts = [at for at, step in enumerate(document["steps"]) if step["step"] == number]
            prompt = [token for token in prompts[attempts[0]] if token is not None] if attempts else []
            if tokens and prompt and len(prompt) == len(prompts[attempts[0]]):
                name = f"{document['id']}{f' step {number}' if len(outputs) > 1 else ''}"
                yield to_sample(load_encoding(), name, prompt, tokens)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, UnisonoError):
        return


DIFFERENT, IMPOSSIBLE = 1, 2
# Date in all prompts, so that the prompts are the same every day.
PROMPT_DATE: Final = "2026-01-01"


class Impossible(click.ClickException):
    exit_code = IMPOSSIBLE


def run(
    names: tuple[str, str],
    config_path: Path | None,
    *,
    traces: int,
    prompts_path: Path | None,
    as_json: bool,
    limits: Thresholds,
    max_tokens: int,
) -> None:
    """Compare two backends, print the report, and exit with the exit code."""
    encoding = load_encoding()
    try:
        samples = recorded_samples(config_path, traces) if traces else None
        prompts = [] if samples is not None else chat_prompts(prompts_path)
        scored = asyncio.run(_scored(names, config_path, samples, prompts, max_tokens))
    except (UnisonoError, ConfigError) as error:
        raise Impossible(str(error)) from error
    except click.ClickException as error:
        raise Impossible(error.message) from error
    comparison = compare(scored, limits)
    if not comparison.total.tokens:
        raise Impossible("no token was scored by both backends")
    if as_json:
        click.echo(json.dumps({"reference": names[0], "other": names[1]} | to_json(comparison, limits, encoding)))
    else:
        click.echo(f"Reference {names[0]}, compared with {names[1]}")
        for line in to_lines(comparison, limits, encoding):
            click.echo(line)
    if limits.exceeded_by(comparison.total):
        raise SystemExit(DIFFERENT)


async def _scored(
    names: tuple[str, str],
    config_path: Path | None,
    samples: Sequence[AnswerSample] | None,
    prompts: Sequence[tuple[str, Sequence[int]]],
    max_tokens: int,
) -> list[ScoredSample]:
    async with open_backends(names, config_path) as (reference, other):
        first, second = [await _scoring(each) for each in (reference, other)]
        if samples is None:
            samples = []
            for name, prompt in prompts:
                tokens = await generate(first, prompt, max_tokens, reference.timeouts)
                samples.append(to_sample(load_encoding(), name, prompt, tokens))
                _report_progress("generated", len(samples), len(prompts))
        if not samples:
            raise click.ClickException("there is no answer to compare")
        scored: list[ScoredSample] = []
        async for one in score_on_both(first, second, samples, reference.timeouts):
            scored.append(one)
            _report_progress("scored", len(scored), len(samples))
        return scored


async def _scoring(live: LiveBackend) -> ScoringBackend:
    try:
        probe = await live.backend.probe()
    except UnisonoError as error:
        raise click.ClickException(f"{live.name}: {error}") from error
    if probe.fatal:
        raise click.ClickException(f"{live.name}: {probe.fatal[0].text}")
    if not probe.capabilities.scores or not isinstance(live.backend, ScoringBackend):
        raise click.ClickException(
            f"{live.name}: this backend does not score given tokens; docs/capabilities.md lists the kinds that do"
        )
    return live.backend


def _report_progress(what: str, done: int, count: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done} of {count} answers {what}", nl=done == count, err=True)


# -- prompts


def chat_prompts(path: Path | None) -> list[tuple[str, Sequence[int]]]:
    """Return the names and tokens of the prompts in a file (None: the bundled set).

    Each line is a request body of Chat Completions, without `model` and with an optional `name`. Raises ClickException
    for an invalid line, and ConfigError for an unreadable file.
    """
    text = (files("unisono.fidelity") / "prompts.jsonl").read_text("utf-8") if path is None else text_of(path)
    renderer = Renderer(load_encoding())
    rows = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [_chat_prompt(renderer, line, f"{path or 'prompts.jsonl'}, line {number}") for number, line in rows]


def _chat_prompt(renderer: Renderer, line: str, where: str) -> tuple[str, Sequence[int]]:
    try:
        body = parsed_json(line)
        if not isinstance(body, dict):
            raise click.ClickException(f"{where}: must be an object")
        name = str(body.pop("name", where.rpartition(", ")[2]))
        request = ChatRequest.model_validate({"model": "compared", **body})
        generation = to_generation_request(
            request, model="compared", today=PROMPT_DATE, caller=Caller(LOCAL_TENANT), request_id="compare"
        )
        conversation = generation.request.conversation
        return name, renderer.prompt(conversation, plan_tools(conversation.all_tools))
    except ValidationError as error:
        first = error.errors()[0]
        raise click.ClickException(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise click.ClickException(f"{where}: not valid JSON: {error}") from error
    except UnisonoError as error:
        raise click.ClickException(f"{where}: {error.message}") from error
