"""Journal of an answer: the tokens in the order of reading, and marks for a replay.

A journal is a list of 32-bit numbers. Most of them are token ids. Two kinds of marks stand between the tokens:
`STEP_ENDED` marks the end of a step, and a `TokenSource` mark states how the following tokens were obtained. A backend
that returns token ids and stop tokens needs no `TokenSource` mark.

Facts that no token expresses, such as the gateway's own actions, are recorded as notes. A note is a mark, a byte count,
and JSON packed into numbers of three bytes each.
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

# Mark after the last token of a step that was followed by tool calls or another step. No token has this id.
STEP_ENDED = 0xFFFF_FFFF


# Every journal number from this one upwards is a mark. Marks are far above every token id, and fit into 32 bits.
FIRST_MARK: Final = 0xFFFF_FFF0
NOTE: Final = FIRST_MARK + 8
# key of a note that holds data of the component that started the request; this note does not affect the answer
NOTED: Final = "noted"
# key of a note about an edit: how many tokens between this note and the previous one do not count as output
UNCOUNTED: Final = "uncounted"
# A journal number holds this many bytes of a note. With three bytes, the number is always below `FIRST_MARK`.
BYTES_PER_NUMBER: Final = 3


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Way in which a backend's tokens were obtained.

    `guessed`: the token ids were derived from the backend's text. `stop_hidden`: the backend's output does not include
    the stop token.
    """

    guessed: bool = False
    stop_hidden: bool = False

    @property
    def mark(self) -> int:
        return FIRST_MARK + 2 * self.guessed + self.stop_hidden


MODEL_SOURCE: Final = TokenSource()  # token ids exactly as the model generated them, including stop tokens

SOURCES_BY_MARK: Final = {
    source.mark: source
    for source in (TokenSource(guessed, hidden) for guessed in (False, True) for hidden in (False, True))
}


def source_of(capabilities: Capabilities) -> TokenSource:
    """Return how tokens are obtained from a backend with these capabilities."""
    if capabilities.output is OutputForm.IDS and capabilities.stop_visible:
        return MODEL_SOURCE
    return TokenSource(capabilities.output is not OutputForm.IDS, not capabilities.stop_visible)


class JournalMarker(Enum):
    STEP_ENDED = auto()


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Note in the journal: a JSON object with a fact that the tokens do not contain.

    An example is a change made by a hook.
    """

    value: Mapping[str, Json]

    def numbers(self) -> list[int]:
        """Encode this entry as journal numbers: a mark, the number of bytes, and the bytes."""
        text = json.dumps(self.value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        data = text.encode("utf-8", "surrogatepass")
        # The byte count in front tells the reader where the padding begins.
        padded = data + bytes(-len(data) % BYTES_PER_NUMBER)
        packed = [a << 16 | b << 8 | c for a, b, c in zip(padded[::3], padded[1::3], padded[2::3], strict=True)]
        return [NOTE, len(data), *packed]


Part: TypeAlias = "Sequence[int] | TokenSource | JournalEntry | JournalMarker"


def parts_of(journal: Sequence[int]) -> Iterator[Part]:
    """Yield the parts of a journal in order: token sequences, marks and notes.

    No token sequence is empty. Unknown marks are skipped. Raises StoreUnreadable if a note is damaged.
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
    """State of the current step just after its last note, or at its beginning if it has no note.

    `start` is the 0-based position in the journal after the note. `tail` is the tail of the step's prompt at that
    position (see `JournalWriter`). `generated` is the number of tokens that the model generated in the step before that
    position, without uncounted tokens.
    """

    start: int = 0
    tail: Sequence[int] = ()
    generated: int = 0


FIRST_SEGMENT: Final = JournalSegment()


