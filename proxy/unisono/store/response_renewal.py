"""Limit below which the store renews the responses that a new response continues."""

from __future__ import annotations

from typing import Final

# Share of the retention time. If a response has less time left, the store renews it when it stores a response that
# continues it. The share is below 1, because otherwise every continuation would write the whole chain again.
MIN_LEFT: Final = 0.9
