"""HTTP statuses of backends: whether the same request may succeed later."""

from __future__ import annotations

from typing import Final

# Backend statuses below 500 after which the same request may succeed.
TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})


def is_permanent(status: int) -> bool:
    """Return True if a backend that answered with this HTTP status would do so again."""
    return 400 <= status < 500 and status not in TRANSIENT_STATUSES
