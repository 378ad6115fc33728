"""Scripted model whose output is a function of its prompt.

The model continues any part of its answer that the prompt contains, in any tokenization. Any backend can therefore
continue the answer of another backend, and all backends generate the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.talks import BYTES, ENCODING, Message, Talk, key_of, talk_in
from tests.fakes.constraints import Held
from unisono.core.generation import END, MESSAGE, START

ASSISTANT = ENCODING.encode_marked("assistant")


class Lost(Exception):
    """Raised for a prompt that no script continues."""


@dataclass(frozen=True)
class _Piece:
    """Message of a prompt: the tokens after its `<|start|>`."""

    tokens: Sequence[int]

    @property
    def is_own(self) -> bool:
        return list(self.tokens[: len(ASSISTANT)]) == ASSISTANT or not self.tokens

    @property
    def is_closed(self) -> bool:
        return self.tokens[-1:] == [END]

    @property
    def header(self) -> str:
        """Text of the header so far, without the role.

        It includes the message marker if the header is complete.
        """
        end = self.tokens.index(MESSAGE) + 1 if MESSAGE in self.tokens else len(self.tokens)
        return ENCODING.decode(self.tokens[len(ASSISTANT) : end])

    @property
    def body(self) -> bytes | None:
        """Bytes of the body, or None while the header is incomplete."""
        if MESSAGE not in self.tokens:
            return None
        return ENCODING.decode_bytes(self.tokens[self.tokens.index(MESSAGE) + 1 :])


def goes_on(prompt: Sequence[int], held: Held | None = None) -> list[int]:
    """Return the tokens after a prompt, up to the end of the turn. Raises Lost."""
    talk = talk_in(ENCODING.decode(prompt))
    if talk is None:
        raise Lost("the prompt names no talk")
    pieces = _pieces(prompt)
    foreign = [at for at, piece in enumerate(pieces) if not piece.is_own]
    own = pieces[foreign[-1] + 1 :]
    if not own:
        raise Lost("the prompt has no open assistant message")
    if own[-1].is_closed:
        return [START, *ASSISTANT, *_rest(talk, _stage(talk, pieces), [*own, _Piece(ASSISTANT)], held)]
    if not own[-1].tokens:
        return [*ASSISTANT, *_rest(talk, _stage(talk, pieces), [*own[:-1], _Piece(ASSISTANT)], held)]
    return _rest(talk, _stage(talk, pieces), own, held)


def _pieces(prompt: Sequence[int]) -> list[_Piece]:
    starts = [at for at, token in enumerate(prompt) if token == START]
    return [_Piece(prompt[start + 1 : end]) for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True)]


def _stage(talk: Talk, pieces: Sequence[_Piece]) -> Sequence[Message]:
    """Return the messages that follow the tool results after the last user message."""
    results = 0
    for piece in pieces:
        role = ENCODING.decode(piece.tokens[:8])
        results = 0 if role.startswith("user") else results + role.startswith("functions.")
    if results >= len(talk.stages):
        raise Lost(f"the prompt has {results} tool results, more than calls")
    return talk.stages[results]


def _rest(talk: Talk, stage: Sequence[Message], own: Sequence[_Piece], held: Held | None) -> list[int]:
    *done, open_piece = own
    keys = [message.key for message in stage]
    at = 0
    for piece in done:
        at = max(at, _index_of(keys, piece.header) + 1)
    begun = open_piece.body
    if begun is not None:
        at = _index_of(keys, open_piece.header)
        return [*_rest_of_body(stage[at], begun), *_following(stage[at + 1 :])]
    if at >= len(stage):
        raise Lost(f"{talk.name}: the script has ended before {open_piece.header!r}")
    message, header = stage[at], open_piece.header
    if not message.header.startswith(header) and header:
        # A forced header may skip messages of the script.
        at = next((index for index in range(at, len(stage)) if stage[index].header.startswith(header)), -1)
        if at < 0:
            raise Lost(f"{talk.name}: no header begins with {header!r}")
        message = stage[at]
    rest = message.header[len(header) :]
    if held is not None and held.texts:
        chosen = [text for text in held.texts if rest.startswith(text)]
        if not chosen:
            raise Lost(f"{talk.name}: none of {held.texts} begins {rest!r}")
        return ENCODING.encode_marked(max(chosen, key=len) + "<|call|>")
    return [*ENCODING.encode_marked(rest), *_rest_of_body(message, b""), *_following(stage[at + 1 :])]


def _index_of(keys: Sequence[tuple[str, str]], header: str) -> int:
    key = key_of(header)
    if key not in keys:
        raise Lost(f"the script has no header {header!r}")
    return keys.index(key)


def _rest_of_body(message: Message, begun: bytes) -> list[int]:
    """Return the rest of a body after the bytes `begun`, and its stop marker."""
    if not ENCODING.decode_bytes(message.body).startswith(begun):
        raise Lost(f"{message.text!r} does not begin with {begun!r}")
    left, skipped = [], 0
    for token in message.body:
        spelled = ENCODING.decode_bytes([token])
        if skipped >= len(begun):
            left.append(token)
        elif skipped + len(spelled) > len(begun):
            cut = spelled[len(begun) - skipped :]
            left += [BYTES[cut[at : at + 1]] for at in range(len(cut))]
        skipped += len(spelled)
    return [*left, *ENCODING.encode_marked(message.stop)]


def _following(messages: Sequence[Message]) -> list[int]:
    rest: list[int] = []
    for message in messages:
        head = ENCODING.encode_marked("<|start|>assistant" + message.header)
        rest += [*head, *message.body, *ENCODING.encode_marked(message.stop)]
    return rest
