"""Interpretation of a buffered header: role, channel, recipient and content type.

A header is one string in which marker ids are represented by lone surrogates. A marker spelled in ordinary
tokens cannot be mistaken for one, because decoded UTF-8 contains no surrogates.
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from enum import Enum, auto
from functools import cached_property

from unisono.core.frozen import dataclass
from unisono.harmony.builtin_tools import is_builtin
from unisono.harmony.recipients import (
    CALLS,
    FUNCTIONS,
    NOBODY,
    Recipient,
    RecipientKind,
    choose_recipient,
    cut_at_marker,
    may_be_tool,
    read_recipient,
    respell,
)

# Surrogates for the ids of `<|start|>`, `<|channel|>` and `<|constrain|>`.
S, C, T = "\ud800", "\ud801", "\ud802"

ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
CHANNELS = (ANALYSIS, COMMENTARY, FINAL)
ASSISTANT = "assistant"

_PIECE = re.compile(rf"[{C}{T}]|\s+|[^\s{C}{T}]+")
_REPEATED_ROLE = re.compile(rf"\A(?:{ASSISTANT})+")
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,32}\Z")
TYPES = frozenset({"json", "code", "text", "response", "json_schema", "markdown", "string"})
_NAME = r"[A-Za-z0-9_.:-]+"
_LEGAL = re.compile(rf"(?: to={_NAME})?{C}(?:{'|'.join(CHANNELS)})(?: to={_NAME})?(?: ?{T}\w+| \w+)?\Z", re.ASCII)
# A truncated channel name is recognised if it has at least this number of letters.
_MIN_STEM_LENGTH = 4

INVENTED_ROLES = frozenset({"user", "system", "developer", "tool"})


class BodyHandling(Enum):
    """Handling of the tokens of a body, which depends on the header."""

    # Emit every token at once.
    FORWARD = auto()
    # Buffer the body: its terminator, or its JSON, decides whether the message is a call.
    BUFFER = auto()
    # Drop the message: its role is invented.
    DROP = auto()


@dataclass(frozen=True)  # without slots, because `cached_property` needs a `__dict__`
class Header:
    """Meaning of a header. `body` is message text inside a header without `<|message|>`."""

    channel: str = FINAL
    recipient: Recipient = NOBODY
    content_type: str | None = None
    rules: tuple[str, ...] = ()
    # True if the generated header is legal and its tokens may be forwarded.
    verbatim: bool = False
    # True for a message of an invented role; the message is dropped.
    dropped: bool = False
    # Recipient if the message ends with `<|call|>`, for a header with a tool's name instead of the role.
    if_called: Recipient = NOBODY
    # Header to use if the body is a JSON object, for a header with a misspelled recipient.
    if_json: Header | None = None
    # Number of characters of the header words that have no meaning and are dropped.
    lost: int = 0
    body: str = ""
    # True for text between messages, without any header.
    stray: bool = False
    # True if `body` has no channel: it is reasoning if another message follows, otherwise the answer.
    thought: bool = False

    @cached_property
    def is_call(self) -> bool:
        return self.recipient.kind in CALLS

    @cached_property
    def is_answer(self) -> bool:
        """True for an answer or a call. Later text without a header is then not the answer."""
        return self.recipient.kind is not RecipientKind.NONE or self.channel == FINAL

    @cached_property
    def handling(self) -> BodyHandling:
        if self.if_called is not NOBODY or self.if_json is not None:
            return BodyHandling.BUFFER
        return BodyHandling.DROP if self.dropped else BodyHandling.FORWARD

    def spelled(self) -> str:
        """Return the canonical header from the channel on, with markers spelled out."""
        to = ""
        if self.recipient.kind is RecipientKind.FUNCTION:
            to = f" to={FUNCTIONS}{self.recipient.name}"
        elif self.recipient.kind is not RecipientKind.NONE:
            to = f" to={self.recipient.name}"
        # In a header without a recipient, openai-harmony reads a content type as the recipient. So text has none.
        kind = f" <|constrain|>{self.content_type}" if to and self.content_type else ""
        if self.recipient.kind is RecipientKind.HOSTED:
            # Calls to builtin tools have the content type `code`, regardless of their content.
            kind = " code"
        return f"<|channel|>{self.channel}{to}{kind}<|message|>"


@dataclass(slots=True)
class HeaderWords:
    """Words of one header segment, before their interpretation."""

    channels: list[str] = field(default_factory=list)
    leaked: str = ""
    recipients: list[str] = field(default_factory=list)
    marked_type: str | None = None
    plain_type: str | None = None
    stray: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    unknown_tool: str = ""  # recipient that looks like the name of a tool, but is not declared

    def note(self, rule: str) -> None:
        if rule not in self.rules:
            self.rules.append(rule)


def read_header(text: str, declared: frozenset[str] | None, *, role_given: bool, supplied: bool = False) -> Header:
    """Return the meaning of a header that reached `<|message|>`.

    `declared` are the wire names of the offered tools, None if unknown. `role_given` means that `text` begins with the
    role, because the output contains the `<|start|>`. `supplied` means that repair inserted the `<|start|>`.
    """
    header, unknown_tool = _read_header(text, declared, role_given, supplied)
    if header.recipient is not NOBODY or header.dropped or header.if_called is not NOBODY:
        return header
    # A word may look like a recipient by chance. The body decides: only the body of a call is a JSON object.
    respelled = respell(text, declared)
    called = header if respelled == text else _read_header(respelled, declared, role_given, supplied)[0]
    if called.is_call:
        return replace(header, if_json=respelled_call(called), verbatim=False)
    if not unknown_tool:
        return header
    # The body also decides about the name of a tool that is not declared: the client must not get arguments as text.
    rules = tuple(rule for rule in header.rules if rule not in ("not-a-tool", "type-as-recipient"))
    recipient = Recipient(RecipientKind.FUNCTION, unknown_tool)
    call = replace(header, channel=COMMENTARY, recipient=recipient, rules=rules, verbatim=False)
    return replace(header, if_json=call, verbatim=False)


def respelled_call(header: Header) -> Header:
    """Return the header of a call, with a recorded repair of the recipient's spelling."""
    return replace(header, rules=tuple(dict.fromkeys((*header.rules, "recipient-spelling"))), verbatim=False)


