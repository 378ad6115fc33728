"""Answers of recordings as samples to score: prompt and generated tokens of each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unisono.cli.trace import newest_documents
from unisono.errors import UnisonoError
from unisono.fidelity.comparison import AnswerSample
from unisono.fidelity.runner import to_sample
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import Document, prompts_of
from unisono.web.trace_fork import generated_by_step


def recorded_samples(config_path: Path | None, last: int) -> list[AnswerSample]:
    """Return the samples of the newest recordings in the store."""
    return [sample for document in newest_documents(config_path, last) for sample in samples_of(document)]


def samples_of(document: Document) -> Iterator[AnswerSample]:
    """Yield a sample for each step of a recording.

    A step without a complete prompt or without generated tokens is skipped. At damaged data, the iteration ends.
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
