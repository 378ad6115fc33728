"""Limits on the texts and schemas of a client that are declared to the model.

A text that was checked here has no line break, so it cannot end the comment or declaration that contains it. The tools
of one request cost a bounded amount of work, even if their schemas contain references.
"""

from __future__ import annotations

import json
import re

from unisono.core.frozen import dataclass
from unisono.errors import InvalidRequest, well_formed

MAX_TOOLS = 512
# Maximum nesting of schemas, and of references inside references.
MAX_DEPTH = 48
MAX_KEY = 256
MAX_ENUM = 5_000

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")

# Limits for all tools of one request together.
MAX_JSON_BYTES = 1_000_000
MAX_NODES = 10_000
MAX_CHARACTERS = 400_000


@dataclass(slots=True)
class SchemaBudget:
    """Remaining budget for all tools of one request.

    `json` is the number of bytes of ASCII JSON, `nodes` the number of visited schemas, and `characters` the number of
    characters in the rendered declarations. A schema or text is charged once for each reference to it.
    """

    json: int = MAX_JSON_BYTES
    nodes: int = MAX_NODES
    characters: int = MAX_CHARACTERS

    def spend(self, *, json: int = 0, nodes: int = 0, characters: int = 0) -> None:
        """Subtract amounts from the budget. Raises InvalidRequest if an amount exceeds what remains."""
        self.json -= json
        self.nodes -= nodes
        self.characters -= characters
        if min(self.json, self.nodes, self.characters) < 0:
            limit = (
                f"{MAX_JSON_BYTES:,} bytes of JSON"
                if self.json < 0
                else f"{MAX_NODES:,} schemas (each use of a reference counts)"
                if self.nodes < 0
                else f"{MAX_CHARACTERS:,} characters of text (each use of a reference counts)"
            )
            raise InvalidRequest(
                f"The tools of a request may have at most {limit}; declare fewer tools, or shorter ones."
            )


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """Location in a tool's schema.

    `names` are the property names and keywords on the path from the root to this location. `references` are the
    references that are being expanded.
    """

    names: tuple[str, ...] = ()
    references: tuple[str, ...] = ()

    def at(self, name: str) -> SchemaPlace:
        return SchemaPlace((*self.names, name), self.references)

    def check_depth(self) -> None:
        if max(len(self.names), len(self.references)) > MAX_DEPTH:
            raise self.refuse(f"nested more than {MAX_DEPTH} levels deep")

    def inside(self, reference: str) -> SchemaPlace:
        return SchemaPlace(self.names, (*self.references, reference))

    def refuse(self, what: str) -> InvalidRequest:
        where = ".".join(self.names)[:200] or "the root"
        return InvalidRequest(f"A tool's parameters cannot be used: {what} (at {one_line(where)}).")


def breaks_out(text: str) -> bool:
    """Return whether `text` contains a line break or another control character."""
    return _CONTROL.search(text) is not None


def one_line(text: str) -> str:
    """Return text for a `//` comment, which must not contain a line break.

    The lines of the text are joined, and invisible characters are removed.
    """
    joined = " ".join(stripped for line in text.splitlines() if (stripped := line.strip()))
    return well_formed(_INVISIBLE.sub("", joined))


def to_json(value: object) -> str:
    """Return JSON on one line.

    Raises InvalidRequest for a value that JSON cannot express, such as NaN or an object that contains itself.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as failure:
        raise InvalidRequest("A tool's parameters contain a value that JSON cannot represent; remove it.") from failure
    # JSON leaves some control characters, and the TypeScript line breaks U+2028 and U+2029, without an escape.
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", well_formed(text))
