"""Journal of an answer: its tokens in reading order, with the marks needed for a replay.

The meaning of a token depends on three facts: the end of the step, the source of the ids (the model, or guesses from
text), and the visibility of stop tokens. The first is recorded as `STEP_ENDED`; changes of the other two have marks of
their own. A backend that returns ids and its stop tokens needs no marks.

Actions of the gateway between two steps are recorded as notes: JSON bytes, three per number, after a mark and the byte
count.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Final, TypeAlias

from unisono.core.conversation import Json
from unisono.core.events import Closed, Event, HostedCall, Repaired
from unisono.core.frozen import dataclass
from unisono.core.generation import ALL_STOP_TOKENS, Capabilities, OutputForm
from unisono.errors import StoreUnreadable

# Journal number after the last token of a step that another step followed. No token has this id.
STEP_ENDED = 0xFFFF_FFFF


# Numbers from here on are marks. They are far above every token id, and fit into 32 bits.
FIRST_MARK: Final = 0xFFFF_FFF0
NOTE: Final = FIRST_MARK + 8
# key of a note that belongs to the component that started the request; it does not affect the answer
NOTED: Final = "noted"
BYTES_PER_NUMBER: Final = 3  # bytes of a note per number, so that no number can be a mark


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Source of a backend's tokens.

    `guessed`: the ids were derived from the backend's text. `stop_hidden`: the stop token is missing.
    """

    guessed: bool = False
    stop_hidden: bool = False

    @property
    def mark(self) -> int:
        return FIRST_MARK + 2 * self.guessed + self.stop_hidden


MODEL_SOURCE: Final = TokenSource()  # token ids as the model generated them, with stop tokens

SOURCES_BY_MARK: Final = {
    source.mark: source
    for source in (TokenSource(guessed, hidden) for guessed in (False, True) for hidden in (False, True))
}


def source_of(capabilities: Capabilities) -> TokenSource:
    """Return the source of the tokens of a backend with these capabilities."""
    if capabilities.output is OutputForm.IDS and capabilities.stop_visible:
        return MODEL_SOURCE
    return TokenSource(capabilities.output is not OutputForm.IDS, not capabilities.stop_visible)


class JournalMarker(Enum):
    STEP_ENDED = auto()


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A fact that no token expresses, as a JSON object."""

    value: Mapping[str, Json]

    def numbers(self) -> list[int]:
        """Encode this entry as journal numbers: a mark, the number of bytes, and the bytes."""
        text = json.dumps(self.value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        data = text.encode("utf-8", "surrogatepass")
        # The number of bytes stands before them, so that the padding is not read.
        padded = data + bytes(-len(data) % BYTES_PER_NUMBER)
        packed = [a << 16 | b << 8 | c for a, b, c in zip(padded[::3], padded[1::3], padded[2::3], strict=True)]
        return [NOTE, len(data), *packed]


Part: TypeAlias = "Sequence[int] | TokenSource | JournalEntry | JournalMarker"


def parts_of(journal: Sequence[int]) -> Iterator[Part]:
    """Yield the parts of a journal: non-empty token sequences, and the marks and notes between.

    Unknown marks are skipped. Raises StoreUnreadable for a damaged note.
    """
    begin = 0
    for at in [at for at, number in enumerate(journal) if number >= FIRST_MARK]:
        if at > begin:
            yield journal[begin:at]
        begin = at + 1
        if journal[at] == STEP_ENDED:
            yield JournalMarker.STEP_ENDED
        elif journal[at] == NOTE:
            note, begin = _note_at(journal, at)
            yield note
        elif journal[at] in SOURCES_BY_MARK:
            yield SOURCES_BY_MARK[journal[at]]
    if begin < len(journal):
        yield journal[begin:]


@dataclass(frozen=True, slots=True)
class JournalSegment:
    """The current step up to the last note.

    `start` is the position in the journal after that note. `tail` is the tail of the step's prompt at that position.
    `generated` is the number of tokens generated in the step before it.
    """

    start: int = 0
    tail: Sequence[int] = ()
    generated: int = 0


FIRST_SEGMENT: Final = JournalSegment()


class JournalWriter:
    """Writer of a journal, which also tracks the tail of the current step's prompt.

    The tail consists of the step's generated tokens and the inserted ones. An entry separates the tail so far from the
    tokens that follow in the journal.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.source = MODEL_SOURCE
        self._segment = FIRST_SEGMENT

    @property
    def read(self) -> int:
        """Return the number of journal numbers after the last entry or step mark."""
        return len(self.numbers) - self._segment.start

    @property
    def new_tokens(self) -> list[int]:
        """Return the tokens after the last entry."""
        if len(self.numbers) == self._segment.start:
            return []
        return [number for number in self.numbers[self._segment.start :] if number < FIRST_MARK]

    @property
    def tail(self) -> list[int]:
        """Return the tail of the current step's prompt: generated and inserted tokens."""
        return [*self._segment.tail, *self.new_tokens]

    @property
    def tail_length(self) -> int:
        return len(self._segment.tail) + len(self.new_tokens)

    @property
    def inserted(self) -> int:
        """Return the tail's length minus the number of tokens generated in the step.

        It is negative if tokens were cut.
        """
        return len(self._segment.tail) - self._segment.generated

    @property
    def is_ended(self) -> bool:
        """Return whether the step's last token ends every generation."""
        last = self.numbers[-1:] if len(self.numbers) > self._segment.start else self._segment.tail[-1:]
        return bool(last) and last[0] in ALL_STOP_TOKENS

    def add_entry(self, entry: JournalEntry, tail: Sequence[int] | None = None) -> None:
        """Add an entry; `tail` replaces the tail if it is changed."""
        generated = self._segment.generated + len(self.new_tokens)
        tail = self.tail if tail is None else list(tail)
        self.numbers += entry.numbers()
        self._segment = JournalSegment(len(self.numbers), tail, generated)

    def end_step(self) -> None:
        self.numbers.append(STEP_ENDED)
        self._segment = JournalSegment(len(self.numbers))

    def set_source(self, source: TokenSource) -> None:
        if source != self.source:
            self.source = source
            self.numbers.append(source.mark)


