"""A model that is a function of its prompt: whatever part of an answer the prompt holds already, in whichever tokens,
it goes on behind it. So any backend can go on with what another one began, and every one of them says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.talks import BYTES, ENCODING, Message, Talk, key_of, talk_in
from tests.fakes.constraints import Held
from unisono.core.generation import END, MESSAGE, START

ASSISTANT = ENCODING.encode_marked("assistant")


class Lost(Exception):
    """A prompt that nothing of the script goes on from."""


@dataclass(frozen=True)
class _Piece:
    """A message of a prompt: the tokens behind its `<|start|>`."""

    tokens: Sequence[int]

    @property
    def is_own(self) -> bool:
        return list(self.tokens[: len(ASSISTANT)]) == ASSISTANT or not self.tokens

    @property
    def is_closed(self) -> bool:
        return self.tokens[-1:] == [END]

    @property
    def header(self) -> str:
        """As it is spelled so far, without the role; closed by its marker if it is."""
        end = self.tokens.index(MESSAGE) + 1 if MESSAGE in self.tokens else len(self.tokens)
        return ENCODING.decode(self.tokens[len(ASSISTANT) : end])

    @property
    def body(self) -> bytes | None:
        """None while the header is open."""
        if MESSAGE not in self.tokens:
            return None
        return ENCODING.decode_bytes(self.tokens[self.tokens.index(MESSAGE) + 1 :])


def goes_on(prompt: Sequence[int], held: Held | None = None) -> list[int]:
    """The tokens behind a prompt, to the one that ends the turn. Raises Lost."""
    talk = talk_in(ENCODING.decode(prompt))
    if talk is None:
        raise Lost("nothing is asked")
    pieces = _pieces(prompt)
    others = [at for at, piece in enumerate(pieces) if not piece.is_own]
    own = pieces[others[-1] + 1 :]
    if not own:
        raise Lost("nobody is to speak")
    if own[-1].is_closed:
        return [START, *ASSISTANT, *_rest(talk, _stage(talk, pieces), [*own, _Piece(ASSISTANT)], held)]
    if not own[-1].tokens:
        return [*ASSISTANT, *_rest(talk, _stage(talk, pieces), [*own[:-1], _Piece(ASSISTANT)], held)]
    return _rest(talk, _stage(talk, pieces), own, held)


def _pieces(prompt: Sequence[int]) -> list[_Piece]:
    starts = [at for at, token in enumerate(prompt) if token == START]
    return [_Piece(prompt[start + 1 : end]) for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True)]


def _stage(talk: Talk, pieces: Sequence[_Piece]) -> Sequence[Message]:
    """What is said behind the results that stand behind the last question."""
    results = 0
    for piece in pieces:
        role = ENCODING.decode(piece.tokens[:8])
        results = 0 if role.startswith("user") else results + role.startswith("functions.")
    if results >= len(talk.stages):
        raise Lost(f"{results} results were not asked for")
    return talk.stages[results]


def _rest(talk: Talk, stage: Sequence[Message], own: Sequence[_Piece], held: Held | None) -> list[int]:
    *done, open_one = own
    keys = [message.key for message in stage]
    at = 0
    for piece in done:
        at = max(at, _place(keys, piece.header) + 1)
    begun = open_one.body
    if begun is not None:
        at = _place(keys, open_one.header)
        return [*_behind(stage[at], begun), *_following(stage[at + 1 :])]
    if at >= len(stage):
        raise Lost(f"{talk.name}: all was said before {open_one.header!r}")
    message, said = stage[at], open_one.header
    if not message.header.startswith(said) and said:
        # A header that was forced upon it may skip what it meant to say first.
        at = next((place for place in range(at, len(stage)) if stage[place].header.startswith(said)), -1)
        if at < 0:
            raise Lost(f"{talk.name}: no header begins with {said!r}")
        message = stage[at]
    rest = message.header[len(said) :]
    if held is not None and held.texts:
        chosen = [text for text in held.texts if rest.startswith(text)]
        if not chosen:
            raise Lost(f"{talk.name}: none of {held.texts} is meant by {rest!r}")
        return ENCODING.encode_marked(max(chosen, key=len) + "<|call|>")
    return [*ENCODING.encode_marked(rest), *_behind(message, b""), *_following(stage[at + 1 :])]


def _place(keys: Sequence[tuple[str, str]], header: str) -> int:
    key = key_of(header)
    if key not in keys:
        raise Lost(f"nobody meant to say {header!r}")
    return keys.index(key)


def _behind(message: Message, begun: bytes) -> list[int]:
    """What is left of a body of which so much is said, and its end."""
    if not ENCODING.decode_bytes(message.body).startswith(begun):
        raise Lost(f"{begun!r} is no beginning of {message.text!r}")
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
