"""Failover policy: each combination of failure, progress and options has one action."""

from __future__ import annotations

from itertools import product

import pytest

from unisono.engine.failover_policy import (
    KINDS,
    Action,
    AttemptError,
    FailureKind,
    Options,
    Progress,
    decide,
    failure_kind,
)
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


# One test for all combinations, because 576 tests take longer to collect than to run.
def test_every_combination_has_an_action_that_is_possible() -> None:
    wrong = []
    for combination in EVERY:
        try:
            check_action(*combination)
        except AssertionError as error:
            wrong.append(f"{combination}: {error}")
    assert wrong == []


def check_action(kind: FailureKind, progress: Progress, options: Options) -> None:
    action = decide(kind, progress, options)
    assert isinstance(action, Action)
    # A complete answer is never lost or generated again.
    assert (progress is Progress.COMPLETE) <= (action is Action.STOP)
    # Emitted output is never replaced, and not lost if it can be continued.
    if progress is Progress.SEEN:
        assert action not in (Action.RETRY,)
        assert (action is Action.RESUME) <= options.resumable
        assert (action is Action.RESTART) <= options.regenerable
    # Another attempt needs an available deployment, a pause one that is available later.
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
    # An answer that has begun ends normally if no backend can continue its text.
    if kind in (FailureKind.CANNOT_CONTINUE, FailureKind.CONTEXT_TOO_LONG) and progress is not Progress.NOTHING:
        assert action is not Action.RAISE
    # After a pause, another attempt follows.
    if action is Action.WAIT:
        after = decide(kind, progress, Options(True, True, options.resumable, options.regenerable))
        assert after in (Action.RETRY, Action.RESUME, Action.RESTART)


ELSEWHERE, LATER, NOWHERE = Options(available=True), Options(later=True), Options()
NOT_RESUMABLE, BOTH = Options(available=True, resumable=False), Options(available=True, later=True)
NONE, UNSEEN, SEEN, COMPLETE = Progress
ROWS: dict[str, tuple[FailureKind, Progress, Options, Action]] = {
    "new answer, another deployment available": (FailureKind.ERROR, NONE, ELSEWHERE, Action.RETRY),
    "new answer, deployments available now and later": (FailureKind.OVERLOADED, NONE, BOTH, Action.RETRY),
    "new answer, deployment available later": (FailureKind.UNREACHABLE, NONE, LATER, Action.WAIT),
    "new answer, no deployment available": (FailureKind.UNREACHABLE, NONE, NOWHERE, Action.RAISE),
    "emitted answer, another deployment available": (FailureKind.TIMEOUT, SEEN, ELSEWHERE, Action.RESUME),
    "emitted answer, deployment available later": (FailureKind.PROTOCOL, SEEN, LATER, Action.WAIT),
    "unseen answer, another deployment available": (FailureKind.PROTOCOL, UNSEEN, ELSEWHERE, Action.RESUME),
    "unseen answer, not resumable": (FailureKind.PROTOCOL, UNSEEN, NOT_RESUMABLE, Action.RESTART),
    "emitted answer, not resumable": (FailureKind.UNREACHABLE, SEEN, NOT_RESUMABLE, Action.RAISE),
    "rejected request": (FailureKind.REJECTED, NONE, BOTH, Action.RAISE),
    "unfit backend, another deployment available": (FailureKind.UNFIT, NONE, ELSEWHERE, Action.RETRY),
    "unfit backend, deployment available later": (FailureKind.UNFIT, NONE, LATER, Action.RAISE),
    "prompt too long, another deployment available": (FailureKind.CONTEXT_TOO_LONG, NONE, ELSEWHERE, Action.RETRY),
    "prompt too long, deployment available later": (FailureKind.CONTEXT_TOO_LONG, NONE, LATER, Action.RAISE),
    "emitted answer that fills the context": (FailureKind.CONTEXT_TOO_LONG, SEEN, LATER, Action.STOP),
    "unsupported continuation, another deployment available": (
        FailureKind.CANNOT_CONTINUE,
        SEEN,
        ELSEWHERE,
        Action.RESUME,
    ),
    "unsupported continuation, regenerable": (
        FailureKind.CANNOT_CONTINUE,
        SEEN,
        Options(regenerable=True),
        Action.RESTART,
    ),
    "unsupported continuation, no deployment available": (FailureKind.CANNOT_CONTINUE, SEEN, NOWHERE, Action.STOP),
    "failure after the last token": (FailureKind.UNREACHABLE, COMPLETE, BOTH, Action.STOP),
}


@pytest.mark.parametrize(("kind", "progress", "options", "action"), ROWS.values(), ids=ROWS)
def test_decide_returns_the_action_of_the_table(
    kind: FailureKind, progress: Progress, options: Options, action: Action
) -> None:
    assert decide(kind, progress, options) is action