def _read_header(text: str, declared: frozenset[str] | None, role_given: bool, supplied: bool) -> tuple[Header, str]:
    """Return the meaning of a header, and the undeclared tool that the header names, or ""."""
    *earlier, segment = text.split(S)
    words = HeaderWords()
    carried = _read_earlier(earlier, words, role_given)
    again = not role_given and not earlier and segment.lstrip().startswith(ASSISTANT)
    if again:
        # The prompt already ends in the role, so the model wrote the role a second time.
        words.note("glued-role")
        segment = segment.lstrip()
    role, segment = split_role(segment, words) if role_given or earlier or again else ("", segment)
    _read_words(segment, declared, words)
    if carried is not None:
        words.recipients = words.recipients or ([] if _last_known(words) == FINAL else carried.recipients)
        words.channels = words.channels or carried.channels
    header = _judge(words, declared, has_role=role_given or bool(earlier), supplied=supplied)
    if role:
        return _foreign(role, header, words, declared), ""
    verbatim = not header.rules and not supplied and _LEGAL.match(segment) is not None
    return replace(header, verbatim=verbatim), words.unknown_tool


def _read_earlier(earlier: list[str], words: HeaderWords, role_given: bool) -> HeaderWords | None:
    """Return the words before the last `<|start|>` in a header; None if there are none to use.

    `earlier` are the texts before each `<|start|>`, at which the model began the header again.
    """
    if not earlier:
        return None
    if not role_given and earlier == [""]:
        words.note("echoed-prefix")
        return None
    carried = HeaderWords()
    for part in earlier:
        _read_words(part.removeprefix(ASSISTANT), None, carried)
    words.note("marker-in-recipient" if carried.recipients else "doubled-start")
    carried.recipients = [cut_at_marker(word)[0] for word in carried.recipients]
    return carried


