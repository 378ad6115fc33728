"""Conversion of tokens into displayable segments: text, special tokens, repairs, remarks.

Segments are plain JSON. A text segment consists of pieces: a piece is one token, or several tokens that form one
character. Invalid token ids are marked as invalid and do not raise an exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from unisono.core.events import Repaired
from unisono.core.generation import CALL, CHANNEL, CONSTRAIN, END, FIRST_SPECIAL, MESSAGE, RETURN, START, VOCABULARY
from unisono.core.recovery_rules import RULES
from unisono.errors import well_formed
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import ASSISTANT, C, S, T, read_header
from unisono.harmony.header_text import header_text
from unisono.observe.recording import dumped

ENDS: Final = frozenset({START, END, RETURN, CALL})
ROLES: Final = ("system", "developer", "user", "tool")
IN_HEADERS: Final = frozenset({CHANNEL, CONSTRAIN})
HEADER: Final = "header"
CALL_BODY: Final = "call"
TOOL_BODY: Final = "tool"
# Maximum number of tokens that the bytes of one character span.
MAX_CHARACTER_TOKENS: Final = 4
# Maximum characters of a remark by the gateway.
MAX_REMARK_LENGTH: Final = 400
UNKNOWN_RULE: Final = "This version of the gateway has no such rule."

# Maximum tokens of a header that are parsed.
MAX_HEADER_TOKENS: Final = 512

Segment = dict[str, Any]
_FIRST = re.compile(rf"[^\s:.{S}{C}{T}]+")


def shortened(value: object) -> str:
    text = well_formed(str(value)[: MAX_REMARK_LENGTH + 1])
    return text if len(text) <= MAX_REMARK_LENGTH else text[:MAX_REMARK_LENGTH] + "…"


class Segments:
    """Builder of the segments of one prompt or answer, with remarks between tokens.

    The first token must be part of a message header.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._header: list[int] = []
        self._in_header, self._has_role = True, False
        self._body = "final"
        self._bytes = b""
        self._ids: list[int] = []
        self._segments: list[Segment] = []

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if 0 <= token < FIRST_SPECIAL:
                self._text(token)
            else:
                self._add_marker(token)

    def add_remark(self, text: str) -> None:
        self._append({"kind": "aside", "text": shortened(text)})

    def gap(self, tokens: int) -> None:
        self._append({"kind": "gap", "tokens": tokens})

    def repair(self, mended: Repaired) -> None:
        rule, position, dropped = mended.rule, mended.position, mended.dropped
        sentence = RULES.get(rule, UNKNOWN_RULE)
        self._append(
            {"kind": "repair", "rule": shortened(rule), "why": sentence, "position": position, "dropped": dropped}
        )

    def pop_new(self) -> list[Segment]:
        """Return the segments since the last call.

        An incomplete character at the end becomes U+FFFD.
        """
        self._flush()
        out, self._segments = self._segments, []
        return out

    def pop_complete(self) -> list[Segment]:
        """Return the segments since the last call.

        An incomplete character at the end is returned later.
        """
        out, self._segments = self._segments, []
        return out

    def _append(self, segment: Segment) -> None:
        self._flush()
        self._segments.append(segment)

    def _text(self, token: int) -> None:
        if self._in_header:
            self._header.append(token)
        self._bytes += self._encoding.decode_bytes([token])
        self._ids.append(token)
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError as error:
            # Further tokens may complete the character. Invalid bytes never become valid.
            half = error.reason == "unexpected end of data" and len(self._ids) < MAX_CHARACTER_TOKENS
            if not half:
                self._flush()
            return
        self._add_text(text)

    def _add_text(self, text: str) -> None:
        of = HEADER if self._in_header else self._body
        if not self._segments or self._segments[-1]["kind"] != "text" or self._segments[-1]["of"] != of:
            self._segments.append({"kind": "text", "of": of, "tokens": []})
        self._segments[-1]["tokens"].append([text, *self._ids])
        self._bytes, self._ids = b"", []

    def _flush(self) -> None:
        """Emit pending bytes. An incomplete character becomes a replacement character."""
        if self._ids:
            self._add_text(self._bytes.decode(errors="replace"))

    def _add_marker(self, token: int) -> None:
        known = 0 <= token < VOCABULARY
        text = self._encoding.decode([token]) if known else "invalid token"
        self._append({"kind": "special", "text": text, "id": token, "known": known})
        if token == MESSAGE:
            header, _ = header_text(self._encoding, self._header[:MAX_HEADER_TOKENS])
            self._body = body_of(header, role_given=self._has_role)
            self._in_header = False
        elif token in ENDS or (token == CHANNEL and not self._in_header):
            self._header, self._in_header, self._has_role = [], True, token == START
        if self._in_header and token in IN_HEADERS:
            self._header.append(token)


def body_of(header: str, *, role_given: bool) -> str:
    """Classify a message by its header.

    The result is the channel of an assistant message, a word for a tool call or a tool result, or a different role.
    Special tokens in the header are replaced with sentinels, as by `header_text`. `role_given` is True if the header
    begins with the role.
    """
    first = _FIRST.match(header)
    role = first[0] if first else ""
    if role in ROLES and (role_given or role != TOOL_BODY):
        return role
    # The author of a tool result is the tool itself, such as `functions.search`, and the recipient is the assistant.
    if role_given and (role.startswith("functions") or f"to={ASSISTANT}" in header):
        return TOOL_BODY
    read = read_header(header, None, role_given=role_given)
    return CALL_BODY if read.is_call else read.channel


def describe_action(note: Mapping[str, Any]) -> str:
    """Describe an action of the gateway between two tokens, without the tokens it inserted."""
    match note:
        case {"moved": list(), "kept": int(reused)}:
            return f"the prompt continues after {reused} tokens of this step with:"
        case {"able": list(kinds)}:
            return f"the backend can enforce: {', '.join(map(str, kinds)) or 'no constraints'}"
        case {"listed": list(offers)}:
            return "tools offered by: " + ", ".join(str(offer[0]) for offer in offers)
        case {"call": str(id), "verdict": str(verdict)}:
            return f"call {id}: {verdict}"
        case {"ran": str(id), "text": str(text)}:
            return f"result of {id}: {text}"
        case {"noted": dict(noted)}:
            return f"notes by hooks: {', '.join(noted)}"
        case {"left": int(place)}:
            return f"the output after {place} tokens of this step is generated again"
        case {"unread": int(tokens)}:
            return f"{tokens} tokens of an incomplete character are generated again"
        case _:
            return dumped(dict(note)).decode()
