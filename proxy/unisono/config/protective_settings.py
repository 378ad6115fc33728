"""LiteLLM settings that protect a gateway and have no effect in Unisono.

The gateway does not start with such a setting until the operator lists the setting in `unisono.acknowledge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


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
