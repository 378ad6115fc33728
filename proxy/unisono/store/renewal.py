"""Renewal of the responses that a new response continues."""

from __future__ import annotations

from typing import Final

# If a response has less than this share of its time left, it is renewed when a response that continues it is stored.
# The share is below 1, because a renewal at every continuation would write the whole chain again each time.
MIN_LEFT: Final = 0.9
