"""Resources that outlive one configuration: open and unchanged ones are reused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class SharedResource(Generic[T]):
    """Resource that one application opens and several may hold.

    It is a context manager: the first holder opens it, and the last one closes it permanently. `made_of` are the
    settings it was built from.
    """

    def __init__(
        self,
        value: T,
        made_of: object,
        *,
        start: Callable[[], Awaitable[None]] | None = None,
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self.value = value
        self.inputs = made_of
        self._start = start
        self._close = close
        self._users = 0

    async def __aenter__(self) -> Self:
        self._users += 1
        if self._users == 1 and self._start is not None:
            await self._start()
        return self

    async def __aexit__(self, *error: object) -> None:
        # At a reload, the new application opens the resource before the old one closes it. The count therefore reaches
        # zero only at the end.
        self._users -= 1
        if not self._users:
            await self._close()


def reuse_or_build(
    old: SharedResource[T] | None, made_of: object, build: Callable[[], SharedResource[T]]
) -> SharedResource[T]:
    """Return the old resource if its settings are unchanged, else a new one. Raises as `build`."""
    return old if old is not None and old.inputs == made_of else build()
