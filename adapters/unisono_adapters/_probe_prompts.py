"""Prompts that a probe sends to a backend."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.core.frozen import dataclass
from unisono.core.generation import CALL, RETURN, AnyJson, Constraint, Gbnf, JsonSchema, Lark, OneOf, Regex
from unisono.harmony.encoding import MARKERS

# Prompt of the probe, in two parts. For backends that read ids, `TYPED` is inserted between the parts.
QUESTION = ("<|start|>user<|message|>Say OK.", "<|end|><|start|>assistant")
# Marker that the user typed as ordinary text. A backend that tokenises the prompt again would take it for a control
# token.
TYPED = "<|end|>"
# Header of an answer. A constraint applies to the text after the header.
OPENED = "<|channel|>final<|message|>"
# Beginnings of answers that the model ends with the stop token.
ENDINGS: Mapping[int, str] = {
    RETURN: OPENED + "OK",
    CALL: "<|channel|>commentary to=functions.ok <|constrain|>json<|message|>{}",
}
# Bias with which the model always generates a token.
FORCE = 100.0

MARKED = "".join(MARKERS)
# Texts that tokenizers split differently: contractions, scripts, emoji, digits, spaces.
BODIES = (
    "Hello, world! don't DON'T",
    "na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f642",
    "def f(x):\n\treturn {'a': 1234567.5}\r\n\r\n",
    " to=functions.get_weather   \n\n  x",
)

# Constraints with which the probe tries a backend, one of each kind, with the answers that they enforce.
#
# No model would give these answers without the constraint. That matters because many engines and proxies ignore
# fields that they do not know, and answer as if there were no constraint.


@dataclass(frozen=True, slots=True)
class Trial:
    """Constraint to try, and the answers that show that the backend enforces it.

    An answer of the backend may begin with one of the `answers` and continue after it. The `answers` contain no white
    space, because all white space of the output is removed before the comparison.
    """

    constraint: Constraint
    answers: tuple[str, ...]
    max_tokens: int

    def is_enforced_in(self, text: str, *, stopped: bool) -> bool:
        """Return whether `text` shows that the backend enforced the constraint.

        Without its white space, `text` must begin with one of the answers. If the generation ended at its token limit
        (not `stopped`), `text` may also be only the beginning of an answer. Some models spend most tokens on white
        space, which JSON allows.
        """
        compact = "".join(text.split())
        if not compact:
            return False
        return any(
            compact.startswith(answer) or (not stopped and answer.startswith(compact)) for answer in self.answers
        )


_SCHEMA = {
    "type": "object",
    "properties": {"unisono": {"type": "string", "enum": ["kept"]}},
    "required": ["unisono"],
    "additionalProperties": False,
}
_TEXTS = ("unisono", "keeps to it")
_LARK = 'start: "unisono" | "keeps to it"'
_ANSWERS = tuple("".join(text.split()) for text in _TEXTS)

TRIALS: Mapping[str, Trial] = {
    trial.constraint.kind: trial
    for trial in (
        Trial(JsonSchema(_SCHEMA), ('{"unisono":"kept"}',), 16),
        Trial(AnyJson(), ("{",), 4),
        Trial(Regex("(unisono)|(keeps to it)"), _ANSWERS, 2),
        Trial(Gbnf('root ::= "unisono" | "keeps to it"', _LARK), _ANSWERS, 1),
        Trial(Lark(_LARK), _ANSWERS, 2),
        Trial(OneOf(_TEXTS), _ANSWERS, 8),
    )
}
