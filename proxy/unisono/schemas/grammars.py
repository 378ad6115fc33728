"""Checks of texts against grammars from clients: regular expressions and Lark grammars.

No grammar can keep the process busy. Regular expressions run in linear time. Lark grammars run in llguidance, which
limits the work per byte; OpenAI uses the same library for such grammars. If the caller passes a clock, this module
limits the total time. Lark's own library is not used. It runs the regular expressions of a grammar on Python's engine,
which can take exponential time and cannot be interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Final

from unisono.core.conversation import TextGrammar
from unisono.schemas.patterns import BadPattern, Expression

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Maximum characters of a Lark grammar. For comparison, the grammar of Codex has 700.
MAX_GRAMMAR_CHARACTERS: Final = 16_000
# Maximum characters of a text that is checked. llguidance takes about 2 µs per character with the grammar of Codex.
MAX_TEXT_CHARACTERS: Final = 32_000
# Maximum processor time in seconds for the check of a text against a Lark grammar. The limits of llguidance apply to
# each byte: a grammar of 60 terminals that match the same text can take 0.1 ms per byte, and 3 s for the longest text.
MAX_CHECK_S: Final = 0.25
# Number of bytes that llguidance reads in one call. During a call, it holds the interpreter lock for up to a few
# milliseconds.
PIECE_BYTES: Final = 16
# Maximum validation steps of a regular expression. A step takes about a microsecond.
MAX_STEPS: Final = 100_000
MAX_CACHED_GRAMMARS: Final = 32
# Maximum number of terminals in a grammar after each reference to a terminal is replaced by its definition. llguidance
# makes these replacements before it checks its own limits: 700 terminals, each of which contains the next terminal
# twice, take 20 seconds. Grammars below this maximum take about 10 ms.
MAX_EXPANDED_TERMINALS: Final = 100_000

_LITERAL: Final = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
# Beginning of a definition, or of a directive, such as `%ignore`. Only definitions have a name.
_STATEMENT: Final = re.compile(r"^[ \t]*(?:%|[?!]*(\w+)[^:|%\n]*:)", re.MULTILINE)
_TERMINAL: Final = re.compile(r"\b_*[A-Z][A-Z0-9_]*\b")

MISMATCH: Final = "The text does not match the grammar of the tool."


class BadGrammar(ValueError):
    """A grammar cannot be enforced. The message is the reason."""


def check_grammar(grammar: TextGrammar) -> None:
    """Raise BadGrammar if texts cannot be checked against `grammar`."""
    try:
        if grammar.syntax == "regex":
            Expression(grammar.definition)
            _whole(grammar.definition)
        else:
            _matcher(grammar.definition)
    except BadPattern as error:
        raise BadGrammar(str(error)) from error


def text_violation(grammar: TextGrammar, text: str, processor_time: Callable[[], float] = lambda: 0.0) -> str | None:
    """Describe how `text` violates `grammar`.

    `processor_time` is a clock in seconds. The default clock stands still, so the time is not limited. Returns None if
    the text is valid, if it is too long, or if the check takes too long.
    """
    if grammar.syntax == "regex":
        expression = _whole(grammar.definition)
        return None if expression.steps(text) > MAX_STEPS or expression.found(text) else MISMATCH
    if len(text) > MAX_TEXT_CHARACTERS:
        return None
    matcher = _matcher(grammar.definition).deep_copy()
    content = [*text.encode(errors="surrogatepass")]
    end = processor_time() + MAX_CHECK_S
    for begin in range(0, len(content), PIECE_BYTES):
        piece = content[begin : begin + PIECE_BYTES]
        consumed = matcher.try_consume_tokens(piece)
        # An error means that a limit was reached. A text that does not match is not an error.
        if matcher.is_error() or processor_time() > end:
            return None
        if consumed < len(piece):
            return MISMATCH
    return None if matcher.is_accepting() else MISMATCH


@lru_cache(MAX_CACHED_GRAMMARS)
def _whole(pattern: str) -> Expression:
    """Return an expression that matches if `pattern` matches the whole text. Raises BadPattern."""
    return Expression(rf"\A(?:{pattern})\z")


@lru_cache(MAX_CACHED_GRAMMARS)
def _matcher(definition: str) -> LLMatcher:
    """Return a matcher for a Lark grammar, in its initial state.

    Raises BadGrammar for an invalid grammar.
    """
    from llguidance import LLMatcher

    if len(definition) > MAX_GRAMMAR_CHARACTERS:
        raise BadGrammar(f"it has more than {MAX_GRAMMAR_CHARACTERS:,} characters")
    if _expanded_terminals(definition) > MAX_EXPANDED_TERMINALS:
        raise BadGrammar(f"its terminals expand to more than {MAX_EXPANDED_TERMINALS:,} terminals")
    tokenizer, limits = _bytes()
    grammar = LLMatcher.grammar_from_lark(definition)
    try:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    except ValueError as error:
        raise BadGrammar(_one_line(str(error))) from error
    if matcher.is_error():
        raise BadGrammar(_one_line(matcher.get_error()))
    return matcher


def _expanded_terminals(definition: str) -> int:
    """Return the number of terminals in a Lark grammar after references are replaced.

    Raises BadGrammar if a terminal contains itself.
    """
    text = _LITERAL.sub(" ", definition)
    statements = [*_STATEMENT.finditer(text)]
    ends = [*(following.start() for following in statements[1:]), len(text)]
    references: dict[str, list[str]] = {}
    for found, end in zip(statements, ends, strict=False):
        if found[1] is not None and _TERMINAL.fullmatch(found[1]):
            references.setdefault(found[1], []).extend(_TERMINAL.findall(text, found.end(), end))
    sizes: dict[str, int] = {}
    try:
        for name in TopologicalSorter(references).static_order():
            sizes[name] = 1 + sum(sizes[each] for each in references.get(name, ()))
    except CycleError as error:
        raise BadGrammar(f"a terminal contains itself: {' -> '.join(error.args[1][:8])}") from error
    return sum(sizes.values())


@cache
def _bytes() -> tuple[LLTokenizer, LLParserLimits]:
    """Return a tokenizer with one token per byte, and the limits on the work of a matcher."""
    from llguidance import LLParserLimits, LLTokenizer

    # With the library's own limits, an ambiguous grammar of two lines takes minutes for 3,000 characters. With these,
    # no grammar was found that takes more than a millisecond for a byte. A row of Codex's grammar has less than 32
    # items.
    limits = LLParserLimits(
        max_items_in_row=128,
        initial_lexer_fuel=100_000,
        step_lexer_fuel=20_000,
        step_max_items=2_000,
        max_lexer_states=20_000,
        max_grammar_size=20_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return LLTokenizer("byte"), limits


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
