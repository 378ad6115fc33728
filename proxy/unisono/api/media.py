"""Removal of images and other media from the history of a request.

gpt-oss reads text only. An image in the newest user message is refused, because the answer could not refer to it.
Images before it, and images in tool results, come from programs that send their whole history again: a refusal would
fail every later request of the session. Each of them is replaced by one line of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, ValidationInfo, model_validator

from unisono.api.content_parts import MEDIA_PARTS
from unisono.api.field_types import OpenModel
from unisono.api.model_rules import ModelRules
from unisono.core.access import Caller
from unisono.core.recovery_rules import MEDIA_LEFT_OUT
from unisono.errors import UnisonoError

# Sources of a document that the model can read.
TEXT_SOURCES: Final = frozenset({"text", "content"})
# Fields of a message, a call's output or a tool result that hold parts.
PART_FIELDS: Final = ("content", "output")

# Text in place of a removed part, for the model.
LINE: Final = "[{kind} removed here: this model reads text only.]"


class MediaHistory(OpenModel):
    """Request whose history may contain media.

    `HISTORY` is the field with the history. Validation removes media from it, except from the newest user message if
    it `KEEPS_NEWEST`.
    """

    HISTORY: ClassVar[str] = "messages"
    KEEPS_NEWEST: ClassVar[bool] = True

    _removed: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _without_media(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        items = value.get(cls.HISTORY) if isinstance(value, dict) else None
        if not isinstance(items, list):
            return handler(value)
        removal = MediaRemoval(cls.HISTORY, (info.context or {}).get("strips_newest", lambda: not cls.KEEPS_NEWEST))
        remaining = removal.without_media(items)
        request = handler({**value, cls.HISTORY: remaining} if removal.notes else value)
        request._removed = tuple(removal.notes)
        return request

    @property
    def media_notes(self) -> tuple[str, ...]:
        """Notes on the removed parts, with their positions."""
        return self._removed

    @property
    def recoveries(self) -> tuple[str, ...]:
        """Recovery rules that were applied to the request itself."""
        return (MEDIA_LEFT_OUT,) if self._removed else ()


class ModelWithRules(Protocol):
    """Settings of a model on any API surface."""

    @property
    def rules(self) -> ModelRules: ...


def media_context(
    resolve: Callable[[str, Caller], ModelWithRules], body: Mapping[str, Any], caller: Caller
) -> dict[str, Callable[[], bool]]:
    """Return the validation context for `body`, with the rule of its model.

    The model is looked up only if the newest user message has media, which the rule may strip.
    """

    def strips_newest() -> bool:
        name = body.get("model")
        try:
            return isinstance(name, str) and resolve(name, caller).rules.strips_media
        except UnisonoError:
            # The lookup after the validation raises this error again.
            return False

    return {"strips_newest": strips_newest}


class MediaRemoval:
    """Removal of media from the items of one history; `notes` name what was removed."""

    # Rules.
    # - The newest user message keeps its media, so that validation refuses them. Results of tools in it lose theirs.
    # - Lists and objects are copied only where something is removed.

    def __init__(self, path: str, strips_newest: Callable[[], bool]) -> None:
        self._path = path
        self._strips_newest = strips_newest
        self.notes: list[str] = []

    def without_media(self, items: Sequence[Any]) -> list[Any]:
        """Return the items without their media."""
        newest = next((index for index in range(len(items) - 1, -1, -1) if _is_user_message(items[index])), -1)
        remaining = []
        for index, item in enumerate(items):
            if isinstance(item, dict):
                for field in PART_FIELDS:
                    if isinstance(parts := item.get(field), list):
                        without = self._parts(parts, f"{self._path}.{index}.{field}", keeps=index == newest)
                        item = item if without is parts else {**item, field: without}
            remaining.append(item)
        return remaining

    def _parts(self, parts: list[Any], path: str, *, keeps: bool) -> list[Any]:
        remaining = [self._part(part, f"{path}.{index}", keeps=keeps) for index, part in enumerate(parts)]
        return remaining if any(new is not old for new, old in zip(remaining, parts, strict=True)) else parts

    def _part(self, part: Any, path: str, *, keeps: bool) -> Any:
        if not isinstance(part, dict):
            return part
        if part.get("type") == "tool_result" and isinstance(inner := part.get("content"), list):
            without = self._parts(inner, f"{path}.content", keeps=False)
            return part if without is inner else {**part, "content": without}
        source = part.get("source")
        if part.get("type") == "document" and isinstance(source, dict) and source.get("type") in TEXT_SOURCES:
            inner = source.get("content")
            if not isinstance(inner, list):
                return part
            without = self._parts(inner, f"{path}.source.content", keeps=keeps)
            return part if without is inner else {**part, "source": {**source, "content": without}}
        kind = MEDIA_PARTS.get(str(part.get("type")))
        if kind is None or (keeps and not self._strips_newest()):
            return part
        self.notes.append(f"{path}: replaced by a line of text, because the model does not support {kind} input")
        return {"type": "text", "text": LINE.format(kind=kind.capitalize())}


def _is_user_message(item: Any) -> bool:
    """Return whether an item is a message of the user and not only the results of tools."""
    if not isinstance(item, dict) or item.get("role") != "user":
        return False
    parts = item.get("content")
    if not isinstance(parts, list) or not parts:
        return True
    return any(not isinstance(part, dict) or part.get("type") != "tool_result" for part in parts)
