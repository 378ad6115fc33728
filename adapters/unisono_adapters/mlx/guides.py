"""Constraints in the engine process: compiled with llguidance, enforced by masking logits.

Importing this module imports neither mlx nor llguidance. So an engine without llguidance can report that llguidance is
missing, and serve all requests that have no constraint. Grammars are compiled in a separate thread and cached. Each
request gets a copy of its grammar. The first grammar takes about a second longer, because the vocabulary is read only
then, not at startup.
"""

from __future__ import annotations

import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, assert_never, cast

import orjson

from unisono.core.generation import (
    STOP_TOKENS,
    VOCABULARY,
    AnyJson,
    Constraint,
    Gbnf,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
)
from unisono.core.lru_cache import RecentEntries
from unisono_adapters._constraints import as_lark, schema_of

if TYPE_CHECKING:
    import llguidance
    import mlx.core as mx

# Maximum number of cached grammars; a large one takes a few megabytes.
MAX_CACHED_GRAMMARS = 128
# White space allowed between JSON tokens. Without a bound, a model that does not want to continue the JSON can
# generate white space until its token limit.
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})?"


class Unguidable(Exception):
    """Constraint that cannot be compiled to a grammar."""


def installed() -> bool:
    """Return whether llguidance can be imported."""
    try:
        importlib.import_module("llguidance")
    except ImportError:
        return False
    return True


class Guide:
    """Logits processor that keeps the output of one request within a grammar.

    The generation thread calls it. `failed` is empty, or the reason why llguidance cannot follow the grammar any
    further, such as a limit on complexity. Only stop tokens are then allowed, and the request fails.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._seen: int | None = None
        self.failed = ""

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Set the logits of all tokens that the grammar forbids to minus infinity.

        `tokens` are all ids of the request so far. In the first call these are the ids of the prompt.
        """
        import mlx.core as mx
        import numpy as np

        if self._seen is not None:
            self._consume(cast("list[int]", tokens[self._seen :].tolist()))
        self._seen = tokens.shape[0]
        allowed = np.zeros(logits.shape[-1], dtype=bool)
        if self.failed or self._matcher.is_stopped():
            allowed[list(STOP_TOKENS)] = True
        else:
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[: len(allowed)]
            allowed[: len(bits)] = bits
            self._check_start()
        return mx.where(mx.array(allowed), logits, mx.array(-np.inf, dtype=logits.dtype))

    def _consume(self, tokens: list[int]) -> None:
        if not self.failed and not self._matcher.is_stopped():
            self._matcher.consume_tokens(tokens)
            self._check_start()

    def _check_start(self) -> None:
        if self._matcher.is_error():
            self.failed = self._matcher.get_error()


class Guides:
    """Cache of grammars that were compiled for the vocabulary of one model folder.

    `threads` is an executor with a single thread. Call `guide` only on that thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: RecentEntries[bytes, llguidance.LLMatcher] = RecentEntries(MAX_CACHED_GRAMMARS)
        self.threads = ThreadPoolExecutor(1, "grammars")

    def guide(self, constraint: Constraint) -> Guide:
        """Return a new guide for a constraint.

        Raises Unguidable if llguidance is not installed or rejects the grammar of the constraint.
        """
        key = orjson.dumps([constraint.kind, constraint], default=dict)
        matcher = self._compiled.get(key) or self._compile(constraint)
        self._compiled.put(key, matcher)
        return Guide(matcher.deep_copy())

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        try:
            import llguidance
        except ImportError as error:
            raise Unguidable("llguidance is not installed: pip install llguidance") from error
        if self._tokenizer is None:
            vocabulary = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=VOCABULARY, eos_token=list(STOP_TOKENS))
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, _grammar(constraint), log_level=0)
        except ValueError as error:
            raise Unguidable(_line(str(error))) from error
        if matcher.is_error():
            raise Unguidable(_line(matcher.get_error()))
        return matcher


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    match constraint:
        case JsonSchema() | AnyJson():
            schema = orjson.dumps(schema_of(constraint), default=dict).decode()
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
        case OneOf(texts):
            return LLMatcher.grammar_from_lark(as_lark(texts))
        case Regex(pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case Gbnf(lark=grammar) | Lark(grammar):
            return LLMatcher.grammar_from_lark(grammar)
        case _:
            assert_never(constraint)


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:300]
