"""Translation of regular expressions to llama.cpp's grammars, checked with llguidance's reader of these grammars."""

from __future__ import annotations

import random
import re

import pytest

from unisono.api.structured_outputs import StructuredFields, to_answer_form
from unisono.core.conversation import TextGrammar
from unisono.schemas import violation
from unisono_adapters._gbnf import choice_grammar, client_grammar, regex_grammar


def accepts(gbnf: str, text: str) -> bool:
    form = to_answer_form(StructuredFields(guided_grammar=gbnf), None)
    assert form is not None
    assert form.grammar is not None
    return violation(form.grammar, text) is None


# An expression with texts that match it, and texts that do not.
TRANSLATED: dict[str, tuple[str, list[str], list[str]]] = {
    "literal": ('a"b\\\\', ['a"b\\'], ["a", ""]),
    "non-ASCII literal": ("日本🙂", ["日本🙂"], ["日本"]),
    "escaped operators": (r"\.\*\[\]\(\)\{\}\^\$\|\/\-\+\?", [".*[](){}^$|/-+?"], [".*"]),
    "escaped characters": (r"\n\t\r\x41\u0042\u{43}\x{1F600}", ["\n\t\rABC\U0001f600"], ["ntr"]),
    "any character": ("a.c", ["abc", "aéc", "a\rc"], ["a\nc", "ac"]),
    "class": ("[a-cx_.]+", ["abcx_."], ["d", ""]),
    "class with brackets": (r"[]\[^-]+", ["][^-"], ["a"]),
    "negated class": ("[^a-c\n]+", ["xyz é"], ["a", "x\n"]),
    "digits": (r"\d{3}-\d{2,}", ["123-45", "123-45678"], ["12-45", "123-4"]),
    "words": (r"\w+\s\w+", ["ab_ C9", "a\tb"], ["ab", "a  b"]),
    "negated shorthands": (r"\D\W\S", ["a.b", "--é"], ["1.b", "aab", "a. "]),
    "shorthand in a negated class": (r"[^\d\s]+", ["ab.c"], ["a1", "a b", "a\u00a0b"]),
    "alternation": ("red|green|", ["red", "green", ""], ["redgreen"]),
    "groups": ("(a|(?:bc)+|(?P<x>d)(?<y>e))f", ["af", "bcbcf", "def"], ["f", "bcaf", "df"]),
    "quantifiers": ("a?b*c+d{2}e{1,2}f{0,1}", ["cdde", "abbccddeef"], ["add", "cddeee", "cddeff"]),
    "lazy quantifiers": ("a??b*?c+?d{1,2}?", ["cd", "abbccdd"], ["c", "ab"]),
    "anchors at the ends": (r"^ab$|\Acd\z", ["ab", "cd"], ["abcd", "ab\n"]),
    "email": (r"[a-z0-9.]{1,20}@\w{6,10}\.com", ["alan.turing@enigma.com"], ["alan", "a@b.com"]),
    "address": (r"(\d{1,3}\.){3}\d{1,3}", ["10.0.0.255"], ["10.0.0", "10.0.0.2555"]),
    "empty": ("", [""], ["a"]),
}


@pytest.mark.parametrize(("pattern", "matching", "other"), TRANSLATED.values(), ids=TRANSLATED)
def test_the_grammar_allows_the_texts_of_the_expression(pattern: str, matching: list[str], other: list[str]) -> None:
    grammar = regex_grammar(pattern)
    assert grammar is not None
    expression = TextGrammar("regex", pattern)
    for text, is_match in [*((text, True) for text in matching), *((text, False) for text in other)]:
        assert (violation(expression, text) is None) is is_match, text
        assert accepts(grammar, text) is is_match, (grammar, text)


UNTRANSLATABLE: dict[str, str] = {
    "flag": "(?i)a",
    "group with a flag": "(?i:a)",
    "word boundary": r"\bfoo\b",
    "angle boundary": r"\<foo\>",
    "Unicode class": r"\p{L}+",
    "POSIX class": "[[:alpha:]]",
    "class operation": "[a-z&&b]",
    "anchor in a group": "(^a)",
    "anchor inside": "a^b",
    "anchor before a text": "a$b",
    "quantifier of a quantifier": "a{2}{3}",
    "quantifier without a minimum": "a{,3}",
    "none of it": "a{0}b",
    "repetition of nothing": "(a*)*",
    "limited repetition of nothing": "(a?){3}",
    "large": "(a{1,100}){1,100}",
    "long": "ab" * 501,
    "ambiguous repetition": r"(\w+\s?)*",
    "limited ambiguous repetition": "(.{1,30}){30}z",
    "overlapping branches": "(a|b|ab|ba){1,100}z",
    "equal branches": "(a|a)*b",
    "many overlapping repetitions": "a*" * 12,
    "many optional characters": "a?" * 20,
    "many transitions": "(" + "a?b?" * 60 + "c)+",
    "deep": "(" * 100 + "a" + ")" * 100,
    "a NUL character": r"\x00",
    "empty class": r"[^\d\D]",
}


