"""Model outputs for the web page.

A word in the last message selects one: `say weather`. Some outputs are harmful.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.fakes import VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
REASONING = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
MARKUP = (
    '<script>document.title = "taken"</script><img src=x onerror="document.title=\'taken\'">'
    '<a href="javascript:document.title=1">x</a><style>body{display:none}</style><h1>big</h1> & &amp;'
)
MARKDOWN = (
    "# Weather\n\n- Oslo: 21 °C\n- Rome: 30 °C\n\n| city | °C |\n| --- | --- |\n| Oslo | 21 |\n| Rome | 30 |\n\n"
    '```python\nprint("<b>21</b>")\n```\n\nThat is *all*.'
)
HEBREW = "שלום עולם, with English.\n\n- אחת\n- שתיים\n\nA sentence in English.\n\n| א | b |\n| --- | --- |\n| ג | d |"
HOSTILE = (
    "[safe](https://example.com/) [x](javascript:taken=1) [x](data:text/html,<script>taken=1</script>) "
    "![x](javascript:taken=1) ![x](https://example.com/a.png) <javascript:taken=1>\n\n"
    '<svg onload="taken=1"><script>taken=1</script><foreignObject><form action=/key/delete><button>ok</button></form>'
    "</foreignObject></svg>\n\n<math><mtext><style><img src=x onerror=taken=1></style></mtext></math>\n\n"
    '<div style="position:fixed;inset:0;z-index:9">cover</div><base href="//evil"><meta http-equiv=refresh content=0>'
    '<a id=main name=main href="x">y</a><iframe srcdoc="<script>taken=1</script>"></iframe>\n\n'
    '```"><img src=x onerror=taken=1>\ncode\n```\n\n'
    "\x1b[2J\x1b[31m red \u202egnp.exe \u2066 end &#8238; &lt;b&gt; </div></section></article>\n\n" + "> " * 40 + "deep"
)
CONTROLS = (
    "\x1b[31mred\x07 \u202egnirts\u202c end \u200b\u2066\u2028 half \ufeff tab\tnewline\n"
    "last 👩\u200d🚀 می\u200cخواهم x\u200dy"
)
# The text has no line break, and varies enough not to be stopped as a repetition.
LARGE = "".join("=" * 64 + str(number) for number in range(16_000))[:1_000_000]
LONG = "".join(f"All work and no play makes page {number} dull.\n" for number in range(1500))
# An answer of about 16,000 tokens in Markdown.
ESSAY = "".join(
    f"## Part {number}\n\nA paragraph with **words**, `code` and a [link](https://example.com/{number}).\n\n"
    f"- first of {number}\n- second of {number}\n\n```python\nprint({number})\n```\n\n"
    for number in range(345)
)
SELECTED = re.compile(r"say ([a-z]+)")


def marked(reasoning: str, rest: str) -> list[int]:
    return ENCODING.encode_marked(REASONING.format(reasoning) + rest)


def plain(text: str) -> list[int]:
    """Return the tokens of an answer with this text, in which markers are plain text."""
    head = ENCODING.encode_marked(REASONING.format("I say it.") + FINAL)
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
    # Once the call is part of the prompt, its argument selects the next output.
    "lookup": VllmScript(
        tokens=marked(
            "I look it up.",
            '<|channel|>commentary to=functions.docs__echo <|constrain|>json<|message|>{"text":"say brief"}<|call|>',
        )
    ),
    "mended": VllmScript(
        tokens=ENCODING.encode_marked(
            "<|channel|>analysis<|message|>Hm, let me think about that.<|channel|>finl<|message|>It is 42. 🦜<|return|>"
        )
    ),
    "markdown": VllmScript(tokens=plain(MARKDOWN), delay_s=0.004),
    "essay": VllmScript(tokens=plain(ESSAY), per_chunk=8, delay_s=0.002),
    "brief": VllmScript(tokens=marked("Hm.", FINAL + "Hi.<|return|>")),
    "hostile": VllmScript(tokens=plain(HOSTILE), delay_s=0.002),
    "everything": VllmScript(
        tokens=[
            *ENCODING.encode_marked("<|channel|>analysis<|message|>"),
            *ENCODING.encode_generated(HOSTILE),
            *ENCODING.encode_marked("<|end|><|start|>assistant<|channel|>commentary<|message|>"),
            *ENCODING.encode_generated(MARKUP + CONTROLS),
            *ENCODING.encode_marked("<|end|><|start|>assistant" + CALL),
            *ENCODING.encode_generated(json.dumps({"location": MARKUP + HOSTILE + CONTROLS}, ensure_ascii=False)),
            *ENCODING.encode_marked("<|call|>"),
        ]
    ),
    "hebrew": VllmScript(tokens=plain(HEBREW)),
    "markup": VllmScript(tokens=plain(MARKUP)),
    "controls": VllmScript(tokens=plain(CONTROLS)),
    "large": VllmScript(tokens=plain(LARGE), per_chunk=20_000),
    "slow": VllmScript(tokens=plain("word " * 4000), delay_s=0.05),
    "long": VllmScript(
        tokens=plain(LONG),
        per_chunk=500,
    ),
}


def script_of(request: dict[str, Any]) -> VllmScript:
    names = SELECTED.findall(ENCODING.decode(request["prompt"]))
    return SCRIPTS[names[-1] if names and names[-1] in SCRIPTS else "hello"]
