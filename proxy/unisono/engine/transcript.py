"""Token transcript of one answer: journal, tail of the step's prompt, and prompt edits.

Interventions stop at the same token however the network splits the stream. Later tokens are counted and added to the
journal, but not parsed. A prompt edit follows in the journal the tokens that it was decided on, so that a replay
continues after the same prompt. No I/O.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Final

from unisono.core.conversation import Json, Tokens
from unisono.core.events import Event, Repaired
from unisono.core.generation import CALL, END, ENDOFTEXT, FIRST_SPECIAL, STOP_TOKENS, Constraint, FinishReason
from unisono.core.ports import Violation
from unisono.engine.interventions.controller import BUDGET, REPETITION, InterventionController
from unisono.engine.interventions.prompt_edit import PromptEdit
from unisono.engine.interventions.repetition import LENGTH, LENGTH_OF_THOUGHTS, STRIDE, repeats
from unisono.engine.interventions.requirements import OutputRequirements
from unisono.engine.journal import FIRST_MARK, NOTED, STEP_ENDED, JournalEntry, TokenSource
from unisono.engine.request import GenerationRequest
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.tools import ToolSet
from unisono.harmony.utf8_tail import LONGEST, unfinished

STOPS: Final = frozenset({*STOP_TOKENS, ENDOFTEXT})  # tokens that end every generation
CLOSED: Final = STOPS | {END}

_NEVER: Final = 1 << 62

ABLE: Final = "able"
MOVED: Final = "moved"
LEFT: Final = "left"
UNREAD: Final = "unread"


class Transcript:
    """Token transcript of one answer."""

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
        self._budget = budget  # limit of reasoning tokens
        self._watches = watches  # detect endless repetition
        self._tells_able = tells_able  # record in the journal which constraint kinds the backend enforces
        self._way = TokenSource()
        self._kept: list[int] = []
        self._begun_at = 0
        self._generated = 0
        self._free_to = 0
        self._ended: FinishReason | None = None
        self.plan = plan
        self.journal: list[int] = []
        self.noted = False  # the caller knows all notes of the request
        self.broken_off = False  # the answer ends here: the model repeats itself
        self.opening: Tokens = ()
        if budget is not None and budget < 1:
            plan.exhausted()

    @property
    def said(self) -> list[int]:
        """Return the tail of the current step's prompt: generated and inserted tokens."""
        return [*self._kept, *self._new]

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint for the next generation."""
        # A body that has begun has none, since a constraint would begin another body.
        return self.plan.constraint if len(self.said) == self.plan.opened_to else None

    @property
    def put(self) -> int:
        """Return the tail's length minus the number of tokens generated in the step."""
        # Negative if tokens were cut.
        return len(self._kept) - self._generated

    @property
    def _new(self) -> list[int]:
        return [number for number in self.journal[self._begun_at :] if number < FIRST_MARK]

    @property
    def ended(self) -> bool:
        """Return whether the step's last token ends every generation."""
        generated = self._begun_at < len(self.journal)
        last = self.journal[-1:] if generated else self._kept[-1:]
        return bool(last) and last[0] in STOPS

    def begin(self, opening: Tokens, *, first: bool) -> None:
        """Begin a step; `opening` are the tokens of the message that its prompt leaves open."""
        self.opening = opening
        if opening and not first:
            # The opened message is checked like one that the controller opens itself.
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
        """Set the source of the next tokens, and the constraint kinds that the backend enforces."""
        if way != self._way:
            self._way = way
            self.journal.append(way.mark)
            # A message with guessed tokens may also contain tokens of the model's own, so this flag is never reset.
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
        """Return the events of more tokens, up to the one at which the controller stops."""
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
        """Set the journal length up to which only the router can stop the stream."""
        stopped = self.plan.move is not None or self.broken_off
        if stopped or self.plan.naming or (self._budget is not None and not self.plan.late):
            self._free_to = 0
        else:
            self._free_to = len(self.journal) + (self._to_look if self._watches else _NEVER)

    @property
    def _to_look(self) -> int:
        return STRIDE - (len(self.journal) - self._begun_at) % STRIDE

    def _portion(self, rest: Sequence[int]) -> int:
        size = len(rest)
        if self.plan.naming:
            return size
        if self._watches:
            size = min(size, self._to_look)
        if self._budget is not None and not self.plan.late:
            # The router may hold back part of a header. A marker may show that these tokens were reasoning, and more
            # reasoning may follow.
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
        """End reasoning before `token` if the budget has no room for it."""
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

    # -- ends and prompt edits

    def end(self, reason: FinishReason) -> list[Event]:
        """Return the events at a generation's end; a prompt edit may be pending afterwards."""
        plan = self.plan
        if plan.naming:
            plan.name_ended()
            self._ended = reason
            return []
        # The output under an enforced constraint is complete, even if the backend does not report its stop token.
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
        """Make the pending prompt edit."""
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
            # A complete call keeps its own terminator, even if something follows; every other message ends with END.
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
        """Repeat the action of a journal entry; None if the entry is of another kind."""
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

    # -- continuation after a failed backend

    def take_up(self, able: frozenset[str]) -> None:
        """Continue on another backend that enforces the constraint kinds `able`."""
        # A constraint cannot be enforced for the rest of a body. A body that needs one is regenerated, unless part of
        # it was emitted.
        wanted = self.plan.current.constraint
        keeps = wanted is not None and wanted.kind in able
        if keeps and self.plan.opened_to > self.router.closed_to and self.droppable:
            self.drop()

    @property
    def droppable(self) -> bool:
        """Return whether a message was begun and nothing of it was emitted."""
        begun = self.said[max(self.router.closed_to, self.plan.opened_to, 0) :]
        return not (tuple(begun) in ((), self._start) or self.plan.move is not None or self.router.is_shown)

    def drop(self) -> None:
        """Discard the open message, so that it is generated again, after its header if inserted."""
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
        """Discard an incomplete character at the end that was not emitted; return whether any was."""
        tokens = unfinished(self._encoding, self.said)
        return tokens > 0 and self.plan.move is None and self._take_back(tokens)

    def _take_back(self, tokens: int) -> bool:
        """Discard the last `tokens` tokens, except for whole characters at their beginning."""
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
    """Return the transcript of an answer to `turn`, at its beginning."""
    plan = InterventionController(encoding, wishes, violation)
    router = HarmonyRouter(
        encoding,
        tools,
        new_call_id,
        hold_calls=turn.hold_calls,
        calls_allowed=turn.calls_allowed,
        # Calls of server tools are separated after the router.
        parallel_calls=turn.parallel_calls or wishes.told,
        gate=plan,
    )
    watches = REPETITION not in wishes.unmended
    course = Transcript(encoding, router, plan, budget=wishes.budget, watches=watches, tells_able=wishes.for_backends)
    course.noted = turn.noted is not None
    if turn.noted is not None and not turn.journal:
        course.note(JournalEntry({NOTED: dict(turn.noted)}))
    return course
