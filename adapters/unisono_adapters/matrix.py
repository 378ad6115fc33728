"""Features by backend kind, as data; the source of `docs/capabilities.md`.

    python -m unisono_adapters.matrix > docs/capabilities.md

A cell states how faithfully a feature works. Tests compare the cells with the adapters' capabilities and the
gateway's responses, so an outdated cell is noticed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

KINDS = ("vllm", "sglang", "llamacpp", "ollama", "mlx_server", "mlx", "replay")


class Support(StrEnum):
    EXACT = "exact"
    """On the exact token ids, in and out."""
    TEXT_EXACT = "text-exact"
    """On the same text, which the backend tokenises itself."""
    REFUSED = "refused"
    """Requesting it is a clear error."""
    NO_EFFECT = "no effect"
    """Accepted as an optional hint and ignored."""
    NONE = "none"
    """Not supported by the backend; the gateway does what is possible without it."""
    NOT_TOLD = "not told"
    """Not reported by the backend; the field is omitted or 0."""


MEANT: Mapping[Support, str] = {
    Support.EXACT: "works on the very token ids",
    Support.TEXT_EXACT: "works on the same text, which the backend tokenises itself",
    Support.REFUSED: "is answered with the error named in the note",
    Support.NO_EFFECT: "is accepted and changes nothing",
    Support.NONE: "is nothing the backend can do",
    Support.NOT_TOLD: "is unknown, since the backend does not say it",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Support of one feature by one kind.

    `note` is printed below the table. For a refused feature, `refusal` is the field in the error and its code.
    """

    support: Support
    note: str = ""
    refusal: tuple[str, str] | None = None


EXACT, TEXT = Cell(Support.EXACT), Cell(Support.TEXT_EXACT)

FORMS: Mapping[str, Cell] = {
    "vllm": EXACT,
    "sglang": EXACT,
    "llamacpp": EXACT,
    "ollama": TEXT,
    "mlx_server": TEXT,
    "mlx": EXACT,
    "replay": EXACT,
}
"""Token or text interface of each kind, which applies to prompts and answers."""

ANYWHERE: Mapping[str, Cell] = dict.fromkeys(KINDS, EXACT)
"""Features of the gateway itself, the same on every kind."""

NO_BIAS = Cell(
    Support.REFUSED, "400 `unsupported_value`: the backend cannot bias tokens.", ("logit_bias", "unsupported_value")
)
UNCONSTRAINED = Cell(Support.NONE, "Asking an adapter for it is refused, never ignored.")
SCHEMAS_ONLY = Cell(
    Support.TEXT_EXACT,
    "Schemas and JSON, no choice between texts; where Ollama shows no markers in raw text, none of them. A marker "
    "inside of a string is not ruled out.",
)
CONSTRAINED: Mapping[str, Cell] = {
    "vllm": Cell(Support.EXACT, "White space between two tokens of JSON has a bound wherever vLLM can be told one."),
    "sglang": Cell(
        Support.EXACT, "White space between two tokens of JSON has a bound only where SGLang was started with one."
    ),
    "llamacpp": EXACT,
    "ollama": SCHEMAS_ONLY,
    "mlx_server": UNCONSTRAINED,
    "mlx": EXACT,
    "replay": UNCONSTRAINED,
}
"""Constraints of each kind; `response_format` and `tool_choice` work without them, too."""
JUDGED = (
    "The answer is held until it is complete, judged, and written again where it is not what was asked for, twice at "
    "most. If that is not enough it comes as a refusal, and `unisono.unmet` says why."
)
NAMED_FREELY = "Arguments are judged and written again in the same way; `unisono.unmet` says where a call was not had."
FORMATS: Mapping[str, Cell] = {
    **FORMS,
    "mlx_server": Cell(Support.TEXT_EXACT, JUDGED),
    "replay": Cell(Support.EXACT, JUDGED),
}
CHOICES: Mapping[str, Cell] = {
    **FORMS,
    "mlx_server": Cell(Support.TEXT_EXACT, NAMED_FREELY),
    "replay": Cell(Support.EXACT, NAMED_FREELY),
}
"""Requirements on answers and calls, enforced by constraints where available."""
NO_LOGPROBS = Cell(
    Support.REFUSED,
    "400 `unsupported_value`, on every backend.",
    ("logprobs", "unsupported_value"),
)
PLAYED = Cell(Support.NO_EFFECT, "A recording is played as it was made.")
LATE = Cell(
    Support.TEXT_EXACT,
    "Where Ollama shows no markers in raw text (0.30 and newer, by its source), another route is taken, on which an "
    "answer arrives when it is complete; `unisono check` says which.",
)

