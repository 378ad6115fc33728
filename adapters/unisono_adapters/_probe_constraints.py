"""Constraints that an examination tries, one of each kind, and what has to come of them.

Nothing a model would write by itself: engines and proxies ignore words they do not know, and then answer as if nothing
had been asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.core.generation import AnyJson, Constraint, JsonSchema, OneOf


@dataclass(frozen=True, slots=True)
class Trial:
    """`answers` are what may come, or what it may begin with, without its white space."""

    constraint: Constraint
    answers: tuple[str, ...]
    max_tokens: int

    def kept(self, text: str, *, stopped: bool) -> bool:
        """Whether `text` shows that the constraint held. One that did not stop may be the beginning of an answer: white
        space is allowed in JSON, and some models like a lot of it."""
        said = "".join(text.split())
        if not said:
            return False
        return any(said.startswith(answer) or (not stopped and answer.startswith(said)) for answer in self.answers)


_SCHEMA = {
    "type": "object",
    "properties": {"unisono": {"type": "string", "enum": ["kept"]}},
    "required": ["unisono"],
    "additionalProperties": False,
}
_TEXTS = ("unisono", "keeps to it")

TRIALS: Mapping[str, Trial] = {
    trial.constraint.kind: trial
    for trial in (
        Trial(JsonSchema(_SCHEMA), ('{"unisono":"kept"}',), 16),
        Trial(AnyJson(), ("{",), 4),
        Trial(OneOf(_TEXTS), tuple("".join(text.split()) for text in _TEXTS), 8),
    )
}
