"""Support for renamed public names: old names work for one release, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


def renamed(module: str, name: str, new: Mapping[str, object]) -> object:
    """Return the object formerly called `name` in `module`, with a deprecation warning.

    `new` maps former names to objects. Raises AttributeError for any other name.
    """
    if name not in new:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    found = new[name]
    message = (
        f"{module}.{name} was renamed to {getattr(found, '__name__', name)}; the next release removes the old name"
    )
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return found
