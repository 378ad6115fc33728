"""Check of texts against regular expressions and Lark grammars, in bounded time for any of them."""

from __future__ import annotations

from time import process_time

import pytest

from unisono.bootstrap import engine
from unisono.core.conversation import TextGrammar
from unisono.schemas import BadGrammar, check_grammar, violation
from unisono.schemas.grammars import (
    MAX_CHECK_S,
    MAX_GRAMMAR_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    MISMATCH,
    PIECE_BYTES,
    _expanded_terminals,
    text_violation,
)

# Grammar of the `apply_patch` tool of Codex.
APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = """\
*** Begin Patch
*** Add File: a b.py
+print("日本")
+
*** Delete File: b.py
*** Update File: c.py
*** Move to: d.py
@@ def f():
-  return 1
+  return 2
*** End Patch"""

# Grammar, texts that match it, and texts that do not.
GRAMMARS: dict[str, tuple[TextGrammar, list[str], list[str]]] = {
    "Codex's patches": (
        TextGrammar("lark", APPLY_PATCH),
        [PATCH, PATCH + "\n"],
        ["", PATCH[:-3], PATCH + "\n\n", f"```\n{PATCH}\n```", '{"input": "x"}', PATCH.replace("@@ ", "@ ")],
    ),
    "a regex": (TextGrammar("regex", "[0-9]{4}-[0-9]{2}"), ["2026-11"], ["", "2026-1", "on 2026-11", "2026-11\n"]),
    "a regex with alternatives": (TextGrammar("regex", "a|b"), ["a", "b"], ["ab", "c"]),
    "a regex with flags": (TextGrammar("regex", "(?i)yes"), ["YES"], ["yes!"]),
    "a regex that is anchored": (TextGrammar("regex", "^a$"), ["a"], ["aa", "a\n"]),
}


@pytest.mark.parametrize(("grammar", "right", "wrong"), GRAMMARS.values(), ids=GRAMMARS)
def test_a_text_must_match_as_a_whole(grammar: TextGrammar, right: list[str], wrong: list[str]) -> None:
    check_grammar(grammar)
    assert [text for text in right if violation(grammar, text) is not None] == []
    assert [text for text in wrong if violation(grammar, text) is None] == []


def test_half_a_character_matches_no_grammar() -> None:
    assert violation(TextGrammar("lark", "start: /.*/"), "\ud800") is not None


UNENFORCEABLE: dict[str, TextGrammar] = {
    "no rules": TextGrammar("lark", ""),
    "an unknown rule": TextGrammar("lark", "start: other"),
    "a reference in a regex": TextGrammar("lark", r"start: /(a)\1/"),
    "a look-ahead": TextGrammar("lark", "start: /(?=a)b/"),
    "deep nesting": TextGrammar("lark", f"start: {'(' * 5000}'a'{')' * 5000}"),
    "too long": TextGrammar("lark", "start: " + "a" * MAX_GRAMMAR_CHARACTERS),
    "a regex with a reference": TextGrammar("regex", r"(a)\1"),
    "a regex that leaves its group": TextGrammar("regex", "a)|(b"),
    "a large regex": TextGrammar("regex", r"\w{1000}" * 100),
}


@pytest.mark.parametrize("grammar", UNENFORCEABLE.values(), ids=UNENFORCEABLE)
def test_a_grammar_that_cannot_be_enforced_is_refused(grammar: TextGrammar) -> None:
    with pytest.raises(BadGrammar) as raised:
        check_grammar(grammar)
    assert "\n" not in str(raised.value)


