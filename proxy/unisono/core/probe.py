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


class Check(StrEnum):
    """What is examined. A backend kind reports the checks that mean something for it, in this order."""

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
    STOP_TOKEN = "stop_token"  # noqa: S105 - a token of the vocabulary
    """The token that ended generation can be seen, as an id or as text."""
    TYPED_MARKERS = "typed_markers"
    """A marker typed as text stays text. Only text prompts ask for it, and there the gateway breaks markers up."""
    PROMPT_KEPT = "prompt_kept"
    """A prompt arrives whole: no part of it is silently cut."""
    CONTEXT = "context"
    """The size of its context is known."""
    CONSTRAIN = "constrain"
    """It can keep generation to a schema or grammar."""


class Severity(StrEnum):
    FATAL = "fatal"
    """The backend is not used while this fails."""
    WARNING = "warning"
    """It is used, and something works less well than it could."""
    NOTE = "note"
    """Many good backends are like this; it is told, and nothing more."""


SEVERITIES: Mapping[Check, Severity] = {
    Check.MODEL: Severity.FATAL,
    Check.GENERATION: Severity.FATAL,
    Check.TOKENIZER: Severity.FATAL,
    Check.IDS_IN: Severity.FATAL,
    Check.IDS_OUT: Severity.FATAL,
    Check.MARKERS: Severity.FATAL,
    Check.STOP_TOKEN: Severity.NOTE,
    Check.TYPED_MARKERS: Severity.NOTE,
    Check.PROMPT_KEPT: Severity.FATAL,
    Check.CONTEXT: Severity.WARNING,
    Check.CONSTRAIN: Severity.NOTE,
}
"""What a failed check means, unless its finding says otherwise."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and how it came out. `detail` says what was seen and `remedy` what the operator should do (which flag,
    version or endpoint), each a plain sentence that a client could see: no address, no path, no name of a model.
    `severity` is for a kind that can live with what is fatal elsewhere; None means what `SEVERITIES` says."""

    check: Check
    ok: bool
    detail: str = ""
    remedy: str = ""
    severity: Severity | None = None

    @property
    def weight(self) -> Severity | None:
        """How bad it is; None for a check that passed."""
        return None if self.ok else self.severity or SEVERITIES[self.check]


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
