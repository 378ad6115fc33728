"""Classification of recipients: a client's function, a tool gpt-oss was trained on, or none.

The rules apply in the order of vLLM's `is_function_recipient`, with additional rules for misspellings that models
write. A misspelled name is corrected only if it matches exactly one declared tool. `offered` then marks the calls of
those builtin tools that the request offers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import auto
from functools import cached_property

from unisono.core.frozen import TableKey
from unisono.harmony.builtin_tools import FUNCTIONS_OF, namespace
from unisono.harmony.misspelled_tool_names import MAX_RECIPIENT_LENGTH, corrected, resolve

FUNCTIONS = "functions."
_TOOL = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
# Recipients that models write and that are never tools: roles, channels and content types.
NO_TOOLS = frozenset(
    {"assistant", "user", "system", "developer", "tool", "all", "functions", "functions."}
    | {"analysis", "commentary", "final", "json", "code", "text"}
)
# Recipient in any case, with `:` instead of `=`, or directly after another word. The name ends at a space, at the `{`
# of arguments, or at a marker.
_LOOSE = re.compile(
    r"(?<![\w-])(?P<glued>assistant|analysis|commentary|final)?to {0,2}[=:]{1,2} {0,2}"
    r"(?P<name>[^\s{\ud800-\udfff]{1,256})",
    re.IGNORECASE,
)


class RecipientKind(TableKey):
    # Call of a client's function.
    FUNCTION = auto()
    # Call to a tool that gpt-oss was trained on and the request does not offer. The message becomes reasoning.
    BUILTIN = auto()
    # Call to a tool that gpt-oss was trained on and the request offers. The gateway runs it as a server tool.
    HOSTED = auto()
    # No call: the body is text.
    NONE = auto()


@dataclass(frozen=True)  # without slots, because `cached_property` needs a `__dict__`
class Recipient:
    """Recipient of a message.

    `name` is the wire name of a function, or the whole recipient of a builtin tool, such as `browser.search`.
    `is_corrected` means that the model misspelled the name.
    """

    kind: RecipientKind
    name: str = ""
    is_corrected: bool = False

    @cached_property
    def full_name(self) -> str:
        """Return the name as a header spells it, such as `functions.NAME`; "" for no recipient."""
        match self.kind:
            case RecipientKind.NONE:
                return ""
            case RecipientKind.FUNCTION:
                return f"{FUNCTIONS}{self.name}"
            case RecipientKind.HOSTED | RecipientKind.BUILTIN:
                return self.name


NOBODY = Recipient(RecipientKind.NONE)


def choose_recipient(words: Iterable[str], declared: frozenset[str] | None) -> Recipient:
    """Return the first of the header's recipients `words` that is a tool, or `NOBODY`."""
    found = (read_recipient(word, declared) for word in words)
    return next((recipient for recipient in found if recipient.kind is not RecipientKind.NONE), NOBODY)


def read_recipient(word: str, declared: frozenset[str] | None) -> Recipient:
    """Classify a recipient; the spelling of a marker in `word` makes it `NOBODY`.

    `declared` are the wire names of the offered tools. If `declared` is None (raw parsing), any name that is not a
    builtin tool is read as a function.
    """
    # A marker spelled in ordinary tokens would become a real one in a rewritten header.
    if not word or "<|" in word or len(word) > MAX_RECIPIENT_LENGTH:
        return NOBODY
    if word.startswith(FUNCTIONS):
        name = word[len(FUNCTIONS) :]
        if not name:
            return NOBODY
        mended = corrected(name, declared) or resolve(name, declared)
        return Recipient(RecipientKind.FUNCTION, mended or name, mended not in (None, name))
    if word == "assistant":
        return NOBODY
    if namespace(word) in FUNCTIONS_OF:
        return Recipient(RecipientKind.BUILTIN, word)
    if declared is None:
        return Recipient(RecipientKind.FUNCTION, word)
    if word in declared:
        return Recipient(RecipientKind.FUNCTION, word)
    if (mended := corrected(word, declared)) is not None:
        return Recipient(RecipientKind.FUNCTION, mended, True)
    return NOBODY


def cut_at_marker(word: str) -> tuple[str, bool]:
    """Cut the parts of a dotted name at a spelled marker; return the name, and True if cut.

    The returned name is empty if any part is empty after the cut.
    """
    if "<|" not in word:
        return word, False
    parts = [part.partition("<|")[0] for part in word.split(".")]
    return ("" if "" in parts else ".".join(parts)), True


# Kinds of recipient that make a message a call.
CALLS = frozenset({RecipientKind.FUNCTION, RecipientKind.HOSTED})


def may_be_tool(word: str) -> bool:
    """Return whether an undeclared recipient looks like the name of a tool."""
    return _TOOL.fullmatch(word) is not None and word.casefold() not in NO_TOOLS


def offered(recipient: Recipient, declared: frozenset[str] | None, builtins: frozenset[str]) -> Recipient:
    """Return the recipient, with the kind `HOSTED` if it names an offered builtin tool.

    `builtins` are the offered builtin tools. `functions.browser.search` also names the builtin function, unless the
    client declared a function of that name.
    """
    word = recipient.name
    if namespace(word) not in builtins:
        return recipient
    if recipient.kind is RecipientKind.FUNCTION:
        theirs = word in FUNCTIONS_OF[namespace(word)] and word not in (declared or ())
        return Recipient(RecipientKind.HOSTED, word, True) if theirs else recipient
    if recipient.kind is not RecipientKind.BUILTIN:
        return recipient
    known = FUNCTIONS_OF[namespace(word)]
    # If a tool has only one function, any name in its namespace means that function.
    mended = next(iter(known)) if known == {namespace(word)} and word not in known else corrected(word, known)
    return replace(recipient, kind=RecipientKind.HOSTED, name=mended or word, is_corrected=mended is not None)


def respell(header: str, declared: frozenset[str] | None) -> str:
    """Rewrite each loosely spelled recipient of a declared tool in the canonical spelling."""

    def canonical(found: re.Match[str]) -> str:
        name = resolve(found["name"], declared)
        return found[0] if name is None else f"{found['glued'] or ''} to={FUNCTIONS}{name}"

    return _LOOSE.sub(canonical, header) if declared else header
