"""Prompts that a probe sends to a backend."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.core.frozen import dataclass
from unisono.core.generation import CALL, RETURN, AnyJson, Constraint, Gbnf, JsonSchema, Lark, OneOf, Regex
from unisono.harmony.encoding import MARKERS

# Prompt of the probe; for backends that take ids, a typed marker separates the parts.
QUESTION = ("<|start|>user<|message|>Say OK.", "<|end|><|start|>assistant")
TYPED = "<|end|>"
# Position at which a constraint takes effect.
OPENED = "<|channel|>final<|message|>"
# Text before each stop token.
ENDINGS: Mapping[int, str] = {
    RETURN: OPENED + "OK",
    CALL: "<|channel|>commentary to=functions.ok <|constrain|>json<|message|>{}",
}
# Bias that forces a token.
FORCE = 100.0

MARKED = "".join(MARKERS)
# Texts that tokenizers split differently: contractions, scripts, emoji, digits, spaces.
BODIES = (
    "Hello, world! don't DON'T",
    "na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f642",
    "def f(x):\n\treturn {'a': 1234567.5}\r\n\r\n",
    " to=functions.get_weather   \n\n  x",
)

# Trial constraints of a probe, one of each kind, with their expected answers.
#
# No model would write these answers unprompted: engines and proxies ignore unknown fields and answer as if
# unconstrained.


@dataclass(frozen=True, slots=True)
class Trial:
    """Trial of a constraint. `answers` are the accepted answers, or beginnings of them.

    They contain no white space, because that of the output is removed before the comparison.
    """

    constraint: Constraint
    answers: tuple[str, ...]
    max_tokens: int

    def is_enforced_in(self, text: str, *, stopped: bool) -> bool:
        """Return whether `text` shows that the constraint was enforced.

        It does if it begins with one of the answers, apart from white space. If generation was cut at its token limit
        (not `stopped`), the beginning of an answer is enough: some models spend most tokens on white space, which JSON
        allows.
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