def _last_known(words: HeaderWords) -> str:
    return spell_channel(words.channels[-1])[0] if words.channels else ""


def split_role(segment: str, words: HeaderWords) -> tuple[str, str]:
    """Return the role ("" for `assistant` or no role) and the rest; record repairs in `words`."""
    if segment.startswith(ASSISTANT):
        rest = segment[len(ASSISTANT) :]
        if rest and not rest[0].isspace() and rest[0] not in (C, T):
            words.note("glued-role")
            rest = " " + _REPEATED_ROLE.sub("", rest, count=1).lstrip("–—-_.,:;!?*#|/\\")
        return "", rest
    first = _PIECE.match(segment)
    if first is None or first[0] in (C, T) or first[0].isspace():
        words.note("missing-start")
        return "", segment
    if spell_channel(first[0])[1] or first[0].startswith("to="):
        words.note("glued-role")
        return "", " " + segment
    return first[0], segment[first.end() :]


def _read_words(segment: str, declared: frozenset[str] | None, words: HeaderWords) -> None:
    pieces = _PIECE.findall(segment)
    want_channel = want_recipient = False
    skip = False
    for i, piece in enumerate(pieces):
        before = pieces[i - 1] if i else ""
        after = pieces[i + 1] if i + 1 < len(pieces) else ""
        if skip:
            skip = False
        elif piece == C:
            want_channel, skip = _read_channel_marker(words, before, after)
        elif piece == T:
            skip = _read_type_marker(words, before, after)
            want_recipient = False
        elif piece.isspace():
            if want_channel:
                words.note("empty-channel")
        elif want_channel and not piece.startswith("to="):
            want_channel = False
            words.channels[-1] = piece
        elif piece.startswith("to="):
            want_channel, want_recipient = False, piece == "to="
            if words.marked_type is not None and not words.recipients:
                words.note("header-order")
            if not want_recipient:
                words.recipients.append(piece[3:])
        elif want_recipient:
            want_recipient = False
            words.note("recipient-spelling")
            words.recipients.append(piece)
        elif piece in TYPES and piece not in (declared or ()):
            words.plain_type = words.plain_type or piece
        else:
            words.stray.append(piece)


def _read_channel_marker(words: HeaderWords, before: str, after: str) -> tuple[bool, bool]:
    """Handle `<|channel|>`; return whether a channel must follow, and whether `after` was read.

    `before` and `after` are the neighbouring pieces. A marker directly after a recipient is usually a mistake in the
    recipient's name. The exception is the header's first marker, because a recipient may precede the channel.
    """
    word = "" if after in ("", C, T) or after.isspace() else after
    if before.startswith("to=") and words.recipients:
        name = words.recipients[-1]
        leaked, dot, tail = word.partition(".")
        if dot or words.channels or name.endswith("."):
            words.note("marker-in-recipient")
            words.leaked = words.leaked or leaked
            words.recipients[-1] = "" if name.endswith(".") else name + dot + tail
            return False, bool(word)
    if words.channels:
        words.note("channel-repeated")
    words.channels.append("")
    return True, False


def _read_type_marker(words: HeaderWords, before: str, after: str) -> bool:
    """Handle `<|constrain|>`, and return whether `after`, the piece after the marker, was read."""
    if before == "to=":
        words.note("type-as-recipient")
    elif before.startswith("to=") and words.recipients and words.recipients[-1].endswith("."):
        words.note("marker-in-recipient")
        words.recipients[-1] = ""
    word = "" if after in ("", C, T) or after.isspace() else after
    if not word:
        words.note("constrain-empty")
    elif words.marked_type is not None:
        words.note("constrain-repeated")
    else:
        words.marked_type = word
    return bool(word)


