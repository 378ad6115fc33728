"""What the model says to the page, by a word in the request's last message: `say weather`. Some of it is meant to
harm."""

from __future__ import annotations

import re
from typing import Any

from tests.fakes import VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
MARKUP = (
    '<script>document.title = "taken"</script><img src=x onerror="document.title=\'taken\'">'
    '<a href="javascript:document.title=1">x</a><style>body{display:none}</style><h1>big</h1> & &amp;'
)
CONTROLS = (
    "\x1b[31mred\x07 \u202egnirts\u202c end \u200b\u2066\u2028 half \ufeff tab\tnewline\n"
    "last 👩\u200d🚀 می\u200cخواهم x\u200dy"
)
LARGE = "".join("=" * 64 + str(number) for number in range(16_000))[:1_000_000]
"""Without a break, and not so much the same that the gateway would end it."""
LONG = "".join(f"All work and no play makes page {number} dull.\n" for number in range(1500))
ASKED = re.compile(r"say ([a-z]+)")


def marked(thought: str, rest: str) -> list[int]:
    return ENCODING.encode_marked(THOUGHT.format(thought) + rest)


def plain(text: str) -> list[int]:
    """An answer of that text, whatever it spells."""
    head = ENCODING.encode_marked(THOUGHT.format("I say it.") + FINAL)
    return [*head, *ENCODING.encode_generated(text), *ENCODING.encode_marked("<|return|>")]


ANSWER = marked(
    "The user greets me. I greet back, in a sentence or two, and offer help.",
    FINAL + "Hello! I am a small model behind a gateway. Ask me anything, and look at my tokens afterwards.<|return|>",
)
SCRIPTS: dict[str, VllmScript] = {
    "hello": VllmScript(tokens=ANSWER, delay_s=0.004),
    "weather": VllmScript(
        tokens=marked(
            "I need the weather, so I call the tool.",
            "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
            + CALL
            + '{"place": "Oslo", "days": 3}<|call|>',
        )
    ),
    "mended": VllmScript(
        tokens=ENCODING.encode_marked(
            "<|channel|>analysis<|message|>Hm, let me think about that.<|channel|>finl<|message|>It is 42. 🦜<|return|>"
        )
    ),
    "markup": VllmScript(tokens=plain(MARKUP)),
    "controls": VllmScript(tokens=plain(CONTROLS)),
    "large": VllmScript(tokens=plain(LARGE), per_chunk=20_000),
    "slow": VllmScript(tokens=plain("word " * 4000), delay_s=0.05),
    "long": VllmScript(
        tokens=plain(LONG),
        per_chunk=500,
    ),
}


def script_of(asked: dict[str, Any]) -> VllmScript:
    names = ASKED.findall(ENCODING.decode(asked["prompt"]))
    return SCRIPTS[names[-1] if names and names[-1] in SCRIPTS else "hello"]
