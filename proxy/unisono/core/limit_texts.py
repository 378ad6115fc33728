"""Messages about expired time limits of backends and providers.

An operator seldom knows which limit expired, so each message states the value of the limit and the setting that raises
the limit.
"""

from __future__ import annotations

from unisono.core.generation import Timeouts

# The gateway learns the usual times of a deployment and may shorten the limits of an attempt accordingly.
LATE_START_REMEDY = (
    "if it needs more time, raise `first_token_timeout_s` of the model; if the limit was shorter than that setting, "
    "raise `min_first_token_timeout_s`"
)


def seconds(value: float) -> str:
    """Return a duration in seconds with its unit, rounded, for example `2.5 s`."""
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.3g} s"


def no_first_token(server: str, timeouts: Timeouts) -> str:
    """Return the message for an attempt without a first token; `server` is the subject."""
    if timeouts.total_s <= timeouts.first_token_s:
        return f"{server} sent no first token, and {incomplete(timeouts)}"
    return f"{server} sent no first token within {seconds(timeouts.first_token_s)}; {LATE_START_REMEDY}"


def silent(server: str, timeouts: Timeouts) -> str:
    """Return the message for a server that stopped sending before the end of its answer."""
    return (
        f"{server} sent nothing for {seconds(timeouts.silence_s)} in the middle of its answer; if it needs more time, "
        "raise `stream_timeout` of the model; if the limit was shorter than that setting, raise "
        "`min_silence_timeout_s`"
    )


def incomplete(timeouts: Timeouts) -> str:
    """Return the message for an answer that exceeded its total time limit."""
    # `timeout` limits the whole answer, including the time in the queue and earlier attempts.
    return (
        f"the answer was not complete within its time limit, of which {seconds(timeouts.total_s)} were left for this "
        "attempt; if it needs more time, raise `timeout` of the model"
    )
