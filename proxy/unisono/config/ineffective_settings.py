"""LiteLLM's keys that have no effect in Unisono, and how each key is treated.

`ineffective_settings.yaml` lists these keys by exact name. It does not list the keys that Unisono supports, which are
the fields of the sections. A key that is neither supported nor listed is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml


class KeyClass(Enum):
    """Treatment, at startup, of a key that has no effect."""

    PROTECTIVE = "protective"  # the gateway does not start until the operator acknowledges the key
    NOTED = "noted"  # the key has a warning of its own
    COSMETIC = "cosmetic"  # one warning lists all such keys


LITELLM = "this LiteLLM setting has no effect in Unisono"
LATER = "this setting is reserved and has no effect in this version"
FRAGMENT = "this key has no effect itself; it may only contain YAML anchors"
KEYS_FILE = Path(__file__).with_name("ineffective_settings.yaml")

# Values of a protective key with which the key does not protect anything.
NEUTRAL: Final[tuple[object, ...]] = (None, False, "", [], {})
# Keys that protect if their value is `false`.
PROTECTIVE_IF_FALSE = frozenset({"available_on_public_internet"})

# Keys of LiteLLM that contain lists of callbacks, and the callbacks that check requests or answers.
CALLBACK_LISTS = ("callbacks", "success_callback", "failure_callback", "input_callback")
PROTECTIVE_CALLBACKS = frozenset(
    (
        *("aim", "aporia", "aporia_prompt_injection", "azure_content_safety", "banned_keywords", "bedrock_guardrails"),
        *("blocked_user_check", "detect_prompt_injection", "dynamic_rate_limiter", "dynamic_rate_limiter_v3"),
        *("google_text_moderation", "guardrails_ai", "hide_secrets", "lakera", "lakera_prompt_injection"),
        *("litellm_content_filter", "llamaguard_moderations", "llmguard_moderations", "max_budget_limiter"),
        *("openai_moderations", "presidio"),
    )
)

STRATEGIES = (
    "usage-based-routing usage-based-routing-v2 latency-based-routing cost-based-routing provider-budget-routing lar1"
)
FOREIGN_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("router_settings", "routing_strategy"): dict.fromkeys(
        STRATEGIES.split(), "is a LiteLLM strategy; `prefix-aware` is used instead"
    )
}
"""Values of LiteLLM for which the default is used, each with a warning, by section and key."""


UNSERVED = (
    "image_edit",
    *("batch", "realtime", "video_generation", "ocr", "search", "vector_store"),
)
"""Values of `model_info.mode` that Unisono does not support."""

# Keys that are reserved for later versions of Unisono, by section.
RESERVED: Mapping[str, tuple[str, ...]] = {"unisono": ("trust_proxy_headers",)}


@cache
def _listed() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    listed: dict[str, Any] = yaml.load(KEYS_FILE.read_text("utf-8"), Loader=loader)  # noqa: S506 - a SafeLoader
    return listed


@cache
def keys_of(section: str) -> Mapping[str, KeyClass]:
    """Return the listed keys of a section; `section` is a path with `[]` instead of indices."""
    classes: dict[str, str] = _listed()["keys"].get(section, {})
    return {name: KeyClass(kind) for kind, names in classes.items() for name in names.split()}


@cache
def _router_only() -> frozenset[str]:
    return frozenset(_listed()["router_only"].split())


def is_passed_to_litellm(key: str) -> bool:
    """Return whether `key`, in an entry that litellm serves, is passed to litellm."""
    return key not in _router_only()


def default_reason(section: str, key: str, value: object) -> str | None:
    """Return the reason why the default is used instead of `value`; None if `value` is used."""
    return FOREIGN_VALUES.get((section, key), {}).get(value) if isinstance(value, str) else None


def class_of(section: str, key: str, value: object) -> KeyClass | None:
    """Return how a key without effect is treated; None if the key is not listed."""
    found = keys_of(section).get(key)
    if key in CALLBACK_LISTS and any(_may_protect(name) for name in _names(value)):
        return KeyClass.PROTECTIVE
    is_neutral = value is not False if key in PROTECTIVE_IF_FALSE else value in NEUTRAL
    return KeyClass.COSMETIC if found is KeyClass.PROTECTIVE and is_neutral else found


def other_reason(section: str, key: str) -> str | None:
    """Return the reason why a key that is not one of LiteLLM's has no effect.

    Returns None if the key is unknown.
    """
    if key in RESERVED.get(section, ()):
        return LATER
    return FRAGMENT if not section and key.startswith(("x-", ".")) else None


def _may_protect(callback: str) -> bool:
    """Return whether a callback may check requests or answers, as the operator's own code may."""
    return callback in PROTECTIVE_CALLBACKS or "." in callback


def _names(value: object) -> set[str]:
    return {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)}


def acknowledged_of(tree: object) -> list[str]:
    """Return `unisono.acknowledge` of a file that is not validated yet."""
    section = tree.get("unisono") if isinstance(tree, Mapping) else None
    names = section.get("acknowledge") if isinstance(section, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def check_protective(
    protective: Iterable[tuple[str, str]], acknowledged: Sequence[str], *, keeps: bool
) -> tuple[list[str], list[str]]:
    """Return warnings, and an error for each protective setting that is not acknowledged.

    `protective` has two paths for each setting: one with list indices, for messages, and one without. If `keeps` is
    True, warnings are returned instead of errors.
    """
    warnings: list[str] = []
    errors: list[str] = []
    unused = dict.fromkeys(acknowledged)
    for path, general in protective:
        names = [name for name in acknowledged if _covers(name, general)]
        for name in names:
            unused.pop(name, None)
        if names:
            warnings.append(f"{path}: not supported, as acknowledged in `unisono.acknowledge`")
            continue
        message = (
            f"{path}: this LiteLLM setting protects the gateway, and Unisono does not support it; replace it, or "
            f"add `{general.rpartition('.')[2]}` to `unisono.acknowledge` to serve without this protection"
        )
        (warnings if keeps else errors).append(message)
    warnings += (f"unisono.acknowledge: `{name}` matches no protective setting; remove it" for name in unused)
    return warnings, errors


def _covers(acknowledged: str, general: str) -> bool:
    """Return whether an entry of `unisono.acknowledge` covers the setting `general`."""
    covers_all = acknowledged == "guardrails" and general.startswith("guardrails.")
    return covers_all or f".{general}".endswith(f".{acknowledged}")
