"""Features by backend kind, as data; the source of `docs/capabilities.md`.

    python -m tests.docs.capabilities > docs/capabilities.md

A cell states how faithfully a feature works. Tests compare the cells with the adapters' capabilities and the
gateway's responses, so an outdated cell is noticed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum

from unisono.core.frozen import dataclass

KINDS = ("vllm", "sglang", "llamacpp", "ollama", "mlx_server", "mlx", "replay")


class Support(StrEnum):
    # On the exact token ids, in and out.
    EXACT = "exact"
    # On the same text, which the backend tokenises itself.
    TEXT_EXACT = "text-exact"
    # Requesting it is a clear error.
    REFUSED = "refused"
    # Accepted as an optional hint and ignored.
    NO_EFFECT = "no effect"
    # Not supported by the backend; the gateway does what is possible without it.
    NONE = "none"
    # Not reported by the backend; the field is omitted or 0.
    NOT_REPORTED = "not reported"


MEANT: Mapping[Support, str] = {
    Support.EXACT: "means the exact token ids, in prompts and in output",
    Support.TEXT_EXACT: "means the same text, which the backend tokenises itself",
    Support.REFUSED: "means not supported: the request fails with the error in the note",
    Support.NO_EFFECT: "means accepted and ignored",
    Support.NONE: "means that the backend does not support it; the note says what the gateway does instead",
    Support.NOT_REPORTED: "means that the backend does not report it; the field is 0 or absent",
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

# Token or text interface of each kind, which applies to prompts and answers.
FORMS: Mapping[str, Cell] = {
    "vllm": EXACT,
    "sglang": EXACT,
    "llamacpp": EXACT,
    "ollama": TEXT,
    "mlx_server": TEXT,
    "mlx": EXACT,
    "replay": EXACT,
}

# Features of the gateway itself, the same on every kind.
ANYWHERE: Mapping[str, Cell] = dict.fromkeys(KINDS, EXACT)

NO_BIAS = Cell(
    Support.REFUSED, "400 `unsupported_value`: the backend cannot bias tokens.", ("logit_bias", "unsupported_value")
)
UNCONSTRAINED = Cell(Support.NONE, "The adapter refuses constraints; the gateway checks the complete answer instead.")
SCHEMAS_ONLY = Cell(
    Support.TEXT_EXACT,
    "JSON and JSON schemas, but no choice between texts, since its `format` can only give a text in quotes. Not "
    "supported on the `template` route. A marker inside a JSON string is possible.",
)
# Constraints of each kind; `response_format` and `tool_choice` work without them, too.
CONSTRAINED: Mapping[str, Cell] = {
    "vllm": Cell(
        Support.EXACT, "White space between JSON tokens is limited for schemas for which vLLM supports a limit."
    ),
    "sglang": Cell(
        Support.EXACT, "White space between JSON tokens is limited only if SGLang was started with a limit."
    ),
    "llamacpp": Cell(
        Support.EXACT,
        "Schemas with a `pattern` only if it can be written as a grammar with few ways to read a text; the gateway "
        "checks the answers of the others.",
    ),
    "ollama": SCHEMAS_ONLY,
    "mlx_server": UNCONSTRAINED,
    "mlx": EXACT,
    "replay": UNCONSTRAINED,
}
CHECKED = Cell(Support.NONE, "The gateway checks the complete text instead.")
# Grammars of custom tools, and of answers.
TEXT_GRAMMARS: Mapping[str, Cell] = {
    **dict.fromkeys(KINDS, CHECKED),
    "vllm": Cell(
        Support.EXACT,
        "Regular expressions and GBNF grammars. Lark grammars only as far as the grammar engine of the server reads "
        "them; llguidance reads all of them. The gateway checks the other texts.",
    ),
    "sglang": Cell(
        Support.EXACT, "Regular expressions and GBNF grammars. The gateway checks the texts of Lark grammars."
    ),
    "llamacpp": Cell(
        Support.EXACT,
        "GBNF grammars, and regular expressions that can be written as one: no flags, word boundaries or Unicode "
        "classes, and no repetition with several ways to read a text. The gateway checks the other texts.",
    ),
    "mlx": EXACT,
}
JUDGED = (
    "The gateway buffers the answer until it is complete, checks it, and generates an invalid one again, at most "
    "twice. If it is still invalid, the client receives a refusal, and `unisono.unmet` gives the reason."
)
NAMED_FREELY = "Arguments are checked and generated again in the same way; `unisono.unmet` reports a missing call."
FORMATS: Mapping[str, Cell] = {
    **FORMS,
    "mlx_server": Cell(Support.TEXT_EXACT, JUDGED),
    "replay": Cell(Support.EXACT, JUDGED),
}
# Requirements on answers and calls, enforced by constraints where available.
CHOICES: Mapping[str, Cell] = {
    **FORMS,
    "mlx_server": Cell(Support.TEXT_EXACT, NAMED_FREELY),
    "replay": Cell(Support.EXACT, NAMED_FREELY),
}
NO_LOGPROBS = Cell(
    Support.REFUSED,
    "400 `unsupported_value`, unless another backend of the model reports them.",
    ("logprobs", "unsupported_value"),
)
NO_PROMPT_LOGPROBS = Cell(
    Support.REFUSED,
    "llama-server reports them for generated tokens only: 400 `unsupported_value`; requests prefer another backend.",
    ("logprobs", "unsupported_value"),
)
NO_SCORES = Cell(Support.NONE, "`unisono compare` names the backend and ends.")
PLAYED = Cell(Support.NO_EFFECT, "A recording is replayed unchanged.")
LATE = Cell(
    Support.TEXT_EXACT,
    "Ollama 0.30 and newer, according to its source, may omit markers from raw text. The adapter then uses its "
    "`template` route, on which an answer arrives when it is complete. `unisono check` reports the route.",
)

# Cells by feature and kind, complete for all features.
MATRIX: Mapping[str, Mapping[str, Cell]] = {
    "chat": FORMS,
    "streaming": {**FORMS, "ollama": LATE},
    "tools": FORMS,
    "reasoning": FORMS,
    "prefill": {**FORMS, "ollama": Cell(Support.TEXT_EXACT, "Not on the `template` route.")},
    "continuation of an answer that is only analysis": FORMS,
    "token-exact history": FORMS,
    "stop strings": ANYWHERE,
    "cancellation when the client disconnects": ANYWHERE,
    "usage counts": {
        **ANYWHERE,
        **dict.fromkeys(
            ("ollama", "mlx_server"), Cell(Support.TEXT_EXACT, "Counted by the gateway, with the tokenizer of gpt-oss.")
        ),
    },
    "cached_tokens": {
        **ANYWHERE,
        "vllm": Cell(Support.EXACT, "vLLM reports them with `--enable-prompt-tokens-details`."),
        "sglang": Cell(Support.EXACT, "SGLang reports them with `--enable-cache-report`."),
        "ollama": Cell(Support.EXACT, "Reported by versions that send `prompt_eval_cached_count`."),
        "replay": Cell(Support.NOT_REPORTED),
    },
    "temperature, top_p, top_k, min_p": {**ANYWHERE, "replay": PLAYED},
    "penalties": {**ANYWHERE, "replay": PLAYED},
    "seed": {
        **ANYWHERE,
        "mlx_server": Cell(Support.EXACT, "mlx_lm.server does not batch a request that has a seed."),
        "replay": PLAYED,
    },
    "logit_bias": {**ANYWHERE, "ollama": NO_BIAS, "replay": NO_BIAS},
    "constrained decoding": CONSTRAINED,
    "regular expressions and grammars of answers and custom tools": TEXT_GRAMMARS,
    "response_format, text.format, strict tools": FORMATS,
    "tool_choice: required, named, allowed_tools": CHOICES,
    "reasoning budget": FORMS,
    "logprobs": {
        **dict.fromkeys(KINDS, EXACT),
        "llamacpp": Cell(Support.EXACT, "Tokens that end inside a character have no log probability."),
        "mlx": Cell(Support.EXACT, "The log probabilities include biases, penalties and constraints."),
        **dict.fromkeys(("ollama", "mlx_server", "replay"), NO_LOGPROBS),
    },
    "logprobs of raw prompts (`echo`)": {
        **dict.fromkeys(KINDS, EXACT),
        **dict.fromkeys(("ollama", "mlx_server", "replay"), NO_LOGPROBS),
        "llamacpp": NO_PROMPT_LOGPROBS,
    },
    "scores of given tokens (`unisono compare`)": {
        "vllm": EXACT,
        "sglang": Cell(Support.EXACT, "Alternatives that are parts of a character are unknown."),
        "llamacpp": Cell(Support.EXACT, "The tokens are forced by a grammar, one after the other, so it takes longer."),
        "ollama": NO_SCORES,
        "mlx_server": Cell(
            Support.NONE,
            "Two requests with the same beginning can end the server. Use the `mlx` kind with the same folder.",
        ),
        "mlx": EXACT,
        "replay": NO_SCORES,
    },
}


def page() -> str:
    """Return the whole of `docs/capabilities.md`."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Capabilities by backend kind"
    yield ""
    yield "Use this table to choose a backend, or to find out why a feature behaves differently on another one. The"
    yield "columns are the backend kinds of `litellm_params.model`. `unisono check` probes your own servers."
    yield ""
    yield "`python -m tests.docs.capabilities` generates this page from `tests/docs/capabilities.py`. Edit the"
    yield "source, not the page."
    yield ""
    yield "## Features"
    yield ""
    yield "| | " + " | ".join(f"`{kind}`" for kind in KINDS) + " |"
    yield "| --- " * (len(KINDS) + 1) + "|"
    notes: list[str] = []
    for feature, cells in MATRIX.items():
        yield f"| {feature} | " + " | ".join(_cell(cells[kind], notes) for kind in KINDS) + " |"
    yield ""
    yield "## Meaning of the cells"
    yield ""
    for support, meaning in MEANT.items():
        yield f"- **{support}** {meaning}."
    yield ""
    yield "## Notes"
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
