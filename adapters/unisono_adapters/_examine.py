"""Former name of the module `_probe`, which can still be imported for one release."""

from __future__ import annotations

from unisono.core.renamed import renamed
from unisono_adapters import _probe


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {each: value for each, value in vars(_probe).items() if each[:1] != "_"})
