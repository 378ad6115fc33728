"""Messages about expired time limits of backends and providers.

An operator seldom knows which limit expired, so each message names its value and the setting that raises it.
"""

from __future__ import annotations

from unisono.core.generation import Timeouts

# The limits of an attempt are learned, and may be shorter than the configured ones.
LATE_START_REMEDY = (
    "if it needs longer, raise `first_token_timeout_s` of the model, or `min_first_token_timeout_s` if the limit was "
    "shorter"
)


def seconds(value: float) -> str:
    """Return a duration with its unit, without an exponent or needless digits."""
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.3g} s"


def no_first_token(server: str, timeouts: Timeouts) -> str:
    """Return the message for an attempt without a first token; `server` is its subject."""
    if timeouts.total_s <= timeouts.first_token_s:
        return f"{server} sent no first token, and {incomplete(timeouts)}"
    return f"{server} sent no first token within {seconds(timeouts.first_token_s)}; {LATE_START_REMEDY}"


def silent(server: str, timeouts: Timeouts) -> str:
    """Return the message for a server that stopped sending."""
    return (
        f"{server} sent nothing for {seconds(timeouts.silence_s)} in the middle of its answer; if it needs longer, "
        "raise `stream_timeout` of the model, or `min_silence_timeout_s` if the limit was shorter"
    )


def incomplete(timeouts: Timeouts) -> str:
    """Return the message for an answer that exceeded its total time limit."""
    # Earlier waits and attempts of the same answer count for `timeout` too.
    return (
        f"the answer was not complete within its time limit, of which {seconds(timeouts.total_s)} were left for this "
        "attempt; if it needs longer, raise `timeout` of the model"
    )
