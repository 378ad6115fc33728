"""The section about hooks: which are asked, in which order, and what becomes of turns when one fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue

from unisono.config.section import Name, Seconds, Section


class HookSettings(Section):
    """One entry of `unisono.hooks`: a name, or `{name: {options}}`."""

    name: Name
    """Its entry point's name."""
    timeout_s: Seconds = 5.0
    """How long it may take each time it is asked, in seconds."""
    fail: Literal["closed", "open"] = "closed"
    """What becomes of a turn when it fails or takes longer: `closed` ends it with an error, `open` goes on without."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """What is the hook's own."""


OURS = frozenset({"timeout_s", "fail"})


def _to_hook(value: Any) -> Any:
    """The short forms as what they stand for."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, HookSettings):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError("must be the name of a hook, or {name: {its options}}")
    [(name, options)] = value.items()
    given = {} if options is None else options
    if not isinstance(given, Mapping):
        raise ValueError("the options of a hook are a mapping")  # noqa: TRY004 - what pydantic understands
    ours = {key: option for key, option in given.items() if key in OURS}
    return {"name": name, **ours, "options": {key: option for key, option in given.items() if key not in OURS}}


HookEntry: TypeAlias = Annotated[HookSettings, BeforeValidator(_to_hook)]