def generated_in(journal: Sequence[int]) -> int:
    """Return the number of tokens in a journal.

    Raises StoreUnreadable for a damaged note.
    """
    return sum(len(part) for part in parts_of(journal) if isinstance(part, Sequence))


def noted_in(journal: Sequence[int]) -> Mapping[str, Json] | None:
    """Return the data about the request from the journal's first entry, or None.

    Raises StoreUnreadable for a damaged note.
    """
    first = next(parts_of(journal), None)
    noted = first.value.get(NOTED) if isinstance(first, JournalEntry) else None
    return noted if isinstance(noted, dict) else None


def _note_at(journal: Sequence[int], at: int) -> tuple[JournalEntry, int]:
    """Return the note whose mark is at `at`, and the position of the next part."""
    size = journal[at + 1] if at + 1 < len(journal) else 0
    end = at + 2 + -(-size // BYTES_PER_NUMBER)
    try:
        data = b"".join(number.to_bytes(BYTES_PER_NUMBER, "big") for number in journal[at + 2 : end])[:size]
        value = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, OverflowError, RecursionError) as failure:
        raise StoreUnreadable("The record of this answer is damaged; send a new request.") from failure
    if not isinstance(value, dict):
        raise StoreUnreadable("The record of this answer is damaged; send a new request.")
    return JournalEntry(value), end


Piece: TypeAlias = "Sequence[int] | Repaired"


def with_repairs(parts: Iterable[Part], repairs: Iterable[Repaired]) -> Iterator[Part | Repaired]:
    """Yield the parts of a journal with all repairs; repairs after the last token come last."""
    waiting = deque(repairs)
    position = 0
    for part in parts:
        if isinstance(part, TokenSource | JournalEntry | JournalMarker):
            yield part
        else:
            yield from mended(part, waiting, position)
            position += len(part)
    yield from waiting


def mended(tokens: Sequence[int], waiting: deque[Repaired], position: int = 0) -> Iterator[Piece]:
    """Split tokens that begin at `position` at the waiting repairs.

    Repairs up to the end of the tokens are yielded and removed from `waiting`.
    """
    begin = 0
    while waiting and waiting[0].position <= position + len(tokens):
        upto = max(waiting[0].position - position, begin)
        yield tokens[begin:upto]
        yield waiting.popleft()
        begin = upto
    yield tokens[begin:]


def must_be_kept(batch: Sequence[Event]) -> bool:
    """Return whether a batch's journal must be stored before the next batch is requested.

    The next batch runs a server tool. A stream that continues an older journal would make that call again.
    """
    return any(
        isinstance(event, Closed) and isinstance(event.item, HostedCall) and not event.item.needs_approval
        for event in batch
    )
