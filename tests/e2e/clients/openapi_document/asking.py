"""How schemathesis is to ask: of a model there is, and with ids there are. What it makes up would be refused at the
door, and nothing behind it would be looked at."""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL = "scripted"
OURS = ("resp_", "conv_")
"""How ids begin that the gateway gave."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    body = case.body
    if not isinstance(body, dict) or "model" not in body:
        return
    if isinstance(body["model"], str):
        body["model"] = MODEL
    if case.meta is None or case.meta.generation.mode.is_negative:
        return
    for name in ("previous_response_id", "conversation"):
        if isinstance(body.get(name), str) and not body[name].startswith(OURS):
            del body[name]
    if "messages" not in body and not body.get("input"):
        body["input"] = "Hi"
    if not body.get("tools"):
        # Nothing can be chosen where there is nothing.
        body.pop("tool_choice", None)
        body.pop("function_call", None)
