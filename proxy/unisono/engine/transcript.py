"""Token transcript of one answer: journal, tail of the step's prompt, and prompt edits.

An intervention stops the parsing at a certain token, no matter how the network splits the stream. Tokens that arrive
after that token are discarded: they are neither counted nor added to the journal. The journal records a prompt edit
directly after the tokens that caused the edit, so a replay applies the same edit to the same prompt. No I/O.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Final

from unisono.core.conversation import Json, Tokens
from unisono.core.events import Event, Repaired
from unisono.core.generation import ALL_STOP_TOKENS, END, Constraint, FinishReason
from unisono.core.recovery_rules import REPETITION
from unisono.engine.interventions.controller import InterventionController
from unisono.engine.interventions.prompt_edit import PromptEdit
from unisono.engine.interventions.reasoning_budget import ReadingLimits
from unisono.engine.journal import NOTED, UNCOUNTED, JournalEntry, JournalWriter, TokenSource
from unisono.harmony.channel_router import HarmonyRouter
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.raw_codec import unfinished

CLOSING_TOKENS: Final = ALL_STOP_TOKENS | {END}

ABLE: Final = "able"
MOVED: Final = "moved"
LEFT: Final = "left"
UNREAD: Final = "unread"


class Transcript:
    """Token transcript of one answer. `is_noted`: the request has a `Resumption.journal_note`."""

    def __init__(
        self, encoding: Encoding, router: HarmonyRouter, controller: InterventionController, *, is_noted: bool = False
    ) -> None:
        self._encoding = encoding
        self.router = router
        self.controller = controller
        self.journal = JournalWriter()
        self._limits = ReadingLimits(encoding, router, controller.requirements, controller.obligations)
        self.is_broken_off = False  # the answer ends here, because the model repeats itself
        self.is_replaying = False  # in a replay, tokens after a stop count, as in earlier versions
        self.is_noted = is_noted
        self._start = encoding.assistant_start
        self._unchecked_to = 0  # journal length below which the output is not checked for repetition
        # Tokens of the unfinished message at the end of the step's prompt; None before the first step.
        self.opening: Tokens | None = None

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint for the next generation, or None."""
        constraint = self.controller.constraint
        # A backend applies a constraint from its first token on, so a body that has begun gets no constraint.
        is_body_empty = constraint is not None and self.journal.tail_length == self.controller.step.header_end
        return constraint if is_body_empty else None

    def start_step(self, opening: Tokens, *, is_first: bool) -> None:
        """Begin a step; `opening` are the tokens of the message that its prompt leaves open."""
        self.opening = opening
        if opening and not is_first:
            # The opened message is checked like a message that the controller itself opens.
            self.controller.start_final()
            self.router.reread(opening[len(self._start) :], 0, 0)
        elif opening:
            self.router.resume(Header(verbatim=True), opening)
        elif not is_first:
            self.router.resume()

    def end_step(self) -> None:
        self.journal.end_step()
        self._unchecked_to = self.router.counter.hidden_stops = 0
        self.controller.start_step()

    def set_source(self, source: TokenSource, able: frozenset[str]) -> None:
        """Set the source of the next tokens, and the constraint kinds that the backend can enforce."""
        if source is not self.journal.source and source != self.journal.source:
            self.journal.set_source(source)
            # This flag is never reset, because earlier tokens of the same message may still be guessed.
            counter = self.router.counter
            counter.canonical = counter.canonical or source.guessed
        if self.controller.requirements.needs_constraints and able != self.controller.enforced_kinds:
            self.controller.enforced_kinds = able
            kinds: list[Json] = [*sorted(able)]
            self.add_entry(JournalEntry({ABLE: kinds}))

    def add_entry(self, entry: JournalEntry, tail: Sequence[int] | None = None) -> None:
        """Add an entry to the journal; `tail` is the new tail of the prompt, None for no change."""
        self.journal.add_entry(entry, tail)
        self._unchecked_to = 0

    # -- tokens

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Read generated tokens; return the events up to where an intervention stops the parsing."""
        journal, limits = self.journal.numbers, self._limits
        is_unchecked = len(journal) + len(tokens) < self._unchecked_to
        if is_unchecked and (limits.budget is None or limits.are_in_budget(tokens)):
            journal += tokens
            events = self.router.feed(tokens)
            if self.router.stopped is not None:
                self._stop(self.router.unread_tokens)
                self._unchecked_to = 0
            return events
        events = []
        rest, read, is_naming = tokens, self.journal.read, self.controller.step.last.naming
        while rest and not self._is_stopped:
            if limits.budget is not None and self._ends_reasoning(rest[0]):
                # A replay needs the token that exceeds the budget.
                journal.append(rest[0])
                self.router.count(1)
                self.uncount(1)
                rest = rest[1:]
                break
            size = len(rest) if is_naming else limits.portion(rest, read)
            journal += rest[:size]
            read += size
            events += self._read(rest[:size], read)
            rest = rest[size:]
        if rest:
            journal += rest
            self._discard(len(rest))
        # The router does not read the tokens of a forced call's tool name, so the next tokens are checked again.
        is_checked = is_naming or self._is_stopped
        self._unchecked_to = 0 if is_checked else len(journal) + limits.until_check(read + len(rest))
        return events

    @property
    def _is_stopped(self) -> bool:
        return self.is_broken_off or self.controller.step.pending is not None

    def _ends_reasoning(self, token: int) -> bool:
        if self._limits.has_room_for(token, lambda: self.journal.new_tokens):
            return False
        is_reasoning = self.router.is_reasoning is True
        return self.controller.handle_spent_budget(self.journal.tail_length, is_reasoning=is_reasoning)

    def _read(self, tokens: Sequence[int], read: int) -> list[Event]:
        """Read a portion and return its events; `read` as in `ReadingLimits` includes the portion."""
        if self.controller.step.last.naming:
            size = self.controller.read_name(tokens, self.router.closed_to)
            self.router.count(size)
            self._discard(len(tokens) - size)
            return []
        events = self.router.feed(tokens)
        if self.router.stopped is not None:
            self._stop(self.router.unread_tokens)
        if self.controller.step.pending is None and self._limits.is_repeating(self.journal.numbers, read):
            is_reasoning, place = bool(self.router.is_reasoning), self.journal.tail_length
            self.is_broken_off = not self.controller.handle_repetition(place, is_reasoning=is_reasoning)
        return events

    def _stop(self, unread: int) -> None:
        """Handle a stop of the router, which did not read the last `unread` tokens of the journal."""
        stopped = self.router.stopped
        if stopped is None or self.controller.step.pending is not None:
            return
        # The router may read a token of the body before it stops at the header. A replay needs this token. All tokens
        # count before the decision to stop, which comes long after the header if the message was read as a whole.
        if stopped.text is None and not stopped.is_whole:
            self.uncount(self.journal.tail_length - unread - stopped.end)
        self._discard(unread)
        self.controller.handle_stop(stopped)

    def uncount(self, tokens: int) -> None:
        """Exclude `tokens` tokens of the journal from the output; negative to include tokens again."""
        self.router.counter.corrections -= tokens
        self.journal.uncounted += tokens

    def _discard(self, tokens: int) -> None:
        """Discard the last `tokens` tokens, which arrived after a stop; a replay counts them."""
        if self.is_replaying:
            self.router.count(tokens)
        else:
            self.journal.discard(tokens)

    # -- ends and prompt edits

    def end_generation(self, reason: FinishReason) -> list[Event]:
        """End the current generation and return its last events; an edit may then be pending."""
        controller = self.controller
        if controller.step.last.naming:
            controller.end_name(self.router.closed_to)
            controller.step.record_end(reason)
            return []
        # Output that a backend ended under an enforced constraint is complete, even without a stop token.
        hidden = self.journal.source.stop_hidden or controller.constraint is not None
        events = self.router.end(reason, stop_hidden=hidden)
        self._stop(0)
        if controller.step.pending is None:
            controller.handle_end(reason, self.router.closed_to)
        controller.step.record_end(reason)
        if self.is_broken_off:
            events.append(Repaired(REPETITION, self.router.generated))
        return events

    def apply_edit(self) -> list[Event]:
        """Apply the pending prompt edit and return its events."""
        edit = self.controller.step.pending
        assert edit is not None
        if edit.trims:
            return self._trim(edit)
        remaining = edit.applied_to(self.journal.tail, self._start, has_call=self.controller.step.has_call)
        events = self.router.supply([END]) if edit.closes else []
        begin = len(remaining)
        opened = bool(self.opening) and not begin
        added: Sequence[int] = () if opened else (*(self._start if begin else ()), *edit.header)
        now = [*remaining, *added]
        position = self.router.generated
        self._record_edit(edit, remaining, (*added, *edit.body), tail=[*now, *edit.body])
        events += self.router.reread(() if edit.naming else edit.header, begin, len(now))
        self.controller.record_edit(edit, len(now))
        events += self.router.supply(edit.body)
        if edit.rule:
            events.append(Repaired(edit.rule, position))
        return events

    def _trim(self, edit: PromptEdit) -> list[Event]:
        remaining = self.journal.tail[: edit.position]
        body, stop = edit.split_body
        self._record_edit(edit, remaining, edit.body, tail=[*remaining, *edit.body])
        self.router.trim(body, len(remaining) + len(body))
        self.controller.record_edit(edit, edit.position)
        self.is_broken_off = edit.ends
        return [Repaired(edit.rule, self.router.generated), *self.router.supply(stop)]

    def _record_edit(
        self, edit: PromptEdit, remaining: Sequence[int], added: Sequence[int], *, tail: Sequence[int]
    ) -> None:
        """Add the entry of an edit that shortens the tail to `remaining` and appends `added`."""
        value: dict[str, Json] = {MOVED: [*remaining[edit.position :], *added], "kept": edit.position}
        if edit.ended is not None:
            value["ended"] = edit.ended.value
        if self.journal.uncounted:
            value[UNCOUNTED] = self.journal.uncounted
        self.add_entry(JournalEntry(value), tail)

    # -- continuation after a failed backend

    @property
    def can_drop(self) -> bool:
        """Return whether there is an unfinished message of which nothing was emitted."""
        started = self.journal.tail[max(self.router.closed_to, self.controller.step.header_end, 0) :]
        return not (
            tuple(started) in ((), self._start) or self.controller.step.pending is not None or self.router.is_emitted
        )

    def drop_message(self) -> None:
        """Discard the unfinished message, so that it is generated again; keep an inserted header."""
        position, controller, start = self.router.closed_to, self.controller, self._start
        is_inserted = controller.step.header_end > position or (self.opening and not position)
        now = self.journal.tail[: max(controller.step.header_end, 0) if is_inserted else position]
        begin = position
        if not is_inserted and now:
            now[-1:] = [END if now[-1] in ALL_STOP_TOKENS else now[-1], *(() if now[-1] in CLOSING_TOKENS else (END,))]
            begin = len(now)
            now += start
        header = self.opening[len(start) :] if self.opening and not position else controller.step.last.header
        self.add_entry(JournalEntry({LEFT: position}), now)
        self.router.reread(header if is_inserted and not controller.step.last.naming else (), begin, len(now))
        controller.tool_naming.reset()

    def drop_incomplete_character(self) -> bool:
        """Discard an incomplete, unemitted character at the end; return whether there was one."""
        tokens = unfinished(self._encoding, self.journal.tail)
        return tokens > 0 and self.controller.step.pending is None and self.drop_tokens(tokens)

    def drop_tokens(self, tokens: int) -> bool:
        """Discard the last `tokens` tokens except complete characters; return False if impossible."""
        decoder = getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._encoding.decode_bytes(self.journal.tail[-tokens:]))
        instead = self._encoding.encode_generated(text)
        tail = [*self.journal.tail[:-tokens], *instead]
        if not self.router.unread(tokens, instead):
            return False
        # These tokens are generated again, and count once.
        self.uncount(tokens - len(instead))
        self.add_entry(JournalEntry({UNREAD: tokens, UNCOUNTED: self.journal.uncounted}), tail)
        return True


def replay_entry(transcript: Transcript, entry: JournalEntry) -> list[Event] | None:
    """Repeat the action of a journal entry; return None if it belongs to another component."""
    if isinstance(able := entry.value.get(ABLE), list):
        transcript.set_source(transcript.journal.source, frozenset(map(str, able)))
        return []
    if NOTED in entry.value and transcript.is_noted:
        transcript.add_entry(entry)
        return []
    if LEFT in entry.value:
        transcript.drop_message()
        return []
    if isinstance(tokens := entry.value.get(UNREAD), int):
        return [] if transcript.drop_tokens(tokens) else None
    if MOVED not in entry.value:
        return None
    ended = entry.value.get("ended")
    events = transcript.end_generation(FinishReason(ended)) if isinstance(ended, str) else []
    # Earlier versions counted other tokens.
    uncounted = entry.value.get(UNCOUNTED)
    transcript.uncount((uncounted if isinstance(uncounted, int) else 0) - transcript.journal.uncounted)
    return events + (transcript.apply_edit() if transcript.controller.step.pending is not None else [])


def resume_elsewhere(transcript: Transcript, able: frozenset[str]) -> None:
    """Prepare to continue on another backend, which can enforce the constraint kinds `able`.

    No backend can enforce a constraint on the rest of a body. An unfinished message with a constraint is therefore
    discarded and generated again, unless a part of it was emitted.
    """
    controller = transcript.controller
    wanted = controller.step.last.constraint
    keeps = wanted is not None and wanted.kind in able
    if keeps and controller.step.header_end > transcript.router.closed_to and transcript.can_drop:
        transcript.drop_message()
