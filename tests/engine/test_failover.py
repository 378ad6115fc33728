"""The failover policy: every combination has an action, and the table says which."""

from __future__ import annotations

from itertools import product

import pytest

from unisono.engine.failover import KINDS, Action, AttemptError, FailureKind, Options, Progress, decide, failure_kind
from unisono.errors import BackendError, ContextTooLong

FLAGS = [Options(*flags) for flags in product((False, True), repeat=4)]
EVERY = list(product(FailureKind, Progress, FLAGS))
BROKEN = (FailureKind.UNREACHABLE, FailureKind.TIMEOUT, FailureKind.OVERLOADED, FailureKind.PROTOCOL, FailureKind.ERROR)


def subclasses(kind: type[BackendError]) -> list[type[BackendError]]:
    return [kind, *(deeper for one in kind.__subclasses__() for deeper in subclasses(one))]


@pytest.mark.parametrize("error", [*subclasses(BackendError), ContextTooLong])
def test_every_error_of_an_attempt_has_a_kind(error: type[AttemptError]) -> None:
    found = failure_kind(error("x"))
    assert found is next(kind for row, kind in KINDS if issubclass(error, row))


def test_every_kind_belongs_to_an_error() -> None:
    assert {kind for _, kind in KINDS} == set(FailureKind)


@pytest.mark.parametrize(("kind", "progress", "options"), EVERY)
def test_every_combination_has_an_action_that_is_possible(
    kind: FailureKind, progress: Progress, options: Options
) -> None:
    action = decide(kind, progress, options)
    assert isinstance(action, Action)
    # A complete answer is never lost, and never asked for again.
    assert (progress is Progress.COMPLETE) <= (action is Action.STOP)
    # What the client has seen is neither taken back nor lost where it can go on.
    if progress is Progress.SEEN:
        assert action not in (Action.RETRY,)
        assert (action is Action.RESUME) <= options.resumable
        assert (action is Action.RESTART) <= options.regenerable
    # Another attempt needs a deployment, and a pause one to come back to.
    if action in (Action.RETRY, Action.RESUME):
        assert options.available
    if action is Action.RESTART:
        assert options.available or (options.regenerable and kind is FailureKind.CANNOT_CONTINUE)
    if action is Action.WAIT:
        assert options.later
        assert not options.available
        assert kind in BROKEN
    # A request that the backend rejects is never sent again.
    if kind is FailureKind.REJECTED and progress is not Progress.COMPLETE:
        assert action is Action.RAISE
    # Only nothing can be raised for text that cannot go on: an answer that has begun ends normally.
    if kind in (FailureKind.CANNOT_CONTINUE, FailureKind.CONTEXT_TOO_LONG) and progress is not Progress.NOTHING:
        assert action is not Action.RAISE
    # After a pause there is something to do.
    if action is Action.WAIT:
        after = decide(kind, progress, Options(True, True, options.resumable, options.regenerable))
        assert after in (Action.RETRY, Action.RESUME, Action.RESTART)


ELSEWHERE, LATER, NOWHERE = Options(available=True), Options(later=True), Options()
FIXED, BOTH = Options(available=True, resumable=False), Options(available=True, later=True)
NONE, UNSEEN, SEEN, COMPLETE = Progress
ROWS: dict[str, tuple[FailureKind, Progress, Options, Action]] = {
    "a new answer goes elsewhere": (FailureKind.ERROR, NONE, ELSEWHERE, Action.RETRY),
    "without a pause where it can": (FailureKind.OVERLOADED, NONE, BOTH, Action.RETRY),
    "or back after a pause": (FailureKind.UNREACHABLE, NONE, LATER, Action.WAIT),
    "or nowhere": (FailureKind.UNREACHABLE, NONE, NOWHERE, Action.RAISE),
    "an answer that is read goes on elsewhere": (FailureKind.TIMEOUT, SEEN, ELSEWHERE, Action.RESUME),
    "or where it was": (FailureKind.PROTOCOL, SEEN, LATER, Action.WAIT),
    "one that nobody has seen goes on too": (FailureKind.PROTOCOL, UNSEEN, ELSEWHERE, Action.RESUME),
    "or begins again": (FailureKind.PROTOCOL, UNSEEN, FIXED, Action.RESTART),
    "one that passes through is over": (FailureKind.UNREACHABLE, SEEN, FIXED, Action.RAISE),
    "a rejected request": (FailureKind.REJECTED, NONE, BOTH, Action.RAISE),
    "a backend found unfit": (FailureKind.UNFIT, NONE, ELSEWHERE, Action.RETRY),
    "is not waited for": (FailureKind.UNFIT, NONE, LATER, Action.RAISE),
    "a prompt too long for this backend": (FailureKind.CONTEXT_TOO_LONG, NONE, ELSEWHERE, Action.RETRY),
    "for every backend": (FailureKind.CONTEXT_TOO_LONG, NONE, LATER, Action.RAISE),
    "an answer that fills every context": (FailureKind.CONTEXT_TOO_LONG, SEEN, LATER, Action.STOP),
    "text that this backend cannot continue": (FailureKind.CANNOT_CONTINUE, SEEN, ELSEWHERE, Action.RESUME),
    "may be generated again": (FailureKind.CANNOT_CONTINUE, SEEN, Options(regenerable=True), Action.RESTART),
    "or is all there is": (FailureKind.CANNOT_CONTINUE, SEEN, NOWHERE, Action.STOP),
    "a failure after the last token": (FailureKind.UNREACHABLE, COMPLETE, BOTH, Action.STOP),
}


@pytest.mark.parametrize(("kind", "progress", "options", "action"), ROWS.values(), ids=ROWS)
def test_the_table(kind: FailureKind, progress: Progress, options: Options, action: Action) -> None:
    assert decide(kind, progress, options) is action