@pytest.mark.parametrize("pattern", UNTRANSLATABLE.values(), ids=UNTRANSLATABLE)
def test_other_expressions_are_not_translated(pattern: str) -> None:
    assert regex_grammar(pattern) is None


ATOMS = ("a", "b", "[ab]", "[^a]", ".", r"\d", r"\w", r"\s", r"\.", "é")
QUANTIFIERS = ("", "", "", "?", "*", "+", "{2}", "{1,2}", "{1,}")


def expression(seeded: random.Random, depth: int = 0) -> str:
    """Return a random expression of the subset."""
    parts = []
    for _ in range(seeded.randint(1, 3)):
        if depth < 2 and seeded.random() < 0.3:
            parts.append(f"({expression(seeded, depth + 1)}|{expression(seeded, depth + 1)})")
        else:
            parts.append(seeded.choice(ATOMS))
        parts[-1] += seeded.choice(QUANTIFIERS)
    return "".join(parts)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(60))
def test_random_expressions_and_their_grammars_allow_the_same_texts(seed: int) -> None:
    seeded = random.Random(seed)
    pattern = expression(seeded)
    grammar = regex_grammar(pattern)
    if grammar is None:
        # The only reason in this subset is a repetition of a group that may be empty.
        assert re.search(r"\)[*+{]", pattern), pattern
        return
    for _ in range(40):
        text = "".join(seeded.choice("aab1é .\n") for _ in range(seeded.randint(0, 5)))
        # For ASCII, Python's engine is a second opinion; for other characters, a grammar may allow less.
        is_match = re.fullmatch(pattern, text, re.ASCII) is not None
        assert accepts(grammar, text) is is_match, (pattern, grammar, text)
        assert not is_match or violation(TextGrammar("regex", pattern), text) is None


@pytest.mark.parametrize(
    "pattern", [".*foo.*", r"[\s\S]*", "((a|b)?c)+", r"\S+@\S+", "positive|possible|post", "(ab|ac)+", r".+@.+\..+"]
)
def test_slightly_ambiguous_expressions_are_translated(pattern: str) -> None:
    grammar = regex_grammar(pattern)
    assert grammar is not None
    assert accepts(grammar, "aab") is (re.fullmatch(pattern, "aab") is not None)


@pytest.mark.parametrize("text", ["positive", 'a"b\\c\n\t', "日本 é 🙂", "\x01"], ids=ascii)
def test_a_choice_allows_each_of_its_texts_and_nothing_else(text: str) -> None:
    grammar = choice_grammar((text, "other"))
    assert accepts(grammar, text)
    assert accepts(grammar, "other")
    assert not accepts(grammar, text + "other")


CLIENT_GRAMMARS: dict[str, tuple[str, str]] = {
    "underscores": ('root ::= a_b "a_b" [a_b]\na_b ::= "x" # a_b', 'root ::= a-b "a_b" [a_b]\na-b ::= "x" # a_b'),
    "another rule of this name": (
        'root ::= a_b a-b\na_b ::= "x"\na-b ::= "y"',
        'root ::= a-b- a-b\na-b- ::= "x"\na-b ::= "y"',
    ),
    "escapes": (r'root ::= "\"_" [\]_] x_', r'root ::= "\"_" [\]_] x-'),
    "two names": ("root ::= a_b_c a_b-c", "root ::= a-b-c- a-b-c"),
    "nothing to rename": ('root ::= "a_" ("b" | [c-d]{1,2})', 'root ::= "a_" ("b" | [c-d]{1,2})'),
}


@pytest.mark.parametrize(("grammar", "renamed"), CLIENT_GRAMMARS.values(), ids=CLIENT_GRAMMARS)
def test_rules_of_a_client_get_names_without_underscores(grammar: str, renamed: str) -> None:
    assert client_grammar(grammar) == renamed
