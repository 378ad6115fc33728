"""Settings that `configuration_update` items change.

An item changes the reasoning effort, the output format or both, for the responses after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from unisono.api.field_types import OpenModel
from unisono.api.request_options import SpelledEffort
from unisono.api.structured_outputs import TextFormat
from unisono.core.conversation import Effort
from unisono.core.frozen import dataclass
from unisono.core.state_store import StoredItem
from unisono.errors import InvalidRequest

CONFIGURATION_UPDATE = "configuration_update"


class ConfiguredReasoning(OpenModel):
    effort: SpelledEffort = None


class ConfiguredText(OpenModel):
    format: TextFormat


# Changes to a format that cannot be enforced, tried in this order. Each key is the field that then has no effect.
_REDUCTIONS: Mapping[str, Mapping[str, None]] = {
    "": {},
    "strict": {"strict": None},
    "schema": {"strict": None, "schema_": None},
}


def enforceable(format: TextFormat, at: str) -> tuple[TextFormat, str, InvalidRequest | None]:
    """Reduce a format to what can be enforced; `at` is the path of the format.

    Returns the reduced format, the name of the field that has no effect, and the error about this field. If the whole
    format can be enforced, the name is empty and the error is None.
    """
    # Clients send an item again with every later request, and stored items remain in the conversation. An error would
    # therefore make the conversation unusable.
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
    """Settings from `configuration_update` items, which override the settings of the request.

    None means that no item has changed the setting.
    """

    effort: Effort | None = None
    form: TextFormat | None = None

    def updated(self, reasoning: ConfiguredReasoning | None, text: ConfiguredText | None) -> Configuration:
        """Return the settings after an update. Settings missing from the update do not change."""
        effort = reasoning.effort if reasoning is not None else None
        form = enforceable(text.format, "format")[0] if text is not None else self.form
        return replace(self, effort=effort or self.effort, form=form)


UNCHANGED = Configuration()


class ConfigurationUpdate(OpenModel):
    """Content of a `configuration_update` item."""

    reasoning: ConfiguredReasoning | None = None
    text: ConfiguredText | None = None


def configuration_in(items: Iterable[StoredItem], configuration: Configuration = UNCHANGED) -> Configuration:
    """Return the settings in force after `items`; `configuration` is in force before them."""
    for item in items:
        if item.wire.get("type") == CONFIGURATION_UPDATE:
            # Older versions stored these items without validation.
            with suppress(ValidationError):
                update = ConfigurationUpdate.model_validate(item.wire)
                configuration = configuration.updated(update.reasoning, update.text)
    return configuration