RULES = 900
# Grammars that take minutes without limits, or memory, and a text for each.
HOSTILE: dict[str, tuple[str, str]] = {
    "ambiguous rules": ('start: s\ns: s s | "a" | ', "a"),
    "more ambiguous rules": ('start: s\ns: s s s | s s | "a"', "a"),
    "right recursion": ('start: a\na: "x" a | "x"', "x"),
    "left recursion": ('start: a\na: a "x" | "x"', "x"),
    "an automaton of 2^40 states": ("start: /(a|b)*a(a|b){40}/", "ab"),
    "nested repetition": ("start: /(a{1000}){1000}/", "a"),
    "many rules": (
        f"start: {' | '.join(f'r{i}' for i in range(RULES))}\n"
        + "\n".join(f'r{i}: "x{i}" r{(i + 1) % RULES}?' for i in range(RULES)),
        "x1x2x3",
    ),
    "letters of all scripts": (r"start: /\p{L}{1,500}\p{N}{1,500}/", "é"),
    "endless rules": ("start: a\na: b\nb: a", "x"),
    "many terminals that fit the same text": (
        "start: (" + "|".join(f"/x{{{i},{i + 40}}}y?[a-z]*/" for i in range(60)) + ")*",
        "x",
    ),
    "terminals that double": (
        "start: R1 R1\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(1, RULES)) + f'\nR{RULES}: "a"',
        "a",
    ),
    "terminals that double, with priorities and comments": (
        "start: R1 R1\n"
        + "\n".join(f"R{i}.2: R{i + 1} // more\n | R{i + 1} R{i + 1}" for i in range(1, 300))
        + '\nR300: "a"',
        "a",
    ),
}


@pytest.mark.parametrize(("definition", "text"), HOSTILE.values(), ids=HOSTILE)
def test_no_grammar_takes_long(definition: str, text: str) -> None:
    grammar, began = TextGrammar("lark", definition), process_time()
    try:
        check_grammar(grammar)
        violation(grammar, (text * MAX_TEXT_CHARACTERS)[:MAX_TEXT_CHARACTERS], process_time)
    except BadGrammar:
        pass
    # It takes less than 0.2 s; the rest is for a busy machine.
    assert process_time() - began < 2


@pytest.mark.parametrize("ending", ["%ignore R300", "%ignore R1", "LOOP: LOOP", "%declare R1 R2", "R2: R1"])
def test_no_statement_hides_the_terminals_before_it(ending: str) -> None:
    doubles = "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(1, 300))
    with pytest.raises(BadGrammar, match="terminal"):
        check_grammar(TextGrammar("lark", f'start: R1\n{doubles}\nR300: "a"\n{ending}\n'))


def test_directives_are_no_part_of_a_terminal() -> None:
    definition = (
        'start: (WORD COMMA)* WORD\nWORD: /x+/\nWS: /[ ]+/\n%ignore WS\nCOMMA: ","\n  %ignore COMMENT\nCOMMENT: "#"\n'
    )
    assert _expanded_terminals(definition) == 4
    check_grammar(TextGrammar("lark", definition))


def test_names_in_texts_and_comments_are_no_terminals() -> None:
    names = " ".join(["R1"] * 900)
    definition = f'start: R1 R2\nR1: "{names}" // {names}\nR2: /{names}/ R3 R3\nR3: R1 "/" R1 "//" R1\n// R1: {names}'
    sizes = {"R1": 1, "R3": 4, "R2": 9}
    assert _expanded_terminals(definition) == sum(sizes.values())


class Clock:
    """Clock that advances by `step_s` seconds each time it is read."""

    def __init__(self, step_s: float) -> None:
        self.looks = 0
        self._step_s = step_s

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * self._step_s


def test_a_check_that_takes_too_long_is_given_up() -> None:
    grammar, text = TextGrammar("lark", 'start: "a"*'), "a" * MAX_TEXT_CHARACTERS
    quick, slow = Clock(0.0), Clock(MAX_CHECK_S / 10)
    assert text_violation(grammar, text[:-1] + "b", quick) == MISMATCH
    assert quick.looks > MAX_TEXT_CHARACTERS / PIECE_BYTES
    assert text_violation(grammar, text[:-1] + "b", slow) is None
    assert slow.looks < 20
    assert text_violation(grammar, "ab", slow) == MISMATCH


def test_the_engine_limits_the_time_of_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, text = TextGrammar("lark", 'start: "a"*'), "a" * 1000 + "b"
    assert engine.violation(grammar, text) == MISMATCH
    monkeypatch.setattr(engine, "thread_time", Clock(MAX_CHECK_S / 10))
    assert engine.violation(grammar, text) is None


def test_a_text_beyond_the_limits_is_accepted() -> None:
    assert violation(TextGrammar("lark", 'start: "a"*'), "b" * (MAX_TEXT_CHARACTERS + 1)) is None
    assert violation(TextGrammar("lark", HOSTILE["ambiguous rules"][0]), "a" * 1000) is None
    assert violation(TextGrammar("regex", "[a-c]{900}d"), "b" * 1_000_000) is None
