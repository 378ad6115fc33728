"""What an examination of a backend brings: what it can do, and what is wrong with it, as data.

Two ways to fail are kept apart. A probe that raises could not examine the backend: it is not there, or not now. A probe
that returns findings did, and every failed check has a severity: a fatal one makes the backend unusable, however well
it answers, and a warning is for the operator to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from unisono.core.generation import Capabilities
from unisono.errors import (
    BackendOverloaded,
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
    UnisonoError,
)


class Check(StrEnum):
    """What is examined. A backend kind reports the checks that mean something for it, in this order."""

    REACHABLE = "reachable"
    """It could be asked at all. Never part of a probe: `unreached` makes it of the error that a probe raised."""
    MODEL = "model"
    """It serves the model it is configured with."""
    GENERATION = "generation"
    """It really generates: a token came in time, and the stream had a proper end."""
    TOKENIZER = "tokenizer"
    """Its ids are those of o200k_harmony."""
    IDS_IN = "ids_in"
    """It reads a prompt of ids as exactly those ids."""
    IDS_OUT = "ids_out"
    """It returns the ids it generates."""
    MARKERS = "markers"
    """The structural markers it generates can be seen in its output."""
    STOPS = "stops"
    """It ends generation at each of the stop tokens."""
    STOP_TOKEN = "stop_token"  # noqa: S105 - a token of the vocabulary
    """The token that ended generation can be seen, as an id or as text."""
    TYPED_MARKERS = "typed_markers"
    """A marker typed as text stays text. Only text prompts ask for it, and there the gateway breaks markers up."""
    PROMPT_KEPT = "prompt_kept"
    """A prompt arrives whole: no part of it is silently cut."""
    CONTEXT = "context"
    """The size of its context is known, and large enough to work with."""
    CONSTRAIN = "constrain"
    """It can keep generation to a schema or grammar."""


class Severity(StrEnum):
    FATAL = "fatal"
    """The backend is not used while this fails."""
    WARNING = "warning"
    """It is used, and something works less well than it could."""
    NOTE = "note"
    """Many good backends are like this; it is told, and nothing more."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a failed check means, unless its finding says otherwise. `problem` and `remedy` are fit for anybody."""

    severity: Severity
    problem: str
    remedy: str


MEANINGS: Mapping[Check, Meaning] = {
    Check.REACHABLE: Meaning(
        Severity.FATAL,
        "The backend could not be asked.",
        "Start it, and check api_base and api_key of this deployment.",
    ),
    Check.MODEL: Meaning(
        Severity.FATAL,
        "The backend does not serve the model it is configured with.",
        "Write the name the backend serves it under behind the kind in litellm_params.model.",
    ),
    Check.GENERATION: Meaning(
        Severity.FATAL,
        "The backend answers questions about itself, but it does not generate.",
        "Look into its log, and restart it if it is stuck.",
    ),
    Check.TOKENIZER: Meaning(
        Severity.FATAL,
        "The backend's tokenizer is not the one of gpt-oss, so prompts would be misread.",
        "Serve an unchanged gpt-oss model with its own tokenizer files.",
    ),
    Check.IDS_IN: Meaning(
        Severity.FATAL,
        "The backend does not read a prompt of token ids as those ids.",
        "Point api_base at the engine itself, not at a proxy that rewrites prompts.",
    ),
    Check.IDS_OUT: Meaning(
        Severity.FATAL,
        "The backend does not return the ids of the tokens it generates.",
        "Update the engine, and point api_base at the engine itself, not at a proxy in front of it.",
    ),
    Check.MARKERS: Meaning(
        Severity.FATAL,
        "The backend strips structural markers from its output, so reasoning and answer cannot be told apart.",
        "Use an endpoint and a version that keep special tokens, and no server-side parsing of Harmony.",
    ),
    Check.STOPS: Meaning(
        Severity.FATAL,
        "The backend does not end at every stop token of gpt-oss, so it would write the user's and the tools' part.",
        "List 200002 and 200012 under eos_token_id in the model's generation_config.json.",
    ),
    Check.STOP_TOKEN: Meaning(
        Severity.NOTE,
        "The backend hides the token that ended generation.",
        "Nothing has to be done: the end of the stream closes the message.",
    ),
    Check.TYPED_MARKERS: Meaning(
        Severity.WARNING,
        "The backend takes text, in which a typed marker would become a real one.",
        "Nothing has to be done: markers in text from outside are broken up. A kind that takes ids does not need that.",
    ),
    Check.PROMPT_KEPT: Meaning(
        Severity.FATAL,
        "The backend silently cuts prompts.",
        "Turn truncation off, and give the backend a larger context or set model_info.max_input_tokens to what it has.",
    ),
    Check.CONTEXT: Meaning(
        Severity.WARNING,
        "The size of the backend's context is not known, or small.",
        "Set model_info.max_input_tokens to the context the backend was started with, and start it with a larger one.",
    ),
    Check.CONSTRAIN: Meaning(
        Severity.NOTE,
        "Generation cannot be constrained on this backend.",
        "Nothing has to be done.",
    ),
}

SMALLEST_CONTEXT = 8192
"""Tokens: what a conversation with tools needs to get anywhere."""

PASSING = frozenset({Check.REACHABLE, Check.GENERATION})
"""Failures that may be over in a moment: a backend that was well before is not dropped for them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and how it came out. `detail` says what was seen and `remedy` what the operator should do (which flag,
    version or endpoint), each a plain sentence without an address or a path; where they are left out, the check's
    meaning stands for them. `severity` is for a kind that can live with what is fatal elsewhere; None means what
    `MEANINGS` says. `said` is what the backend itself said, cleaned: for the operator who asks, and for nobody else,
    since it may hold addresses and paths."""

    check: Check
    ok: bool
    detail: str = ""
    remedy: str = ""
    severity: Severity | None = None
    said: str = ""

    @property
    def weight(self) -> Severity | None:
        """How bad it is; None for a check that passed."""
        return None if self.ok else self.severity or MEANINGS[self.check].severity

    @property
    def says(self) -> str:
        return self.detail or ("" if self.ok else MEANINGS[self.check].problem)

    @property
    def advises(self) -> str:
        return "" if self.ok else self.remedy or MEANINGS[self.check].remedy


@dataclass(frozen=True, slots=True)
class Probe:
    """`first_token_s` is how long the first token of the probe's own generation took, in seconds; None when none
    came or none was asked for."""

    capabilities: Capabilities
    findings: tuple[Finding, ...] = ()
    first_token_s: float | None = None

    @property
    def fatal(self) -> tuple[Finding, ...]:
        """Why the backend must not be used; empty when it may be."""
        return tuple(finding for finding in self.findings if finding.weight is Severity.FATAL)


UNREACHED: tuple[tuple[type[UnisonoError], str], ...] = (
    (BackendOverloaded, "Wait until it is less busy; if it stays so, add another deployment of the model."),
    (BackendTimeout, "Look whether it is stuck or still loading; restart it if it is."),
    (BackendUnavailable, MEANINGS[Check.REACHABLE].remedy),
    (BackendProtocolError, "Check that api_base is the address of a server of this kind."),
    (UnisonoError, "Look into its log, and check that api_base is the address of a server of this kind."),
)
"""What to do about an error that kept a backend from being examined; the first row that fits."""


def unreached(error: UnisonoError) -> Finding:
    """The finding for the error that a probe raised. Its detail is the error's message."""
    remedy = next(remedy for kind, remedy in UNREACHED if isinstance(error, kind))
    said = str(error.__cause__ or "")
    return Finding(Check.REACHABLE, ok=False, detail=error.message, remedy=remedy, said=said)
