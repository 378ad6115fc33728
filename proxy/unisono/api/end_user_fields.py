"""Request fields that name the end user. The end user's limits then apply to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import HTTPConnection

from unisono.api.caller_options import NO_RULES, RULES, RequestRules, state_of
from unisono.core.trace_context import IDENTITY, identify
from unisono.errors import InvalidRequest

# Key of the end user in the request's state.
END_USER: Final = "end_user"


async def identify_end_user(connection: HTTPConnection, body: Mapping[str, Any], *user_fields: str) -> None:
    """Restrict the caller in the request's state to the limits and models of the end user.

    The first of `user_fields` that has a value names the end user. A field may be a path such as `metadata.user_id`.
    Raises InvalidRequest if the value is neither a string nor an integer, or if all fields are empty and the operator
    requires an end user. Also raises the errors of `RequestRules.apply_end_user`.
    """
    state = state_of(connection)
    rules: RequestRules = state.get(RULES, NO_RULES)
    user = ""
    for name in user_fields:
        value = _value_at(body, name) if "." in name else body.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise InvalidRequest(f"Invalid value for '{name}': must be a string.", param=name)
        user = state[END_USER] = str(value)
        break
    if IDENTITY.get().user != user:
        identify(user=user)
    if user and rules.apply_end_user is not None:
        state["caller"] = await rules.apply_end_user(state["caller"], user, name)
    if not user and rules.needs_user:
        first = user_fields[0]
        raise InvalidRequest(
            f"'{first}' is missing: set it to the id of the end user, which this gateway requires.", param=first
        )


def _value_at(body: Mapping[str, Any], field: str) -> Any:
    """Return the value at a path such as `metadata.user_id`; None if there is no value."""
    value: Any = body
    for step in field.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value
