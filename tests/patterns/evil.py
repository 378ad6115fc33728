"""Inputs that make a backtracking matcher slow, derived from the parse tree of a pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from re import _constants  # type: ignore[attr-defined]
from typing import Any, Final

from tests.patterns.backtracking import CHARACTERS, REPEATS, Tree, children

PROBES: Final = "\0\t\n\r !\"'()-./059:<=>\\_`aAfFgzZ{|}~\x7f\x85é"
WIDE_PROBES: Final = "中\u2028\ud800†【】"
SAMPLES: Final = 3


@dataclass(frozen=True)
class Evil:
    """Growing text: `prefix`, then `pump` several times, then `suffix`."""

    prefix: str
    pump: str
    suffix: str

    def text(self, times: int) -> str:
        return self.prefix + self.pump * times + self.suffix


def set_alphabet(tree: Tree) -> list[str]:
    """Give the tree one character for every combination of its character sets, and return them."""
    items = list(_characters(tree.parsed, tree.flags))
    candidates = [*_literals(item for item, _ in items), *PROBES, *("" if tree.is_bytes else WIDE_PROBES)]
    kinds: dict[tuple[bool, ...], str] = {}
    for character in candidates:
        if not tree.is_bytes or ord(character) < 256:
            known = tuple(tree.accepts(item, character, flags) for item, flags in items)
            kinds.setdefault((*known, character == "\n", character == "_" or character.isalnum()), character)
    alphabet = list(kinds.values())
    everything = set(_texts(tree, alphabet))
    tree.alphabet = frozenset(alphabet).union(*everything) if everything else frozenset(alphabet)
    return alphabet


def _texts(tree: Tree, alphabet: list[str]) -> Iterator[str]:
    for prefix, body, rest in _repeats(tree, tree.parsed, tree.flags, alphabet, [""], [""]):
        yield from (*prefix, *body, *rest)


def evils(tree: Tree, *, thorough: bool = False) -> Iterator[Evil]:
    """Yield inputs that repeat the body or the surroundings of every repeat, with several ends."""
    alphabet = set_alphabet(tree)
    found: dict[Evil, None] = {}
    for prefixes, bodies, rests in _repeats(tree, tree.parsed, tree.flags, alphabet, [""], [""]):
        pumps = list(dict.fromkeys([*bodies, *alphabet, *map("".join, product(prefixes[:1], [*bodies, *alphabet]))]))
        pumps += [prefix for prefix in prefixes[:2] if prefix]
        pumps += [body + rest for body in bodies[:1] for rest in rests[:2]]
        if thorough:
            pumps += map("".join, product(alphabet, repeat=2))
        ends = list(dict.fromkeys(["", "\0", "\n", *(rest + "\0" for rest in rests[:1])]))
        starts = list(dict.fromkeys(["", *prefixes[: SAMPLES if thorough else 2]]))
        for prefix, pump, suffix in product(starts, pumps, ends):
            if pump:
                found[Evil(prefix, pump, suffix)] = None
    tree.alphabet = tree.alphabet.union(*(evil.text(1) for evil in found), "\0\n")
    yield from found


Samples = list[str]


def _repeats(
    tree: Tree, items: Iterable[Any], flags: int, alphabet: Samples, before: Samples, after: Samples
) -> Iterator[tuple[Samples, Samples, Samples]]:
    """Yield texts before, inside and after every repeat of the tree."""
    items = list(items)
    for index, (op, value) in enumerate(items):
        lead = _joined(before, _sample(tree, items[:index], flags, alphabet))
        rest = _joined(_sample(tree, items[index + 1 :], flags, alphabet), after)
        if op in REPEATS:
            yield lead, _sample(tree, value[2], flags, alphabet, repeated=True), rest
        for inner, inner_flags in _children(op, value, flags):
            yield from _repeats(tree, inner, inner_flags, alphabet, lead, rest)


def _children(op: Any, value: Any, flags: int) -> Iterator[tuple[Iterable[Any], int]]:
    if op is _constants.SUBPATTERN:
        flags = (flags | value[1]) & ~value[2]
    yield from ((inner, flags) for inner in children(op, value))


def _sample(tree: Tree, items: Iterable[Any], flags: int, alphabet: Samples, *, repeated: bool = False) -> Samples:
    """Return some texts that the items match in sequence, ignoring assertions."""
    texts = [""]
    for item in items:
        op, value = item
        if op in CHARACTERS:
            some = [character for character in alphabet if tree.accepts(item, character, flags)]
            some = some or [c for c in _literals([item]) if tree.accepts(item, c, flags)]
        elif op in REPEATS:
            low, high = tree.bounds(*value[:2])
            one = _sample(tree, value[2], flags, alphabet)
            some = [text * low for text in one] if low else ["", *one] if high else [""]
        elif op is _constants.SUBPATTERN:
            some = _sample(tree, value[3], (flags | value[1]) & ~value[2], alphabet)
        elif op is _constants.BRANCH:
            some = [text for branch in value[1] for text in _sample(tree, branch, flags, alphabet)[:2]]
        elif op is _constants.ATOMIC_GROUP:
            some = _sample(tree, value, flags, alphabet)
        else:
            continue
        texts = _joined(texts, some, most=8 if repeated else SAMPLES)
    return texts


def _joined(first: Samples, second: Samples, *, most: int = SAMPLES) -> Samples:
    joined = [a + b for b, a in product(second or [""], first)]
    return sorted(dict.fromkeys(joined), key=len)[:most]


def _characters(items: Iterable[Any], flags: int) -> Iterator[tuple[Any, int]]:
    for item in items:
        op, value = item
        if op in CHARACTERS:
            yield item, flags
        for inner, inner_flags in _children(op, value, flags):
            yield from _characters(inner, inner_flags)


def _literals(items: Iterable[Any]) -> Iterator[str]:
    """Yield the literal characters of the items and the edges of their ranges."""
    for op, value in items:
        if op in (_constants.LITERAL, _constants.NOT_LITERAL):
            yield chr(value)
        elif op is _constants.RANGE:
            yield from map(chr, value)
        elif op is _constants.IN:
            yield from _literals(value)
