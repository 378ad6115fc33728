"""Resources that stay open when the configuration is reloaded, unless their settings change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class SharedResource(Generic[T]):
    """Resource that several applications may use at the same time, as during a reload.

    It is a context manager: the first application that enters it opens the resource, and the last one that exits
    closes it for good. `made_of` are the settings from which the resource was built.
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
        # During a reload, the new application enters the resource before the old application exits. So the count
        # reaches zero only when no application uses the resource any more.
        self._users -= 1
        if not self._users:
            await self._close()


def reuse_or_build(
    old: SharedResource[T] | None, made_of: object, build: Callable[[], SharedResource[T]]
) -> SharedResource[T]:
    """Return the old resource if its settings are unchanged, else the result of `build`.

    Raises whatever `build` raises.
    """
    return old if old is not None and old.inputs == made_of else build()
