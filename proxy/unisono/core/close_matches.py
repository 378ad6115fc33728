"""Suggestions of similar names for errors."""

from __future__ import annotations

from collections.abc import Sequence


def close_matches(name: str, names: Sequence[str], *, min_similarity: float = 0.6) -> list[str]:
    """Return up to three of `names` that are similar to `name`, the most similar first.

    `min_similarity` is between 0 and 1, where 1 requires equal names.
    """
    # Imported for the first unknown name only; most processes never see one.
    from difflib import get_close_matches

    return get_close_matches(name, names, cutoff=min_similarity)
