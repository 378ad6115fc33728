"""JSON pointers in the references of JSON schemas."""

from __future__ import annotations

from urllib.parse import unquote


def names_in(reference: str) -> tuple[str, ...]:
    """Return the names along a reference such as `#/$defs/name`, from the root of the schema.

    A reference is a URI, so characters such as `<` may be percent-encoded. The encoding is removed before the names are
    separated, as RFC 6901 requires.
    """
    pointer = unquote(reference.partition("#")[2])
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:])
