"""Results of probing a backend, as data: its capabilities and its faults.

If a probe raises an error, the backend could not be tested, for example because it is unreachable at the moment. If a
probe returns findings, the backend was tested. Every failed check has a severity. A fatal failure makes the backend
unusable even if it answers; a warning only informs the operator.
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

# HTTP statuses below 500 of a backend after which the same request may succeed later.
TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})


def is_permanent(status: int) -> bool:
    """Return True if a backend would answer the same request with this HTTP status again."""
    return 400 <= status < 500 and status not in TRANSIENT_STATUSES


class Check(StrEnum):
    """Checks of a probe; each kind of backend reports the applicable checks in this order."""

    # The backend responds. No probe reports this check: `unreached` derives it from the error of a probe.
    REACHABLE = "reachable"
    # The backend serves its configured model.
    MODEL = "model"
    # The backend generates: a token arrived in time, and the stream ended properly.
    GENERATION = "generation"
    # The backend's tokenizer is o200k_harmony.
    TOKENIZER = "tokenizer"
    # The backend uses the token ids of a prompt unchanged.
    IDS_IN = "ids_in"
    # The backend returns the ids that it generates.
    IDS_OUT = "ids_out"
    # The output contains control tokens.
    MARKERS = "markers"
    # The backend ends generation at each of the stop tokens.
    STOPS = "stops"
    # The output contains the token that ended generation, as an id or as text.
    STOP_TOKEN = "stop_token"  # noqa: S105 - a token of the vocabulary
    # The spelling of a control token in a user's text stays text. This matters only for backends that accept text. For
    # these, the gateway breaks up such spellings.
    TYPED_MARKERS = "typed_markers"
    # The backend uses the whole prompt and does not silently drop a part.
    PROMPT_WHOLE = "prompt_kept"
    PROMPT_KEPT = PROMPT_WHOLE  # former name, for one release
    # The context size is known and large enough.
    CONTEXT = "context"
    # The backend can constrain generation to a schema or grammar.
    CONSTRAIN = "constrain"
    # The backend scores given tokens, so that it can be compared with a different backend.
    SCORES = "scores"


class Severity(StrEnum):
    # The backend is not used while this check fails.
    FATAL = "fatal"
    # The backend is used, with reduced function.
    WARNING = "warning"
    # The failure is common among good backends, and has no consequences.
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Meaning:
    """Default severity and texts of a failed check; `problem` and `remedy` are safe to publish."""

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
        "The backend accepts text, in which the spelling of a control token would become a control token.",
        "No action needed: the gateway breaks up such spellings in client text. To avoid the problem, use a kind of "
        "backend that accepts token ids.",
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

# Smallest context window in tokens that is sufficient for a conversation with tools.
SMALLEST_CONTEXT = 8192

# Failures that may be temporary; they do not exclude a backend that was healthy before.
TEMPORARY_FAILURES = frozenset({Check.REACHABLE, Check.GENERATION})


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    `detail` describes what the probe found. `remedy` is what the operator should do, such as a flag, a version or an
    endpoint to use. Both are plain sentences without addresses and paths; if they are empty, the texts of `MEANINGS`
    apply. `severity` differs from `MEANINGS` for a kind of backend that tolerates the failure; None means the severity
    in `MEANINGS`. `backend_message` is the sanitized message of the backend. It may contain addresses and paths, so
    only the operator may see it.
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
    """Result of probing a backend.

    `first_token_s` is the time in seconds until the first token of the probe's own generation. It is None if no token
    arrived, or if the probe requested no generation.
    """

    capabilities: Capabilities
    findings: tuple[Finding, ...] = ()
    first_token_s: float | None = None

    @property
    def fatal(self) -> tuple[Finding, ...]:
        """Findings that exclude the backend from use; empty if it may be used."""
        return tuple(finding for finding in self.findings if finding.weight is Severity.FATAL)


# Remedies for errors because of which a backend could not be tested; the first matching row applies.
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
