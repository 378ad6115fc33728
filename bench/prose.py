"""Content of a measurement: Harmony answers of any length, and prompts, as real token ids.

The fake backend and the load generator create the same answer, so that every received byte can be checked. All content
is a function of the corpus file and a length or a seed.
"""

from __future__ import annotations

import codecs
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import orjson

from unisono.core.generation import CHANNEL, END, MESSAGE, RETURN, START
from unisono.harmony.encoding import Encoding

PROSE = """\
The harbour master kept two clocks. One showed the time of the town, the other the time of the sea, and nobody had \
ever asked why they differed by eleven minutes. When the ferry "Aurora" arrived on 14 March at 06:45, her captain, a \
quiet woman from Tromsø, set her watch by the wrong one. She missed the tide, waited half a day, and met the man who \
repaired nets behind the fish market. They talked about knots, about the price of diesel (€1.87 per litre), and \
about the storm of 1987 that had carried a piano from the hotel terrace to the far side of the bay.

Here is a short function that does what was asked:

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    result: list[int] = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]
```

It walks both lists once, so the cost grows with their joint length. If you need it stable, keep `<=` and not `<`. A \
few words in other languages follow, because bytes are not characters: naïve façade, Grüße aus Köln, où est la gare, \
быстрая лиса, 東京は晴れです, and one picture 🧜🏽‍♀️ that takes several tokens. Finally a table:

| city | people | river |
| --- | ---: | --- |
| Porto | 231,800 | Douro |
| Basel | 173,200 | Rhine |
| Ghent | 265,100 | Leie & Scheldt |

Most towns of that size have more bridges than they need and fewer benches than they want. Whoever walks along the \
water in the evening notices first the smell of bread, then the sound of rigging against aluminium masts, and only \
then the light, which lies flat on everything and makes even the grain silos look considered. The net mender said \
that patience is a material like hemp: it can be spun thin, but it has to be dry. The captain wrote that down, \
misspelled it, and kept the page for thirty years in a tin that had once held liquorice.
"""

# Tokens of an answer without text: two headers and two terminators.
FRAME_TOKENS = 10
MIN_ANSWER_TOKENS = FRAME_TOKENS + 2


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, with the text that vLLM's incremental detokenizer returns for each token.

    `texts[i]` belongs to `tokens[i]`. It is empty for the stop token, and for a token that leaves a character
    incomplete. `finish` is the backend's finish reason.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    reasoning: str
    content: str
    finish: str


@dataclass(frozen=True)
class Corpus:
    """Tokens of which answers and prompts are made.

    `pieces` are ordinary tokens as (id, bytes), repeated up to the length of an answer. `words` are tokens that spell a
    word with its leading space, so that N words are N tokens. `names` are the ids of header names.
    """

    pieces: tuple[tuple[int, bytes], ...]
    words: tuple[tuple[int, str], ...]
    filler: tuple[int, bytes]
    names: tuple[int, int, int]

    @lru_cache(maxsize=64)  # noqa: B019 - one Material lives as long as its process
    def answer(self, length: int) -> Answer:
        """Return an answer of exactly `length` tokens, including the stop token.

        A third of it is reasoning. An answer shorter than its frame is cut and ends with the finish reason `length`.
        """
        assistant, analysis, final = self.names
        bodies = max(length - FRAME_TOKENS, MIN_ANSWER_TOKENS - FRAME_TOKENS)
        reasoning = self._body(0, max(1, bodies // 3))
        content = self._body(len(self.pieces) // 2, bodies - len(reasoning))
        sequence: list[tuple[int, bytes]] = [
            (CHANNEL, b"<|channel|>"),
            (analysis, b"analysis"),
            (MESSAGE, b"<|message|>"),
            *reasoning,
            (END, b"<|end|>"),
            (START, b"<|start|>"),
            (assistant, b"assistant"),
            (CHANNEL, b"<|channel|>"),
            (final, b"final"),
            (MESSAGE, b"<|message|>"),
            *content,
            (RETURN, b""),
        ]
        sequence = sequence[:length]
        decoder = codecs.getincrementaldecoder("utf-8")()
        return Answer(
            tokens=tuple(token for token, _ in sequence),
            texts=tuple(decoder.decode(data) for _, data in sequence),
            reasoning=b"".join(data for _, data in reasoning).decode(),
            content=b"".join(data for _, data in content).decode(),
            finish="stop" if length >= MIN_ANSWER_TOKENS else "length",
        )

    def _body(self, first: int, length: int) -> list[tuple[int, bytes]]:
        body = [self.pieces[(first + i) % len(self.pieces)] for i in range(length)]
        decoder = codecs.getincrementaldecoder("utf-8")()
        whole = 0
        for i, (_, data) in enumerate(body, start=1):
            decoder.decode(data)
            if not decoder.getstate()[0]:
                whole = i
        return body[:whole] + [self.filler] * (length - whole)

    def prompt(self, length: int, seed: int) -> tuple[list[int], str]:
        """Return `length` words, selected by `seed`, as token ids and as text; a word is one token."""
        words = random.Random(seed).choices(self.words, k=length)
        return [token for token, _ in words], "".join(word for _, word in words)


def build(encoding: Encoding) -> Corpus:
    """Build the corpus from the real vocabulary."""
    pieces = tuple((token, encoding.decode_bytes([token])) for token in encoding.encode_text(PROSE))
    words = {token: data.decode() for token, data in pieces if re.fullmatch(rb" [a-z]{2,}", data)}
    (filler,) = encoding.encode_text(" ok")
    (assistant,), (analysis,), (final,) = (encoding.encode_text(name) for name in ("assistant", "analysis", "final"))
    return Corpus(pieces, tuple(words.items()), (filler, b" ok"), (assistant, analysis, final))


def save(corpus: Corpus, path: Path) -> None:
    path.write_bytes(
        orjson.dumps(
            {
                "pieces": [(token, data.hex()) for token, data in corpus.pieces],
                "words": corpus.words,
                "filler": (corpus.filler[0], corpus.filler[1].hex()),
                "names": corpus.names,
            }
        )
    )


def load(path: Path) -> Corpus:
    """Load a saved corpus, so that only one process of a run builds the encoding."""
    saved = orjson.loads(path.read_bytes())
    assistant, analysis, final = saved["names"]
    return Corpus(
        pieces=tuple((token, bytes.fromhex(data)) for token, data in saved["pieces"]),
        words=tuple((token, word) for token, word in saved["words"]),
        filler=(saved["filler"][0], bytes.fromhex(saved["filler"][1])),
        names=(assistant, analysis, final),
    )
