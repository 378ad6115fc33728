"""Tag-based routing: the deployments of a model that a request may use, as in LiteLLM."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, TypeVar

from unisono.core.frozen import dataclass

# Deployments with this tag answer requests without tags, and requests whose tags no deployment of the model has.
DEFAULT_TAG: Final = "default"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TagRules:
    """Rules of tag-based routing.

    With `match_any`, a deployment must have at least one of the requested tags. Otherwise, a deployment must have all
    of them.
    """

    match_any: bool = True

    def select(self, deployments: Sequence[tuple[T, Collection[str]]], requested: Sequence[str]) -> list[T]:
        """Return the deployments that a request may use; empty if none has the requested tags.

        `deployments` are pairs of a deployment and its tags. In `requested`, `&tag` is a tag that a deployment must
        have, and `!tag` is a tag that a deployment must not have.
        """
        required = {tag[1:] for tag in requested if len(tag) > 1 and tag[0] == "&"}
        excluded = {tag[1:] for tag in requested if len(tag) > 1 and tag[0] == "!"}
        wanted = {tag for tag in requested if tag[0] not in "&!"}
        fitting = [(one, tags) for one, tags in deployments if required <= {*tags} and excluded.isdisjoint(tags)]
        if wanted:
            matches = [one for one, tags in fitting if self._matches(wanted, tags)]
            # If a requested tag is known but selects no deployment, the default deployments must not be used instead.
            is_known = any(not wanted.isdisjoint(tags) for _, tags in deployments)
            return matches if matches or is_known else [one for one, tags in fitting if DEFAULT_TAG in tags]
        if required:
            return [one for one, _ in fitting]
        defaults = [(one, tags) for one, tags in deployments if DEFAULT_TAG in tags] or deployments
        return [one for one, tags in defaults if excluded.isdisjoint(tags)]

    def _matches(self, wanted: set[str], tags: Collection[str]) -> bool:
        return not wanted.isdisjoint(tags) if self.match_any else wanted <= {*tags}