class JournalWriter:
    """Writer of a journal, which also tracks the tail of the current step's prompt.

    The tail consists of the tokens after the rendered prompt: tokens that the model generated in the step, and tokens
    that the gateway inserted. An entry may replace the tail; tokens that are added later extend the tail.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.source = MODEL_SOURCE
        # Numbers of generated tokens since the last entry that do not count as output: `uncounted` tokens are in the
        # journal, `discarded` tokens are not.
        self.uncounted = self.discarded = 0
        self._segment = FIRST_SEGMENT

    @property
    def read(self) -> int:
        """Return how many journal numbers follow the last entry or the last `STEP_ENDED`."""
        return len(self.numbers) - self._segment.start

    @property
    def new_tokens(self) -> list[int]:
        """Return the tokens that the model generated after the last entry, in the current step."""
        if len(self.numbers) == self._segment.start:
            return []
        return [number for number in self.numbers[self._segment.start :] if number < FIRST_MARK]

    @property
    def tail(self) -> list[int]:
        """Return the tokens after the current step's first prompt: generated and inserted ones."""
        return [*self._segment.tail, *self.new_tokens]

    @property
    def tail_length(self) -> int:
        return len(self._segment.tail) + len(self.new_tokens)

    @property
    def tokens_after_stop(self) -> int:
        """Return how many generated tokens since the last entry do not count as output."""
        return self.uncounted + self.discarded

    @property
    def inserted(self) -> int:
        """Return how many more tokens the tail has than the model generated in the step.

        The number is negative if the gateway removed more tokens than it inserted.
        """
        return len(self._segment.tail) - self._segment.generated

    @property
    def is_ended(self) -> bool:
        """Return whether the step's last token is a stop token of the model."""
        last = self.numbers[-1:] if len(self.numbers) > self._segment.start else self._segment.tail[-1:]
        return bool(last) and last[0] in ALL_STOP_TOKENS

    def add_entry(self, entry: JournalEntry, tail: Sequence[int] | None = None) -> None:
        """Add an entry. `tail` is the new tail of the current step; None leaves the tail unchanged."""
        generated = self._segment.generated + len(self.new_tokens) - self.uncounted
        self.uncounted = self.discarded = 0
        tail = self.tail if tail is None else list(tail)
        self.numbers += entry.numbers()
        self._segment = JournalSegment(len(self.numbers), tail, generated)

    def discard(self, tokens: int) -> None:
        """Remove the last `tokens` tokens from the journal."""
        if tokens:
            del self.numbers[-tokens:]
            self.discarded += tokens

    def end_step(self) -> None:
        self.numbers.append(STEP_ENDED)
        self._segment = JournalSegment(len(self.numbers))

    def set_source(self, source: TokenSource) -> None:
        if source != self.source:
            self.source = source
            self.numbers.append(source.mark)


def generated_in(journal: Sequence[int]) -> int:
    """Return the number of tokens in a journal that count as output.

    Raises StoreUnreadable if a note is damaged.
    """
    return sum(map(_counted_in, parts_of(journal)))


def _counted_in(part: Part) -> int:
    """Return the number by which a part of a journal changes the number of output tokens."""
    if isinstance(part, JournalEntry):
        uncounted = part.value.get(UNCOUNTED)
        return -uncounted if isinstance(uncounted, int) else 0
    return len(part) if isinstance(part, Sequence) else 0


def noted_in(journal: Sequence[int]) -> Mapping[str, Json] | None:
    """Return the `Resumption.journal_note` with which the journal begins; None without a note.

    Raises StoreUnreadable if the journal's first note is damaged.
    """
    first = next(parts_of(journal), None)
    noted = first.value.get(NOTED) if isinstance(first, JournalEntry) else None
    return noted if isinstance(noted, dict) else None


def _note_at(journal: Sequence[int], at: int) -> tuple[JournalEntry, int]:
    """Return the note whose mark is at index `at`, and the index at which the next part begins."""
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
    """Yield the parts of a journal with all `repairs` inserted at their positions.

    Repairs with positions beyond the last token are yielded at the end.
    """
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
    """Yield `tokens`, split where repairs apply, with each repair at its position.

    `position` is the number of tokens in the journal before `tokens`. `waiting` is sorted by position; repairs are
    removed from it when they are yielded. Repairs beyond the end of `tokens` remain in `waiting`.
    """
    begin = 0
    while waiting and waiting[0].position <= position + len(tokens):
        upto = max(waiting[0].position - position, begin)
        yield tokens[begin:upto]
        yield waiting.popleft()
        begin = upto
    yield tokens[begin:]


def must_be_kept(batch: Sequence[Event]) -> bool:
    """Return whether the journal must be stored before the batch after `batch` is requested.

    This is true if the next batch runs a server tool. If only an older journal were stored, a stream that continues the
    answer would run the same call again.
    """
    return any(
        isinstance(event, Closed) and isinstance(event.item, HostedCall) and not event.item.needs_approval
        for event in batch
    )
