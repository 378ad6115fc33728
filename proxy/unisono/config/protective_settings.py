"""Unsupported LiteLLM settings that protect a gateway, and `unisono.acknowledge`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def acknowledged_of(tree: object) -> list[str]:
    """Return `unisono.acknowledge` of a file."""
    section = tree.get("unisono") if isinstance(tree, Mapping) else None
    names = section.get("acknowledge") if isinstance(section, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def check_protective(
    protective: Iterable[tuple[str, str]], acknowledged: Sequence[str], *, keeps: bool
) -> tuple[list[str], list[str]]:
    """Return warnings and errors: an error for each protective setting that is not acknowledged.

    `protective` has the path of each setting, with and without list indices. With `keeps`, all errors become warnings.
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
            f"add `{general.rpartition('.')[2]}` to `unisono.acknowledge` to serve without it"
        )
        (warnings if keeps else errors).append(message)
    warnings += (f"unisono.acknowledge: `{name}` matches no protective setting; remove it" for name in unused)
    return warnings, errors


def _covers(acknowledged: str, general: str) -> bool:
    """Return whether an entry of `unisono.acknowledge` is about a protective key."""
    covers_all = acknowledged == "guardrails" and general.startswith("guardrails.")
    return covers_all or f".{general}".endswith(f".{acknowledged}")
