"""Results of examining a backend, as data: its capabilities and its faults.

A probe that raises could not examine the backend: it is unreachable, perhaps only now. A probe that returns findings
did examine it. Every failed check has a severity: a fatal one makes the backend unusable even if it answers, a warning
is for the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities
from unisono.errors import (
    BackendOverloaded,
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
    UnisonoError,
)

# HTTP statuses of backends: whether the same request may succeed later.

# Backend statuses below 500 after which the same request may succeed.
TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})


def is_permanent(status: int) -> bool:
    """Return True if a backend that answered with this HTTP status would do so again."""
    return 400 <= status < 500 and status not in TRANSIENT_STATUSES


class Check(StrEnum):
    """Checks of a probe; each backend kind reports those that apply to it, in this order."""

    # The backend responds. Never part of a probe: `unreached` derives it from a probe's error.
    REACHABLE = "reachable"
    # The backend serves its configured model.
    MODEL = "model"
    # The backend generates: a token arrived in time, and the stream ended properly.
    GENERATION = "generation"
    # The backend's token ids are those of o200k_harmony.
    TOKENIZER = "tokenizer"
    # The backend reads a prompt of ids as exactly those ids.
    IDS_IN = "ids_in"
    # The backend returns the ids it generates.
    IDS_OUT = "ids_out"
    # Structural markers are visible in the output.
    MARKERS = "markers"
    # The backend ends generation at each of the stop tokens.
    STOPS = "stops"
    # The token that ended generation is visible, as an id or as text.
    STOP_TOKEN = "stop_token"  # noqa: S105 - a token of the vocabulary
    # A marker typed as text stays text. Matters for text prompts only. The gateway breaks markers up.
    TYPED_MARKERS = "typed_markers"
    # A prompt arrives whole: no part of it is silently cut.
    PROMPT_WHOLE = "prompt_kept"
    PROMPT_KEPT = PROMPT_WHOLE  # former name, for one release
    # The context size is known and large enough.
    CONTEXT = "context"
    # The backend can constrain generation to a schema or grammar.
    CONSTRAIN = "constrain"
    # The backend scores given tokens, so that it can be compared with another.
    SCORES = "scores"


class Severity(StrEnum):
    # The backend is not used while this check fails.
    FATAL = "fatal"
    # The backend is used, with reduced function.
    WARNING = "warning"
    # Common among good backends; reported without consequences.
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Meaning:
    """Default meaning of a failed check; `problem` and `remedy` are safe to publish."""

    severity: Severity
    problem: str
    remedy: str


MEANINGS: Mapping[Check, Meaning] = {
    Check.REACHABLE: Meaning(
        Severity.FATAL,
        "The backend could not be reached.",
        "Start it, and check api_base and api_key of this deployment.",
    ),
    Check.MODEL: Meaning(
        Severity.FATAL,
        "The backend does not serve the configured model.",
        "Set litellm_params.model to the kind, a slash and the name under which the backend serves the model.",
    ),
    Check.GENERATION: Meaning(
        Severity.FATAL,
        "The backend answers status requests but does not generate.",
        "Check its log, and restart it if it hangs.",
    ),
    Check.TOKENIZER: Meaning(
        Severity.FATAL,
        "The backend's tokenizer differs from that of gpt-oss, so it would misread prompts.",
        "Serve an unchanged gpt-oss model with its own tokenizer files.",
    ),
    Check.IDS_IN: Meaning(
        Severity.FATAL,
        "The backend changes the token ids of a prompt.",
        "Point api_base at the engine itself, not at a proxy that rewrites prompts.",
    ),
    Check.IDS_OUT: Meaning(
        Severity.FATAL,
        "The backend does not return the ids of the tokens it generates.",
        "Update the engine, and point api_base at the engine itself, not at a proxy in front of it.",
    ),
    Check.MARKERS: Meaning(
        Severity.FATAL,
        "The backend strips structural markers from its output, so reasoning and answer cannot be separated.",
        "Use an endpoint and a version that return special tokens, and turn off Harmony parsing in the backend.",
    ),
    Check.STOPS: Meaning(
        Severity.FATAL,
        "The backend does not stop at every stop token of gpt-oss, so it would generate user and tool messages too.",
        "List 200002 and 200012 under eos_token_id in the model's generation_config.json.",
    ),
    Check.STOP_TOKEN: Meaning(
        Severity.NOTE,
        "The backend hides the token that ended generation.",
        "No action needed: the end of the stream closes the message.",
    ),
    Check.TYPED_MARKERS: Meaning(
        Severity.WARNING,
        "The backend accepts text, in which a typed marker would become a real one.",
        "No action needed: the gateway breaks up markers in client text. A kind that accepts ids does not need that.",
    ),
    Check.PROMPT_WHOLE: Meaning(
        Severity.FATAL,
        "The backend silently truncates prompts.",
        "Turn truncation off. Start the backend with a larger context, or set model_info.max_input_tokens to its size.",
    ),
    Check.CONTEXT: Meaning(
        Severity.WARNING,
        "The backend's context size is unknown or small.",
        "Set model_info.max_input_tokens to the context the backend was started with, and start it with a larger one.",
    ),
    Check.CONSTRAIN: Meaning(
        Severity.NOTE,
        "Generation cannot be constrained on this backend.",
        "No action needed.",
    ),
    Check.SCORES: Meaning(
        Severity.NOTE,
        "The backend does not score given tokens, so `unisono compare` cannot compare it.",
        "No action needed.",
    ),
}

# Minimum context in tokens for a conversation with tools.
SMALLEST_CONTEXT = 8192

# Failures that may be temporary; they do not exclude a backend that was healthy before.
PASSING = frozenset({Check.REACHABLE, Check.GENERATION})


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    `detail` states the observation, `remedy` the operator's action (flag, version or endpoint). Each is a plain
    sentence without address or path; if omitted, the check's meaning applies. `severity` is set by a backend kind that
    tolerates a failure that is fatal elsewhere; None applies `MEANINGS`. `backend_message` is the backend's own
    message, cleaned. Only the operator may see it, since it may contain addresses and paths.
    """

    check: Check
    ok: bool
    detail: str = ""
    remedy: str = ""
    severity: Severity | None = None
    backend_message: str = ""

    @property
    def weight(self) -> Severity | None:
        """Severity of a failed check; None for a check that passed."""
        return None if self.ok else self.severity or MEANINGS[self.check].severity

    @property
    def text(self) -> str:
        return self.detail or ("" if self.ok else MEANINGS[self.check].problem)

    @property
    def advises(self) -> str:
        return "" if self.ok else self.remedy or MEANINGS[self.check].remedy


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of examining a backend.

    `first_token_s` is the time to the first token of the probe's own generation, in seconds. It is None if no token
    arrived or none was requested.
    """

    capabilities: Capabilities
    findings: tuple[Finding, ...] = ()
    first_token_s: float | None = None

    @property
    def fatal(self) -> tuple[Finding, ...]:
        """Findings that exclude the backend from use; empty if it may be used."""
        return tuple(finding for finding in self.findings if finding.weight is Severity.FATAL)


# Remedies for errors that prevented an examination; the first matching row applies.
UNREACHED: tuple[tuple[type[UnisonoError], str], ...] = (
    (BackendOverloaded, "Wait until it is less busy. If it stays overloaded, add another deployment of the model."),
    (BackendTimeout, "Check whether it hangs or is still loading; restart it if it hangs."),
    (BackendUnavailable, MEANINGS[Check.REACHABLE].remedy),
    (BackendProtocolError, "Check that api_base is the address of a server of this kind."),
    (UnisonoError, "Check its log, and that api_base is the address of a server of this kind."),
)


def unreached(error: UnisonoError) -> Finding:
    """Return the finding for an error that a probe raised; its detail is the error's message."""
    remedy = next(remedy for kind, remedy in UNREACHED if isinstance(error, kind))
    reason = str(error.__cause__ or "")
    return Finding(Check.REACHABLE, ok=False, detail=error.message, remedy=remedy, backend_message=reason)
