"""The course of an answer: its journal, the tokens that the current step's prompt ends in, and the moves of the plan.

What the plan stops at is found at the same token however the network cuts the stream: what follows that token is
counted and journalled, and read by nobody. A move is noted in the journal behind what it was decided on, so that
whoever reads that again goes on behind the same prompt. No I/O.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Final

from unisono.core.conversation import Json, Tokens
from unisono.core.events import Event, Repaired
from unisono.core.generation import CALL, END, ENDOFTEXT, FIRST_SPECIAL, STOP_TOKENS, Constraint, FinishReason
from unisono.engine.characters import LONGEST, unfinished
from unisono.engine.journal import FIRST_MARK, NOTED, JournalEntry, TokenSource
from unisono.engine.move import PromptEdit
from unisono.engine.plan import BUDGET, REPETITION, InterventionController
from unisono.engine.repetition import LENGTH, LENGTH_OF_THOUGHTS, STRIDE, repeats
from unisono.engine.turn import STEP_ENDED, GenerationRequest
from unisono.engine.wishes import OutputRequirements, Violation
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.tools import ToolSet

STOPS: Final = frozenset({*STOP_TOKENS, ENDOFTEXT})
"""What no backend generates anything behind."""

CLOSED: Final = STOPS | {END}

_NEVER: Final = 1 << 62

ABLE: Final = "able"
MOVED: Final = "moved"
LEFT: Final = "left"
UNREAD: Final = "unread"


class Transcript:
    """`budget` are tokens of thoughts; `watches` says whether endless repetition is looked for, `tells_able` whether it
    matters what a backend can constrain."""

    def __init__(
        self,
        encoding: Encoding,
        router: HarmonyRouter,
        plan: InterventionController,
        *,
        budget: int | None = None,
        watches: bool = True,
        tells_able: bool = False,
    ) -> None:
        self._encoding = encoding
        self.router = router
        self._budget = budget
        self._watches = watches
        self._tells_able = tells_able
        self._way = TokenSource()
        self._kept: list[int] = []
        self._begun_at = 0
        self._generated = 0
        self._free_to = 0
        self._ended: FinishReason | None = None
        self.plan = plan
        self.journal: list[int] = []
        self.noted = False  # the caller knows all notes of the turn
        self.broken_off = False  # the answer ends here: the model repeats itself
        self.opening: Tokens = ()
        if budget is not None and budget < 1:
            plan.exhausted()

    @property
    def said(self) -> list[int]:
        """The tokens that the current step's prompt ends in, by the model and for it."""
        return [*self._kept, *self._new]

    @property
    def constraint(self) -> Constraint | None:
        """What a backend is to keep to in the generation that comes; nothing in a body that has begun, since it would
        begin another one."""
        return self.plan.constraint if len(self.said) == self.plan.opened_to else None

    @property
    def put(self) -> int:
        """How many more tokens the prompt ends in than were generated in the step; below 0 where some were cut."""
        return len(self._kept) - self._generated

    @property
    def _new(self) -> list[int]:
        return [number for number in self.journal[self._begun_at :] if number < FIRST_MARK]

    @property
    def ended(self) -> bool:
        """Whether the step's last token is one that no backend generates anything behind."""
        generated = self._begun_at < len(self.journal)
        last = self.journal[-1:] if generated else self._kept[-1:]
        return bool(last) and last[0] in STOPS

    def begin(self, opening: Tokens, *, first: bool) -> None:
        """A step begins; `opening` are the tokens of the message that its prompt leaves open."""
        self.opening = opening
        if opening and not first:
            # What it says is looked at like what the plan opens itself.
            self.plan.opened()
            self.router.reread(opening[len(self._start) :], 0, 0)
        elif opening:
            self.router.resume(Header(verbatim=True), opening)
        elif not first:
            self.router.resume()

    def end_step(self) -> None:
        self.journal.append(STEP_ENDED)
        self._begun_at = len(self.journal)
        self._free_to = 0
        self._kept, self._generated = [], 0
        self.plan.begin()

    def came(self, way: TokenSource, able: frozenset[str]) -> None:
        """How tokens come from here on, and which kinds of constraints are kept to."""
        if way != self._way:
            self._way = way
            self.journal.append(way.mark)
            # What was guessed once is part of a message whose other tokens may be the model's own.
            self.router.canonical = self.router.canonical or way.guessed
        if self._tells_able and able != self.plan.able:
            self.plan.able = able
            kinds: list[Json] = [*sorted(able)]
            self.note(JournalEntry({ABLE: kinds}))

    def note(self, note: JournalEntry) -> None:
        self._generated += len(self._new)
        self._kept = self.said
        self.journal += note.numbers()
        self._begun_at = len(self.journal)
        self._free_to = 0

    # -- tokens

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Events of some more tokens, up to where the plan stops them."""
        if len(self.journal) + len(tokens) < self._free_to:
            self.journal += tokens
            events = self.router.feed(tokens)
            if self.router.stopped is not None:
                self._look()
                self._free_to = 0
            return events
        events = []
        rest = tokens
        while rest and self.plan.move is None and not self.broken_off:
            if self._ends_reasoning(rest[0]):
                break
            size = self._portion(rest)
            self.journal += rest[:size]
            events += self._read(rest[:size])
            rest = rest[size:]
        self.journal += rest
        self.router.count(len(rest))
        self._look_ahead()
        return events

    def _look_ahead(self) -> None:
        """How far the journal may grow before anything but the router may stop what is read."""
        stopped = self.plan.move is not None or self.broken_off
        if stopped or self.plan.naming or (self._budget is not None and not self.plan.late):
            self._free_to = 0
        else:
            self._free_to = len(self.journal) + (self._to_look if self._watches else _NEVER)

    @property
    def _to_look(self) -> int:
        """So many tokens on, repetition is looked for."""
        return STRIDE - (len(self.journal) - self._begun_at) % STRIDE

    def _portion(self, rest: Sequence[int]) -> int:
        size = len(rest)
        if self.plan.naming:
            return size
        if self._watches:
            size = min(size, self._to_look)
        if self._budget is not None and not self.plan.late:
            # What was held of a header may all be thoughts at a marker, and another one may begin behind it.
            size = next((at for at, token in enumerate(rest[:size], 1) if token >= FIRST_SPECIAL), size)
            if self.router.thinking is not False:
                size = min(size, max(self._budget - self.router.usage.reasoning_tokens, 1))
        return size

    def _read(self, tokens: Sequence[int]) -> list[Event]:
        if self.plan.naming:
            self.plan.name(tokens)
            self.router.count(len(tokens))
            return []
        events = self.router.feed(tokens)
        self._look()
        if self.plan.move is None and self._watches and self._to_look == STRIDE:
            self._look_for_repetition()
        return events

    def _look(self) -> None:
        if self.router.stopped is not None and self.plan.move is None:
            self.plan.stopped(self.router.stopped)

    def _ends_reasoning(self, token: int) -> bool:
        """End reasoning in front of `token` if the budget has no room for it."""
        used, thinking = self.router.usage.reasoning_tokens, self.router.thinking
        if self._budget is None or self.plan.late or used < self._budget:
            return False
        # A marker ends the reasoning: a budget equal to its length is not exceeded.
        cut = used < self._budget + LONGEST and unfinished(self._encoding, self._new)
        if cut or (thinking and token >= FIRST_SPECIAL):
            return False
        if thinking:
            self.plan.thought(len(self._kept) + len(self._new), rule=BUDGET)
        else:
            self.plan.exhausted()
        return thinking is True

    def _look_for_repetition(self) -> None:
        length = LENGTH_OF_THOUGHTS if self.router.thinking else LENGTH
        if not repeats(self.journal, self._begun_at, length):
            return
        if self.router.thinking and not self.plan.spent:
            self.plan.thought(len(self._kept) + len(self._new), rule=REPETITION)
        else:
            self.broken_off = True

    # -- ends and moves

    def end(self, reason: FinishReason) -> list[Event]:
        """Events of a generation's end; there may be a move to make."""
        plan = self.plan
        if plan.naming:
            plan.name_ended()
            self._ended = reason
            return []
        # What a backend that keeps to a constraint wrote is whole, whether or not it shows the token it stops at.
        hidden = self._way.stop_hidden or plan.constraint is not None
        events = self.router.end(reason, stop_hidden=hidden)
        self._look()
        if plan.move is None:
            plan.ended(reason, self.router.closed_to)
        self._ended = reason if plan.move is not None else None
        if self.broken_off:
            events.append(Repaired(REPETITION, self.router.usage.completion_tokens))
        return events

    def turn(self) -> list[Event]:
        """Make the plan's move."""
        move = self.plan.move
        assert move is not None
        if move.trims:
            return self._trim(move)
        said = self.said
        events: list[Event] = []
        kept = said[: move.kept]
        if move.closes:
            events += self.router.supply([END])
            kept.append(END)
        elif kept and kept[-1] in STOPS:
            # A call ends as calls do, whatever follows it; only nothing else does.
            kept[-1] = CALL if kept[-1] == CALL and self.plan.handed else END
        elif kept and kept[-1] != END:
            kept.append(END)
        start = self._start
        between = move.between
        if between:
            kept += between if kept else between[len(start) :]
        begin = len(kept)
        opened = bool(self.opening) and not begin
        added: Sequence[int] = () if opened else (*(start if begin else ()), *move.header)
        now = [*kept, *added]
        position = self.router.usage.completion_tokens
        self._note_move(move, kept, (*added, *move.body))
        self._kept = [*now, *move.body]
        events += self.router.reread(() if move.naming else move.header, begin, len(now))
        self.plan.made(move, begin, len(now))
        events += self.router.supply(move.body)
        if move.rule:
            events.append(Repaired(move.rule, position))
        return events

    def _trim(self, move: PromptEdit) -> list[Event]:
        kept = self.said[: move.kept]
        body, stop = move.body, move.body[:0]
        if body and body[-1] in STOPS:
            body, stop = body[:-1], body[-1:]
        position = self.router.usage.completion_tokens
        self._note_move(move, kept, move.body)
        self._kept = [*kept, *move.body]
        self.router.trim(body, len(kept) + len(body))
        self.plan.made(move, move.kept, move.kept)
        self.broken_off = move.ends
        return [Repaired(move.rule, position), *self.router.supply(stop)]

    def _note_move(self, move: PromptEdit, kept: Sequence[int], added: Sequence[int]) -> None:
        ended, self._ended = self._ended, None
        value: dict[str, Json] = {MOVED: [*kept[move.kept :], *added], "kept": move.kept}
        self.note(JournalEntry(value | ({"ended": ended.value} if ended is not None else {})))

    def again(self, note: JournalEntry) -> list[Event] | None:
        """What a note of a journal says was done; None for a note of somebody else."""
        if isinstance(able := note.value.get(ABLE), list):
            self.came(self._way, frozenset(map(str, able)))
            return []
        if NOTED in note.value and self.noted:
            self.note(note)
            return []
        if LEFT in note.value:
            self.drop()
            return []
        if isinstance(tokens := note.value.get(UNREAD), int):
            return [] if self._take_back(tokens) else None
        if MOVED not in note.value:
            return None
        ended = note.value.get("ended")
        events = self.end(FinishReason(ended)) if isinstance(ended, str) else []
        return events + (self.turn() if self.plan.move is not None else [])

    # -- what a backend that failed left

    def take_up(self, able: frozenset[str]) -> None:
        """Another backend goes on, which keeps to those kinds of constraints. A body that it would keep to one is
        generated from its beginning where nothing of it was shown: nobody can be kept to the rest of one."""
        wanted = self.plan.current.constraint
        keeps = wanted is not None and wanted.kind in able
        if keeps and self.plan.opened_to > self.router.closed_to and self.droppable:
            self.drop()

    @property
    def droppable(self) -> bool:
        """Whether a message was begun and nothing of it was shown."""
        begun = self.said[max(self.router.closed_to, self.plan.opened_to, 0) :]
        return not (tuple(begun) in ((), self._start) or self.plan.move is not None or self.router.is_shown)

    def drop(self) -> None:
        """Have the message that was begun generated once more, behind its header where that was put there."""
        place, plan, start = self.router.closed_to, self.plan, self._start
        put = plan.opened_to > place or (self.opening and not place)
        now = self.said[: max(plan.opened_to, 0) if put else place]
        begin = place
        if not put and now:
            now[-1:] = [END if now[-1] in STOPS else now[-1], *(() if now[-1] in CLOSED else (END,))]
            begin = len(now)
            now += start
        header = self.opening[len(start) :] if self.opening and not place else plan.current.header
        self.note(JournalEntry({LEFT: place}))
        self._kept = now
        self.router.reread(header if put and not plan.naming else (), begin, len(now))
        plan.names.begin()

    def unread(self) -> bool:
        """Take back a character that did not come whole; whether there is one, and nothing of it was shown."""
        tokens = unfinished(self._encoding, self.said)
        return tokens > 0 and self.plan.move is None and self._take_back(tokens)

    def _take_back(self, tokens: int) -> bool:
        """The last so many, but for whole characters that some of them begin with."""
        decoder = getincrementaldecoder("utf-8")("replace")
        instead = self._encoding.encode_generated(decoder.decode(self._encoding.decode_bytes(self.said[-tokens:])))
        if not self.router.unread(tokens, instead):
            return False
        self.note(JournalEntry({UNREAD: tokens}))
        self._kept[-tokens:] = instead
        return True

    @property
    def _start(self) -> Tokens:
        return tuple(self._encoding.encode_marked("<|start|>assistant"))


def course_of(
    encoding: Encoding,
    tools: ToolSet,
    turn: GenerationRequest,
    wishes: OutputRequirements,
    new_call_id: Callable[[], str],
    violation: Violation | None,
) -> Transcript:
    """The course of an answer to `turn`, at its beginning."""
    plan = InterventionController(encoding, wishes, violation)
    router = HarmonyRouter(
        encoding,
        tools,
        new_call_id,
        hold_calls=turn.hold_calls,
        calls_allowed=turn.calls_allowed,
        # What the gateway runs itself is told apart behind the router.
        parallel_calls=turn.parallel_calls or wishes.told,
        gate=plan,
    )
    watches = REPETITION not in wishes.unmended
    course = Transcript(encoding, router, plan, budget=wishes.budget, watches=watches, tells_able=wishes.for_backends)
    course.noted = turn.noted is not None
    if turn.noted is not None and not turn.journal:
        course.note(JournalEntry({NOTED: dict(turn.noted)}))
    return course
