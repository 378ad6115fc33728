"""Section of hooks: names, order, and behaviour on failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue

from unisono.config.section import Name, Seconds, Section


class HookSettings(Section):
    """One entry of `unisono.hooks`: a name, or `{name: {options}}`."""

    name: Name
    """Name of the hook's entry point."""
    timeout_s: Seconds = 5.0
    """Limit for each call of the hook, in seconds."""
    fail: Literal["closed", "open"] = "closed"
    """Behaviour when the hook fails or exceeds its limit.
    `closed` ends the generation with an error, `open` continues without the hook."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the hook itself."""


# Options that the gateway reads itself. All others belong to the hook.
OURS = frozenset({"timeout_s", "fail"})


def _to_hook(value: Any) -> Any:
    """Expand the short forms of an entry."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, HookSettings):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError("must be the name of a hook, or `{name: {options}}`")
    [(name, options)] = value.items()
    # In YAML, `- name:` without options has the value null.
    values = {} if options is None else options
    if not isinstance(values, Mapping):
        raise ValueError("the options of a hook must be a mapping")  # noqa: TRY004 - pydantic expects ValueError
    own_options = {key: option for key, option in values.items() if key in OURS}
    return {"name": name, **own_options, "options": {key: option for key, option in values.items() if key not in OURS}}


HookEntry: TypeAlias = Annotated[HookSettings, BeforeValidator(_to_hook)]
