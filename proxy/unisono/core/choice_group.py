"""Identity of the choices of one client request."""

from __future__ import annotations

from typing import Any


class ChoiceGroup:
    """Identity of the choices of one client request; `size` is their number.

    The choices share one reservation. They must be generated concurrently, because no choice begins before all choices
    have been admitted. `shared` contains the objects that the choices share, by name. The middleware that adds an
    object chooses its name.
    """

    __slots__ = ("shared", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.shared: dict[str, Any] = {}
