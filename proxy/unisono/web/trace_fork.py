"""Fork of a recording: a prompt that ends inside the recorded answer, with changes.

The prompt of a fork contains the generated tokens up to a position. It may have a different reasoning effort or a
different last tool result. This module also finds the first token at which a fork differs. It has no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from unisono.core.conversation import Effort
from unisono.core.frozen import dataclass
from unisono.core.generation import END, MESSAGE, START, STOP_TOKENS
from unisono.engine.journal import JournalEntry, JournalMarker, parts_of
from unisono.errors import InvalidRequest
from unisono.harmony.encoding import Encoding, load_encoding
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


EFFORT = re.compile(r"(?<=Reasoning: )(?:low|medium|high)\b")
TOOL_HEADER = " to=assistant"


@dataclass(frozen=True, slots=True)
class Fork:
    """Prompt of a forked answer, and the recorded tokens that followed it.

    The prompt ends with `generated`, the tokens that the recorded step generated before the fork.
    """

    prompt: Sequence[int]
    generated: Sequence[int]
    recorded: Sequence[int]


def fork_at(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], position: int, step: int | None = None
) -> Fork:
    """Fork before the generated token at the 0-based `position`.

    `position` is counted from the beginning of the step with the 0-based number `step`, or over all steps if `step` is
    None. Raises InvalidRequest if there is no such step or token.
    """
    if step is not None:
        if step >= len(outputs):
            raise InvalidRequest(
                f"The recording has {len(outputs)} steps, numbered from 0; there is no step {step}.", param="step"
            )
        prompts, outputs = prompts[step : step + 1], outputs[step : step + 1]
    left = position
    for prompt, output in zip(prompts, outputs, strict=True):
        if left < len(output):
            return Fork([*prompt, *output[:left]], output[:left], output[left:])
        left -= len(output)
    count = sum(map(len, outputs))
    where = "recording" if step is None else "step"
    raise InvalidRequest(
        f"The {where} has {count} generated tokens, numbered from 0; there is no token {position}.", param="at"
    )


def with_effort(encoding: Encoding, prompt: Sequence[int], effort: Effort) -> list[int]:
    """Return the prompt with a different reasoning effort.

    Raises InvalidRequest if the system message has no line with the effort.
    """
    begin, end = _body(prompt, 0)
    text, count = EFFORT.subn(effort.value, encoding.decode(prompt[begin:end]), count=1)
    if not count:
        raise InvalidRequest(
            "The system message of this recording has no line with the reasoning effort; omit 'effort'.", param="effort"
        )
    return [*prompt[:begin], *encoding.encode_text(text), *prompt[end:]]


def with_tool_result(encoding: Encoding, prompt: Sequence[int], text: str) -> list[int]:
    """Return the prompt with a different text in its last tool result.

    Raises InvalidRequest if the prompt contains no tool result.
    """
    for at in reversed([at for at, token in enumerate(prompt) if token == START]):
        begin, end = _body(prompt, at)
        if TOOL_HEADER in encoding.decode(prompt[at:begin]):
            return [*prompt[:begin], *encoding.encode_text(text), *prompt[end:]]
    raise InvalidRequest(
        "There is no tool result before this token; choose a later token, or omit 'tool_result'.", param="tool_result"
    )


def _body(prompt: Sequence[int], start: int) -> tuple[int, int]:
    """Return the bounds of the body of the message that begins at the index `start`.

    The range is empty if the message has no body.
    """
    rest = range(start, len(prompt))
    begin = next((at + 1 for at in rest if prompt[at] == MESSAGE), len(prompt))
    return begin, next((at for at in range(begin, len(prompt)) if prompt[at] == END), len(prompt))


def first_difference(recorded: Sequence[int], forked: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None if there is none.

    The index is 0-based and counted from the fork. If the recorded answer has no stop token, it was truncated. A forked
    answer that merely continues a truncated answer does not differ.
    """
    same = common_length(recorded, forked)
    is_whole = bool(recorded) and recorded[-1] in STOP_TOKENS
    return None if same == len(recorded) and (same == len(forked) or not is_whole) else same


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
