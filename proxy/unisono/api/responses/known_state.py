"""State before the input of a request: history, and settings that items changed.

An item of the input can change the effort and the format for the responses after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from unisono.api.field_types import OpenModel
from unisono.api.request_options import SpelledEffort
from unisono.api.response_format import TextFormat
from unisono.api.responses.server_tools.approval_history import NOTHING_HOSTED, ServerToolHistory
from unisono.core.conversation import Effort, Item
from unisono.core.frozen import dataclass
from unisono.core.state_store import StoredItem
from unisono.errors import InvalidRequest

CONFIGURATION_UPDATE = "configuration_update"


class ConfiguredReasoning(OpenModel):
    effort: SpelledEffort = None


class ConfiguredText(OpenModel):
    format: TextFormat


# Fields to remove from a format that cannot be enforced, tried in this order. The key is the field without effect.
_REDUCTIONS: Mapping[str, Mapping[str, None]] = {
    "": {},
    "strict": {"strict": None},
    "schema": {"strict": None, "schema_": None},
}


def enforceable(format: TextFormat, at: str) -> tuple[TextFormat, str, InvalidRequest | None]:
    """Reduce a format to what can be enforced; `at` is its path.

    Returns the format, the field that has no effect, and the error about it. If all of the format can be enforced, the
    field is empty and the error None.
    """
    # Items return with every later request, and stored ones stay. A refusal would end the conversation for good.
    refusal: InvalidRequest | None = None
    for without, update in _REDUCTIONS.items():
        reduced = format.model_copy(update=update)
        try:
            reduced.to_answer_form(at)
        except InvalidRequest as error:
            refusal = error
        else:
            return reduced, without, refusal
    raise AssertionError("a format without a schema can always be enforced")


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings that items changed; they replace those of the request. None: not changed."""

    effort: Effort | None = None
    form: TextFormat | None = None

    def updated(self, reasoning: ConfiguredReasoning | None, text: ConfiguredText | None) -> Configuration:
        """Return the settings after an update; settings that it does not contain stay the same."""
        effort = reasoning.effort if reasoning is not None else None
        form = enforceable(text.format, "format")[0] if text is not None else self.form
        return replace(self, effort=effort or self.effort, form=form)


UNCHANGED = Configuration()


class ConfigurationUpdate(OpenModel):
    """Content of a `configuration_update` item."""

    reasoning: ConfiguredReasoning | None = None
    text: ConfiguredText | None = None


def configuration_in(items: Iterable[StoredItem], configuration: Configuration = UNCHANGED) -> Configuration:
    """Return the settings after stored items. `configuration` has the settings before them."""
    for item in items:
        if item.wire.get("type") == CONFIGURATION_UPDATE:
            # Older versions stored these items without validation.
            with suppress(ValidationError):
                update = ConfigurationUpdate.model_validate(item.wire)
                configuration = configuration.updated(update.reasoning, update.text)
    return configuration


def nothing_stored(_: str) -> None:
    """Return None: the item is neither stored nor sealed here."""


@dataclass(frozen=True, slots=True)
class KnownState:
    """State that a request depends on, read beforehand.

    `earlier` holds the history before the request's input. `stored_item` finds a stored item by its id, and `opened`
    opens a sealed text. `hosted` is the server tool history of earlier items. `now` is the server tool history of the
    request's own items, if they were added to the conversation beforehand. `configuration` has the settings that
    earlier items changed.
    """

    earlier: Sequence[Item] = ()
    stored_item: Callable[[str], StoredItem | None] = nothing_stored
    opened: Callable[[str], Sequence[Item] | None] = nothing_stored
    hosted: ServerToolHistory = NOTHING_HOSTED
    now: ServerToolHistory = NOTHING_HOSTED
    configuration: Configuration = UNCHANGED
