"""Interpretation of a header that ended without `<|message|>`.

The text of such a header may include the body of the message. As in `header`, lone surrogates represent the markers.
"""

from __future__ import annotations

import re
from dataclasses import replace

from unisono.core.generation import CALL
from unisono.core.json_syntax import json_kind
from unisono.harmony.header import (
    ANALYSIS,
    ASSISTANT,
    CHANNELS,
    COMMENTARY,
    FINAL,
    TYPES,
    C,
    Header,
    HeaderWords,
    S,
    T,
    is_invented,
    respelled_call,
    spell_channel,
    split_role,
)
from unisono.harmony.recipients import NOBODY, RecipientKind, cut_at_marker, read_recipient, respell


def decide(header: Header, text: str, token: int, *, terminated: bool) -> Header:
    """Return the header of a closed message; the body `text` may show that it is a call.

    `token` ended the message. `terminated` is False if the message was truncated, so that repair supplied `token`.
    """
    if header.if_json is not None:
        is_call = is_json_object(text) if terminated else text.lstrip().startswith("{")
        return header.if_json if is_call else header
    if token == CALL and terminated:
        return replace(header, channel=COMMENTARY, recipient=header.if_called, dropped=False)
    return header


def is_json_object(text: str) -> bool:
    """Return whether `text` is one JSON object, of any size."""
    return json_kind(text) is dict


_KNOWN = re.compile(rf"\s*({'|'.join(CHANNELS)})(?![a-z_])")
_TO = re.compile(rf"\s*to=([^\s{{{C}{T}]*)")
# For searches, without leading white space: a search would scan a run of white space again from each character.
_ANY_TO = re.compile(rf"to=([^\s{{{C}{T}]*)")
_TYPE = re.compile(rf"\s*(?:{T}[^\s{{]*|(?:{'|'.join(sorted(TYPES))})(?=[\s{{]|\Z))")
_WORD_BEFORE_TO = re.compile(r"\s*\S+(?=\s+to=)")


def read_bodyless(text: str, declared: frozenset[str] | None, *, role_given: bool, first: bool) -> Header:
    """Return the meaning of a header that ended without `<|message|>`.

    The header is the longest sequence of header words at the beginning of `text`; the rest is the body. `first` means
    that no header was read before. A message without a body has no content, unless it is a call.
    """
    header = _read_bodyless(text, declared, role_given, first)
    if header.recipient is not NOBODY or header.dropped:
        return header
    words, brace, arguments = text.partition("{")
    respelled = respell(words, declared)
    if respelled == words or not is_json_object(brace + arguments):
        return header
    called = _read_bodyless(respelled + brace + arguments, declared, role_given, first)
    return respelled_call(called) if called.is_call else header


def _read_bodyless(text: str, declared: frozenset[str] | None, role_given: bool, first: bool) -> Header:
    *earlier, segment = text.split(S)
    words = HeaderWords()
    role = ""
    if role_given or earlier:
        role, segment = split_role(segment, words)
    if is_invented(role) or (role and not segment.strip()):
        return Header(rules=("foreign-role",), dropped=True)
    segment = role + segment
    section, marker, rest = segment.rpartition(C)
    recipients = [m[1] for m in _ANY_TO.finditer(section)]
    known = _KNOWN.match(rest)
    prose = _has_text(section)
    if prose or (not marker and not (known and _TO.match(rest, known.end())) and not _TO.match(rest)):
        rule = "no-markup" if first and not role_given and not earlier else "header-without-message"
        body = segment if rule == "no-markup" else segment.lstrip(" ")
        return Header(rules=(rule,), body=without_markers(body), thought=rule != "no-markup")
    at = known.end() if known else 0
    if known is None and (to := _WORD_BEFORE_TO.match(rest)):
        at = to.end()
    while to := _TO.match(rest, at):
        recipients.append(to[1])
        at = to.end()
    if typed := _TYPE.match(rest, at):
        at = typed.end()
    # A marker spelled in ordinary tokens would become a real one in the rewritten header.
    cleaned = (cut_at_marker(word)[0] for word in recipients)
    recipient = next(
        (r for r in (read_recipient(w, declared) for w in cleaned) if r.kind is not RecipientKind.NONE), NOBODY
    )
    body = without_markers(rest[at:])
    body = body[1:] if body.startswith(" ") else body
    if not known and _is_stem(body.strip()):
        body = ""
    channel = known[1] if known else (FINAL if recipient is NOBODY else COMMENTARY)
    thought = known is None and recipient is NOBODY
    kind = "json" if typed and "json" in typed[0] else None
    return Header(channel, recipient, kind, ("header-without-message",), body=body, thought=thought)


def is_whole_message(text: str, *, first: bool) -> bool:
    """Return whether a header that continues with a channel marker is already a whole message.

    The text is a whole message if it has arguments after a recipient, or words without meaning in a header after a
    channel. If `first` is True (no header was read before), such words without any markup are a whole message too.
    """
    segment = text.rpartition(S)[2]
    _, to, rest = segment.rpartition("to=")
    if to:
        return "{" in rest
    _, channel, rest = segment.partition(C)
    if not channel and (not first or segment.lstrip().startswith(ASSISTANT)):
        return False
    words = channel + rest if channel else segment
    return len(words.split()) > 1 and any(map(str.isalpha, "".join(_text_words(words))))


def _has_text(section: str) -> bool:
    """Return whether `section`, the part before the last channel marker, contains message text."""
    return bool(_text_words(section))


def _text_words(section: str) -> list[str]:
    """Return the words of `section` that have no meaning in a header."""
    words = _ANY_TO.sub(" ", section).translate({ord(C): " ", ord(T): " "}).split()
    return [word for word in words if not spell_channel(word)[1] and not _is_stem(word) and word not in TYPES]


def _is_stem(word: str) -> bool:
    """Return whether `word` is a prefix of a header word."""
    return any(known.startswith(word) for known in (*CHANNELS, ASSISTANT, "to="))


def without_markers(text: str) -> str:
    return text.translate({ord(C): None, ord(T): None, ord(S): None})


def may_be_header(text: str, declared: frozenset[str] | None) -> bool:
    """Return whether text between messages begins like a header.

    A header begins with the role, a known channel or a recipient.
    """
    word = _spaced(respell(text, declared)).strip()
    return word.startswith(("assistant", "to=", ANALYSIS, COMMENTARY, FINAL)) or (
        bool(word) and word.split()[0] in (declared or ())
    )


def _spaced(text: str) -> str:
    return text.translate({ord(C): " ", ord(T): " ", ord(S): " "})


def may_be_answer(text: str, declared: frozenset[str] | None) -> bool:
    """Return whether text between messages is the answer if nothing follows."""
    return bool(without_markers(text).strip()) and not may_be_header(text, declared)
