"""Answers of recordings as samples to score: prompt and generated tokens of each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unisono.cli.trace import newest_documents
from unisono.engine.journal import JournalEntry, JournalMarker, parts_of
from unisono.errors import UnisonoError
from unisono.fidelity.comparison import AnswerSample
from unisono.fidelity.runner import to_sample
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import Document, prompts_of


def recorded_samples(config_path: Path | None, last: int) -> list[AnswerSample]:
    """Return the samples of the newest recordings in the store."""
    return [sample for document in newest_documents(config_path, last) for sample in samples_of(document)]


def samples_of(document: Document) -> Iterator[AnswerSample]:
    """Yield a sample for each step of a recording. Damaged parts and those left out are skipped."""
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


def generated_by_step(document: Document) -> list[list[int]]:
    """Return the tokens generated in each step, up to the first edit by the gateway."""
    steps: list[list[int]] = [[]]
    is_edited = False
    for part in parts_of(document["output"]):
        match part:
            case JournalMarker.STEP_ENDED:
                steps.append([])
                is_edited = False
            case JournalEntry(value=value):
                # After these, the tokens continue another prompt.
                is_edited = is_edited or not {"moved", "left", "unread"}.isdisjoint(value)
            case list() | tuple() if not is_edited:
                steps[-1] += part
            case _:
                pass
    return steps
