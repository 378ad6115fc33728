"""Schemathesis hooks: existing models and valid ids in generated requests.

Made-up models and ids would be rejected early, and the code after that check would not be tested.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL = "scripted"
# Prefixes of ids that the gateway issues.
GATEWAY_ID_PREFIXES = ("resp_", "conv_")


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
        if isinstance(body.get(name), str) and not body[name].startswith(GATEWAY_ID_PREFIXES):
            del body[name]
    if "messages" not in body and not body.get("input"):
        body["input"] = "Hi"
    if not body.get("tools"):
        # A tool choice is invalid without tools.
        body.pop("tool_choice", None)
        body.pop("function_call", None)
