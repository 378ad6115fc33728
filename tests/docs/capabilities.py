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
    Support.EXACT: "means that the feature works with exact token ids, in prompts and in output",
    Support.TEXT_EXACT: "means that the feature works with exactly the same text, which the backend tokenises itself",
    Support.REFUSED: "means that the feature is not supported: a request with it fails with the error in the note",
    Support.NO_EFFECT: "means that the gateway accepts the field, and the field has no effect",
    Support.NONE: "means that the backend does not support the feature; the note says what the gateway does instead",
    Support.NOT_REPORTED: "means that the backend does not report the number; the field is 0 or absent",
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
    Support.REFUSED,
    "The request returns a 400 `unsupported_value`, because the backend cannot bias tokens.",
    ("logit_bias", "unsupported_value"),
)
UNCONSTRAINED = Cell(Support.NONE, "The adapter refuses constraints; the gateway checks the complete answer instead.")
SCHEMAS_ONLY = Cell(
    Support.TEXT_EXACT,
    "Ollama enforces JSON and JSON schemas, but no choice between several texts, because its `format` always returns "
    "texts in quotes. On the `template` route, it enforces nothing. A JSON string in an answer can contain a marker.",
)
# Constraints of each kind; `response_format` and `tool_choice` work without them, too.
CONSTRAINED: Mapping[str, Cell] = {
    "vllm": Cell(
        Support.EXACT,
        "The gateway limits white space between JSON tokens for those schemas for which vLLM supports a limit.",
    ),
    "sglang": Cell(
        Support.EXACT, "White space between JSON tokens is limited only if SGLang was started with such a limit."
    ),
    "llamacpp": Cell(
        Support.EXACT,
        "llama.cpp enforces a schema with a `pattern` only if the pattern can be converted into a grammar that is not "
        "too ambiguous. For all other patterns, the gateway checks the complete answer.",
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
        "vLLM enforces regular expressions and GBNF grammars. It enforces those Lark grammars that its grammar engine "
        "supports; llguidance supports all of them. For all other grammars, the gateway checks the complete text.",
    ),
    "sglang": Cell(
        Support.EXACT,
        "SGLang enforces regular expressions and GBNF grammars. For Lark grammars, the gateway checks the text.",
    ),
    "llamacpp": Cell(
        Support.EXACT,
        "llama.cpp enforces GBNF grammars, and regular expressions that can be converted into a GBNF grammar: without "
        "flags, word boundaries, Unicode classes and ambiguous repetition. For all other expressions and grammars, the "
        "gateway checks the complete text.",
    ),
    "mlx": EXACT,
}
JUDGED = (
    "The gateway buffers the answer until it is complete, and checks it. It generates an invalid answer again, at most "
    "twice. If the answer is still invalid, the client receives a refusal, and `unisono.unmet` gives the reason."
)
NAMED_FREELY = (
    "The gateway checks the arguments of each call, and generates invalid arguments again, at most twice. "
    "`unisono.unmet` reports a missing call."
)
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
    "The backend does not report log probabilities. Without another backend of the model that reports them, the "
    "request returns a 400 `unsupported_value`.",
    ("logprobs", "unsupported_value"),
)
NO_PROMPT_LOGPROBS = Cell(
    Support.REFUSED,
    "llama-server reports log probabilities only for generated tokens. Without another backend of the model that "
    "reports them for prompts, the request returns a 400 `unsupported_value`.",
    ("logprobs", "unsupported_value"),
)
NO_SCORES = Cell(Support.NONE, "`unisono compare` ends with an error that names the backend.")
PLAYED = Cell(Support.NO_EFFECT, "The backend replays a recording, regardless of this field.")
LATE = Cell(
    Support.TEXT_EXACT,
    "According to their source, Ollama 0.30 and newer versions may omit markers from raw text. The adapter then uses "
    "Ollama's `template` route, which returns an answer only when it is complete. `unisono check` reports the route.",
)

# Cells by feature and kind, complete for all features.
MATRIX: Mapping[str, Mapping[str, Cell]] = {
    "chat": FORMS,
    "streaming": {**FORMS, "ollama": LATE},
    "tools": FORMS,
    "reasoning": FORMS,
    "prefill": {**FORMS, "ollama": Cell(Support.TEXT_EXACT, "Prefill does not work on the `template` route.")},
    "continuation of an answer that is only analysis": FORMS,
    "token-exact history": FORMS,
    "stop strings": ANYWHERE,
    "cancellation when the client disconnects": ANYWHERE,
    "usage counts": {
        **ANYWHERE,
        **dict.fromkeys(
            ("ollama", "mlx_server"),
            Cell(Support.TEXT_EXACT, "The gateway counts the tokens, with the tokenizer of gpt-oss."),
        ),
    },
    "cached_tokens": {
        **ANYWHERE,
        "vllm": Cell(
            Support.EXACT, "vLLM reports cached tokens if it was started with `--enable-prompt-tokens-details`."
        ),
        "sglang": Cell(Support.EXACT, "SGLang reports cached tokens if it was started with `--enable-cache-report`."),
        "ollama": Cell(Support.EXACT, "Versions of Ollama that send `prompt_eval_cached_count` report cached tokens."),
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
        "llamacpp": Cell(Support.EXACT, "A token that ends inside of a character has no log probability."),
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
        "sglang": Cell(Support.EXACT, "SGLang does not report alternative tokens that are parts of a character."),
        "llamacpp": Cell(
            Support.EXACT, "The adapter forces the tokens with a grammar, one after the other, so scoring takes longer."
        ),
        "ollama": NO_SCORES,
        "mlx_server": Cell(
            Support.NONE,
            "The adapter requests no scores, because two such requests with the same beginning can crash the server. "
            "Use the kind `mlx` instead, with the same model folder.",
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
    yield "Use this table to choose a kind of backend, or to find out why a feature works differently on two backends."
    yield "Each column is a backend kind: the prefix in `litellm_params.model`. `unisono check` tests your own servers."
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
