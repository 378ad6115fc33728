"""Data classes that only the type checker freezes.

The `__init__` of a frozen data class calls `object.__setattr__` for each field, which takes several times as long as
an assignment. A request creates about a hundred such objects with 600 fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def statically_frozen(cls: type[T]) -> type[T]:
    """Remove the guard of a frozen data class at run time; mypy still refuses assignments.

    Equality and hash stay. All fields must be parameters of `__init__`.
    """
    kind: Any = cls
    plain: dict[str, Any] = {"__annotations__": {}}
    for each in fields(kind):
        plain["__annotations__"][each.name] = object
        plain[each.name] = field(default=each.default, default_factory=each.default_factory, kw_only=each.kw_only)
    if (after := getattr(kind, "__post_init__", None)) is not None:
        plain["__post_init__"] = after
    # The generated method only assigns to `self`, so it fits the frozen class too.
    init = vars(dataclass(type(kind.__name__, (), plain)))["__init__"]
    init.__annotations__ = kind.__init__.__annotations__
    init.__qualname__ = f"{kind.__qualname__}.__init__"
    kind.__init__ = init
    del kind.__setattr__, kind.__delattr__
    return cls
