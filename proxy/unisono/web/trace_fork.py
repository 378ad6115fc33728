"""Fork of a recording: its prompt, possibly changed, and generated tokens to a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.core.conversation import Effort
from unisono.core.frozen import dataclass
from unisono.engine.journal import JournalEntry, JournalMarker, parts_of
from unisono.errors import InvalidRequest
from unisono.fidelity.fork import Fork, first_difference, fork_at, with_effort, with_tool_result
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import Document, prompts_of

# A fork may be longer than the recorded answer by this number of tokens.
MORE_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class ForkChanges:
    """Position at which an answer is forked, and changes to its prompt.

    `position` is the 0-based index of a generated token: within `step`, or within all steps if `step` is None. For
    `effort` and `tool_result`, None means the recorded value.
    """

    position: int
    step: int | None = None
    effort: Effort | None = None
    tool_result: str | None = None


def fork_of(document: Document, changes: ForkChanges) -> Fork:
    """Fork a recording.

    Raises InvalidRequest if the recording is damaged or incomplete, or if it has no such token, tool result or effort.
    """
    try:
        start = _unchanged(document, changes)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, StopIteration) as error:
        raise InvalidRequest("The recording is damaged.", param="id") from error
    encoding, prompt = load_encoding(), list(start.prompt)
    if changes.tool_result is not None:
        prompt = with_tool_result(encoding, prompt, changes.tool_result)
    if changes.effort is not None:
        prompt = with_effort(encoding, prompt, changes.effort)
    return Fork(prompt, start.generated, start.recorded)


def first_changed_token(start: Fork, position: int, forked: Sequence[int]) -> int | None:
    """Return the index of the first token that differs from the recording, or None.

    `position` is the index of the first token of `forked`. The result is counted from the same token as `position`.
    """
    different = first_difference(start.recorded, forked)
    return None if different is None else position + different


def _unchanged(document: Document, changes: ForkChanges) -> Fork:
    steps, prompts = generated_by_step(document), prompts_of(document)
    # The last step may not have started, such as in a refused request.
    if not steps[-1] and all(step["step"] < len(steps) - 1 for step in document["steps"]):
        steps.pop()
    first = [next(at for at, step in enumerate(document["steps"]) if step["step"] == n) for n in range(len(steps))]
    if any(token is None for at in first for token in prompts[at]):
        raise InvalidRequest(
            "The recording is incomplete because of its size limit and cannot be forked; "
            "raise `unisono.traces.max_bytes` for later recordings.",
            param="id",
        )
    return fork_at(
        [[token for token in prompts[at] if token is not None] for at in first], steps, changes.position, changes.step
    )


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
                # After these edits, the tokens continue a different prompt.
                is_edited = is_edited or not {"moved", "left", "unread"}.isdisjoint(value)
            case list() | tuple() if not is_edited:
                steps[-1] += part
            case _:
                pass
    return steps
