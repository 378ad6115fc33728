"""Writing of a `tokenizer.json` with the same ids as the gateway's own encoding.

The file is plain JSON, so writing it needs no tokenizer library.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from unisono.core.generation import FIRST_SPECIAL, VOCABULARY
from unisono.harmony.encoding import PIECES, Encoding, load_encoding

_CONTEXT = 131072

# Bytes that a byte-level vocabulary spells as the character with the same number. All other bytes are spelled as
# characters from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    encoding = load_encoding()
    (folder / "tokenizer.json").write_bytes(orjson.dumps(_tokenizer(encoding)))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONTEXT,
    }
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))


def _tokenizer(encoding: Encoding) -> dict[str, object]:
    split: dict[str, object] = {
        "type": "Split",
        "pattern": {"Regex": PIECES},
        "behavior": "Isolated",
        "invert": False,
    }
    bytewise: dict[str, object] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokens = [encoding.decode_bytes([token]) for token in range(FIRST_SPECIAL)]
    spelled = _spellings()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(token, encoding.decode([token])) for token in range(FIRST_SPECIAL, VOCABULARY)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytewise]},
        "post_processor": None,
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token.decode("latin-1").translate(spelled): rank for rank, token in enumerate(tokens)},
            "merges": [[half.decode("latin-1").translate(spelled) for half in pair] for pair in _merges(tokens)],
        },
    }


def _merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return every pair of tokens that together form a token.

    The pairs are ordered by the rank of the resulting token. In each step, tiktoken merges the pair whose result has
    the lowest rank. Several pairs may result in the same token, so one pair per token would not be enough.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs: list[tuple[bytes, bytes]] = []
    for token in tokens:
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in ways if left in ranks and right in ranks]
        pairs += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return pairs


def _spellings() -> dict[int, int]:
    borrowed = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {byte: 0x100 + place for place, byte in enumerate(borrowed)}


def _special_token(token: int, content: str) -> dict[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": content, **plain}
