"""Settings of a deployment without secrets, for responses and audit records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from unisono.config.stored_entry import without_answer_keys
from unisono.observe.redaction import secrets_in

# Pattern in the names of keys whose values are secret and never returned.
_SECRET: Final = re.compile(r"key|secret|(?<!per_)token$|password|credential|header|auth|cookie", re.IGNORECASE)


def visible_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a deployment without secrets, for responses and audit records."""
    return {
        key: visible_settings(value) if isinstance(value, Mapping) else _without_password(value)
        for key, value in without_answer_keys(settings).items()
        if not _SECRET.search(key) or key == "litellm_credential_name"
    }


def _without_password(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [visible_settings(each) if isinstance(each, Mapping) else _without_password(each) for each in value]
    if isinstance(value, str) and "://" in value:
        for secret in sorted(secrets_in(value), key=len, reverse=True):
            value = value.replace(secret, "***")
    return value
