"""The o200k_harmony encoding, loaded once from the bundled vocabulary file.

tiktoken encodes all text. openai-harmony has an encoder for the same ids, but it takes quadratic time on one unbroken
run of characters, holds the GIL, and needs 50 MB. It is the reference for tests, and a setting selects its parser for
message bodies. All messages and answers share the objects of token ids (`share_ids`).
"""

from __future__ import annotations

import hashlib
import re
from binascii import a2b_base64
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cache, cached_property
from pathlib import Path

import tiktoken

from unisono.core.generation import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    FIRST_SPECIAL,
    MESSAGE,
    RETURN,
    START,
    VOCABULARY,
)

# Maximum number of characters that are encoded at once, far below the length that the tokenizer rejects.
PIECE = 32_768
# Longer texts, in characters, are encoded in slices of about this length. Other threads cannot run while the tokenizer
# converts the tokens of a slice to Python's integers, which takes tens of milliseconds for this length.
SLICE = 262_144
# Position at which a text can be divided without a change of its tokens: after an ASCII letter, and before an ASCII
# character that is neither a letter nor an apostrophe. The pattern `PIECES` always ends a piece at such a position.
BORDER = re.compile(r"(?<=[A-Za-z])(?=[\x00-&(-@\[-`{-\x7f])")
VOCABULARY_FOLDER = Path(__file__).parent / "vocab"
VOCABULARY_FILE = "o200k_base.tiktoken"
VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"

# The seven structural markers by their spelling.
MARKERS: dict[str, int] = {
    "<|start|>": START,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|message|>": MESSAGE,
    "<|end|>": END,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}

# Markers that the decoder recognises in the output of a text backend.
STRUCTURAL: dict[str, int] = MARKERS | {"<|endoftext|>": ENDOFTEXT}


# Pattern by which o200k splits text before merging; part of the encoding's definition. Source: tiktoken's
# `o200k_base`.
PIECES = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_OTHER_SPECIAL = {"<|startoftext|>": FIRST_SPECIAL, "<|endofprompt|>": 200018}


class VocabularyError(Exception):
    """The vocabulary file is missing, or has unexpected content."""


class Encoding:
    """Conversion between text and ids. Safe to share between threads."""

    uses_library_parser = False  # True if openai-harmony's parser reads the bodies of messages

    def __init__(self, bpe: tiktoken.Encoding) -> None:
        self._bpe = bpe
        self._structural = frozenset(STRUCTURAL)
        # Text of each token that was decoded before, by id. Most of the vocabulary is never decoded.
        self.texts: dict[int, str] = {}

    def with_library_parser(self) -> Encoding:
        """Return a copy of the encoding that selects openai-harmony's parser for message bodies."""
        other = copy(self)
        other.uses_library_parser = True
        return other

    def encode_text(self, text: str) -> list[int]:
        """Encode text from clients or tools as ordinary tokens; spelled markers stay text.

        Raises ValueError for input that the tokenizer rejects (a run of about a million spaces).
        """
        if len(text) <= SLICE:
            return self._bpe.encode(text, disallowed_special=())
        tokens: list[int] = []
        begin = 0
        while begin < len(text):
            border = BORDER.search(text, begin + SLICE)
            end = border.start() if border else len(text)
            tokens += self._bpe.encode(text[begin:end], disallowed_special=())
            begin = end
        return tokens

    def encode_generated(self, text: str) -> list[int]:
        """Encode text that the model generated as ordinary tokens.

        Text longer than `PIECE` characters is split before it is encoded, because the tokenizer rejects some very long
        texts.
        """
        if len(text) <= PIECE:
            return self.encode_text(text)
        return [token for at in range(0, len(text), PIECE) for token in self.encode_text(text[at : at + PIECE])]

    def encode_marked(self, text: str) -> list[int]:
        """Encode text in which the seven markers and `<|endoftext|>` are control tokens."""
        return self._bpe.encode(text, allowed_special=self._structural, disallowed_special=())

    def encode_as_server(self, text: str) -> list[int]:
        """Encode as an inference server does: a special token spelled in `text` becomes that token."""
        return self._bpe.encode(text, allowed_special="all")

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode ids, with U+FFFD for bytes that are not UTF-8. Special tokens are spelled out."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Decode ids to bytes. An id outside the vocabulary has no bytes."""
        try:
            return self._bpe.decode_bytes(tokens)
        except (KeyError, OverflowError):
            return self._bpe.decode_bytes([token for token in tokens if 0 <= token < VOCABULARY])

    @cached_property
    def assistant_start(self) -> tuple[int, ...]:
        """Tokens of `<|start|>assistant`, which end a prompt and begin the model's first message."""
        return tuple(self.encode_marked("<|start|>assistant"))

    @cached_property
    def special_names(self) -> frozenset[str]:
        """Spellings of all special tokens, including the reserved ones."""
        return frozenset(self._bpe.special_tokens_set)

    @staticmethod
    def special_ids(tokens: Iterable[int]) -> list[int]:
        """Return the ids of the special tokens in `tokens`, in their order."""
        return [token for token in tokens if token >= FIRST_SPECIAL]


@cache
def load_encoding(folder: Path | None = None) -> Encoding:
    """Load the encoding from `folder`, by default the bundled one; cached per process.

    Never downloads. Raises VocabularyError if the file is missing or has an unexpected checksum.
    """
    path = (folder or VOCABULARY_FOLDER) / VOCABULARY_FILE
    if not path.is_file():
        raise VocabularyError(f"{path} is missing; it is part of the package, so reinstall unisono")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != VOCABULARY_SHA256:
        raise VocabularyError(f"{path} is not the o200k_base vocabulary (sha256 {digest}); reinstall unisono")
    special = STRUCTURAL | _OTHER_SPECIAL
    taken = set(special.values())
    special |= {f"<|reserved_{i}|>": i for i in range(FIRST_SPECIAL, VOCABULARY) if i not in taken}
    # The file is parsed here, because tiktoken's loader caches files in the temporary folder without verification.
    # Each line has a token and its rank, which is the number of the line.
    words = content.split()[::2]
    ranks = dict(zip(map(a2b_base64, words), range(len(words)), strict=True))
    bpe = tiktoken.Encoding(name="o200k_harmony", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=special)
    # The encoder has copied the table; free its 20 MB.
    ranks.clear()
    return Encoding(bpe)


class SharedIds(dict[int, int]):
    """Table of shared ids; filled on demand, as a process uses a small part of the vocabulary."""

    def __missing__(self, token: int) -> int:
        # An id outside the vocabulary is not added to the table. Only a faulty backend sends such ids.
        if 0 <= token < VOCABULARY:
            self[token] = token
        return token


_SHARED_ID = SharedIds().__getitem__


def share_ids(tokens: Sequence[int]) -> list[int]:
    """Return the ids as objects that the whole process shares: 8 bytes per id instead of 40."""
    return [_SHARED_ID(tokens[0])] if len(tokens) == 1 else [*map(_SHARED_ID, tokens)]