def _judge(words: HeaderWords, declared: frozenset[str] | None, *, has_role: bool, supplied: bool) -> Header:
    recipient = _judge_recipient(words, declared)
    channel = _judge_channel(words, recipient, has_role=has_role, supplied=supplied)
    content_type = words.marked_type or words.plain_type
    if content_type is not None and recipient.kind is RecipientKind.NONE:
        words.note("type-as-recipient")
        content_type = None
    elif content_type is not None and not _PLAIN.match(content_type):
        words.note("stray-header-words")
        content_type = "json" if content_type.startswith("json") else None
    if words.stray:
        spelling = len(words.stray) == 1 and not any(c.isalpha() for c in words.stray[0])
        words.note("channel-spelling" if spelling else "stray-header-words")
    return Header(channel, recipient, content_type, tuple(words.rules), lost=sum(map(len, words.stray)))


def _judge_recipient(words: HeaderWords, declared: frozenset[str] | None) -> Recipient:
    cleaned = []
    for word in words.recipients:
        clean, cut = cut_at_marker(word)
        if cut:
            words.note("marker-in-recipient")
        cleaned.append(clean)
    if len(cleaned) > 1:
        words.note("recipient-repeated")
    found = choose_recipient(cleaned, declared)
    bare = found is NOBODY
    if bare:
        found = _bare_recipient(words, declared)
    if found is NOBODY and any(cleaned):
        words.note("not-a-tool")
        words.unknown_tool = next(filter(may_be_tool, cleaned), "")
    if found.is_corrected or (bare and found is not NOBODY):
        words.note("recipient-spelling")
    return found


def _bare_recipient(words: HeaderWords, declared: frozenset[str] | None) -> Recipient:
    """Return a recipient that is written without `to=`, or `NOBODY`.

    openai-harmony reads any extra word as the recipient. A name without `functions.` is accepted only if the channel is
    `commentary` or missing, since other headers may contain it by chance."""
    calling = _last_known(words) in ("", COMMENTARY)
    for word in words.stray:
        clean, _ = cut_at_marker(word)
        if clean.startswith(FUNCTIONS) or (calling and clean in (declared or ())):
            words.stray.remove(word)
            return read_recipient(clean, declared)
    return NOBODY


def _judge_channel(words: HeaderWords, recipient: Recipient, *, has_role: bool, supplied: bool) -> str:
    default = FINAL if recipient.kind is RecipientKind.NONE else COMMENTARY
    if words.channels:
        word = words.channels[-1] or words.leaked
        if not word:
            words.note("empty-channel")
            return default
    elif words.leaked:
        word = words.leaked
    elif words.stray and spell_channel(words.stray[0])[1]:
        word = words.stray.pop(0)
        if not supplied:
            words.note("glued-role")
    else:
        words.note("missing-channel")
        return default
    channel, known = spell_channel(word)
    if not known:
        words.note("unknown-channel")
        return default
    if channel != word:
        words.note("channel-spelling")
    return channel


def spell_channel(word: str) -> tuple[str, bool]:
    """Return (channel, True) if `word` spells a known channel, else (word, False)."""
    folded = "".join(c for c in word.casefold() if c.isalpha())
    for known in CHANNELS:
        if folded.startswith(known) or (len(folded) >= _MIN_STEM_LENGTH and known.startswith(folded)):
            return known, True
    return word, False


def _foreign(role: str, header: Header, words: HeaderWords, declared: frozenset[str] | None) -> Header:
    """Return the header of a message whose role is not `assistant`.

    Either the model invented the role, or it wrote a tool's name instead of the role.
    """
    rules = (*(r for r in header.rules if r not in ("missing-channel", "not-a-tool")), "foreign-role")
    called = NOBODY
    name = role.removeprefix(FUNCTIONS)
    declares, result = name in (declared or ()), ASSISTANT in words.recipients
    if declares and not result:
        called = Recipient(RecipientKind.FUNCTION, name)
    tool = role.startswith(FUNCTIONS) or is_builtin(role)
    invented = is_invented(role) or tool or (declares and result)
    if invented and called is NOBODY:
        return Header(rules=rules[:-1], dropped=True)
    return replace(header, rules=rules, if_called=called, dropped=invented)


def is_invented(role: str) -> bool:
    """Return whether the model must not use this role, such as `system` or `user:bob`."""
    return role.casefold().partition(":")[0] in INVENTED_ROLES