MATRIX: Mapping[str, Mapping[str, Cell]] = {
    "chat": FORMS,
    "streaming": {**FORMS, "ollama": LATE},
    "tools": FORMS,
    "reasoning": FORMS,
    "prefill": {**FORMS, "ollama": Cell(Support.TEXT_EXACT, "Where raw text shows the markers.")},
    "continuation of an answer that is only analysis": FORMS,
    "token-exact history": FORMS,
    "stop strings": ANYWHERE,
    "cancel by leaving": ANYWHERE,
    "usage counts": {
        **ANYWHERE,
        **dict.fromkeys(
            ("ollama", "mlx_server"), Cell(Support.TEXT_EXACT, "Counted from the text as gpt-oss cuts it.")
        ),
    },
    "cached_tokens": {
        **ANYWHERE,
        "vllm": Cell(Support.EXACT, "vLLM tells them with `--enable-prompt-tokens-details`."),
        "sglang": Cell(Support.EXACT, "SGLang tells them with `--enable-cache-report`."),
        "ollama": Cell(Support.EXACT, "By versions that send `prompt_eval_cached_count`."),
        "replay": Cell(Support.NOT_TOLD),
    },
    "temperature, top_p, top_k, min_p": {**ANYWHERE, "replay": PLAYED},
    "penalties": {**ANYWHERE, "replay": PLAYED},
    "seed": {
        **ANYWHERE,
        "mlx_server": Cell(Support.EXACT, "mlx_lm.server serves a request with a seed alone, outside of its batch."),
        "replay": PLAYED,
    },
    "logit_bias": {**ANYWHERE, "ollama": NO_BIAS, "replay": NO_BIAS},
    "constrained decoding": CONSTRAINED,
    "response_format, text.format, strict tools": FORMATS,
    "tool_choice: required, named, allowed_tools": CHOICES,
    "reasoning budget": FORMS,
    "logprobs": dict.fromkeys(KINDS, NO_LOGPROBS),
}
"""Cells by feature and kind, complete for all features."""


def page() -> str:
    """Return the whole of `docs/capabilities.md`."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# What works on which backend"
    yield ""
    yield "Written by `python -m unisono_adapters.matrix` from `adapters/unisono_adapters/matrix.py`; edit it there."
    yield "`unisono check` examines the backends you have; this is what their kinds can do."
    yield ""
    yield "| | " + " | ".join(f"`{kind}`" for kind in KINDS) + " |"
    yield "| --- " * (len(KINDS) + 1) + "|"
    notes: list[str] = []
    for feature, cells in MATRIX.items():
        yield f"| {feature} | " + " | ".join(_cell(cells[kind], notes) for kind in KINDS) + " |"
    yield ""
    for support, meaning in MEANT.items():
        yield f"- **{support}** {meaning}."
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note}"


def _cell(cell: Cell, notes: list[str]) -> str:
    if not cell.note:
        return cell.support.value
    if cell.note not in notes:
        notes.append(cell.note)
    return f"{cell.support.value} ({notes.index(cell.note) + 1})"


if __name__ == "__main__":
    sys.stdout.write(page())
