"""Replacement of media in the history of a request by lines of text.

`api.media_loading` explains the reasons. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, TypeGuard

from unisono.api.content_parts import MEDIA_PARTS
from unisono.api.field_types import MAX_MESSAGES, MAX_PARTS
from unisono.api.image_descriptions import ImageDescription
from unisono.api.input_files import SOURCES, ReplacedFile
from unisono.core.frozen import dataclass

# Types of document sources that the model can read.
TEXT_SOURCES: Final = frozenset({"text", "content"})
# Fields of a message, a call's output or a tool result that hold parts.
PART_FIELDS: Final = ("content", "output", "outputs")

# Text in place of a removed part, for the model.
LINE: Final = "[{kind} removed here: this model reads text only.]"
DESCRIBED: Final = "[Image: {text}]"


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Treatment of the media in one request.

    `strips_newest` returns True if media in the newest user message are replaced instead of refused. `descriptions`
    contains the descriptions of images, and `files` the texts of files. The keys of both are the paths of the parts in
    the request. `begin` is the index of the first item that the model reads. A compaction replaces the items before
    this one, so their media cause no notes.
    """

    strips_newest: Callable[[], bool] = _never
    begin: int = 0
    descriptions: Mapping[str, ImageDescription] = field(default_factory=dict)
    files: Mapping[str, ReplacedFile] = field(default_factory=dict)


NO_MEDIA_RULES: Final = MediaRules()
ALL_REPLACED: Final = MediaRules(lambda: True)
# Rules for a body whose contents are known to be plain texts.
NOTHING_TO_REPLACE: Final = MediaRules()


@dataclass(frozen=True, slots=True)
class HistoryFields:
    """Fields of a request that may contain media.

    `history` is the name of the field with the messages or items. `instructions` is the name of a field with parts that
    precede the history, or "". If `merges` is True, clients of this API may send several user messages as a single
    message.
    """

    history: str
    instructions: str = ""
    merges: bool = False


class MediaRemoval:
    """Replacement of media in the items of one history, and in the `instructions` before it.

    `notes` tell the client which parts were replaced. `images` and `files` are the replaced parts, by their paths in
    the request. `has_lost_media` is True if an image was replaced without a description, or a file without its text.
    """

    # Rules.
    # - The newest user message keeps its media, so that validation refuses them. Tool results in this message do not
    #   keep their media.
    # - A tool message in Chat Completions can hold only text. Programs therefore send the media of a tool in the user
    #   message after the tool message. Such a user message does not keep its media.
    # - In Messages, the newest user message does not keep its media if it may consist of a refused message and a later
    #   one. Otherwise, a session could not continue after a refused image.
    # - Lists and objects are copied only where something is removed.

    def __init__(self, fields: HistoryFields, rules: MediaRules) -> None:
        self._path = fields.history
        self._instructions = fields.instructions
        self._merges = fields.merges
        self._is_read = True  # the model reads the current item
        self._rules = rules
        self.notes: list[str] = []
        self.images: dict[str, Mapping[str, Any]] = {}
        self.files: dict[str, Mapping[str, Any]] = {}
        self.has_lost_media = False

    def body_without_media(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of a request without the media in it."""
        changed: dict[str, Any] = {}
        if isinstance(parts := body.get(self._instructions), list):
            changed[self._instructions] = self._parts(parts, self._instructions, keeps=False)
        if isinstance(items := body.get(self._path), list):
            changed[self._path] = self._items(items)
        return {**body, **changed} if any(value is not body[name] for name, value in changed.items()) else body

    def _items(self, items: list[Any]) -> list[Any]:
        # Validation refuses longer lists, so a search for media in them would be wasted time.
        if len(items) > MAX_MESSAGES:
            return items
        newest = next((index for index in range(len(items) - 1, -1, -1) if _is_user_message(items[index])), -1)
        if newest > 0 and _is_tool_message(items[newest - 1]):
            newest = -1
        remaining = []
        for index, item in enumerate(items):
            if isinstance(item, dict):
                # A compaction does not replace instructions.
                self._is_read = index >= self._rules.begin or item.get("role") in ("system", "developer")
                for field in PART_FIELDS:
                    if isinstance(parts := item.get(field), list):
                        keeps = index == newest and not (self._merges and _may_be_merged(parts))
                        without = self._parts(parts, f"{self._path}.{index}.{field}", keeps=keeps)
                        item = item if without is parts else {**item, field: without}
            remaining.append(item)
        return _same_if_unchanged(remaining, items)

    def _parts(self, parts: list[Any], path: str, *, keeps: bool) -> list[Any]:
        if len(parts) > MAX_PARTS:
            return parts
        remaining = [self._part(part, f"{path}.{index}", keeps=keeps) for index, part in enumerate(parts)]
        for index, part in enumerate(remaining):
            # The parts of a message are joined without a separator, except in Messages.
            if part is not parts[index] and f"{path}.{index}" in self._rules.files and "source" not in parts[index]:
                remaining[index] = _on_own_lines(part, is_first=index == 0, is_last=index == len(parts) - 1)
        return _same_if_unchanged(remaining, parts)

    def _part(self, part: Any, path: str, *, keeps: bool) -> Any:
        if not isinstance(part, dict):
            return part
        name = str(part.get("type"))
        source = part.get("source")
        if name == "document" and isinstance(source, dict) and str(source.get("type")) in TEXT_SOURCES:
            return self._within(part, "source", path, keeps=keeps)
        kind = MEDIA_PARTS.get(name)
        if kind is None:
            # Results of tools contain parts, or one object with parts.
            return self._within(part, "content", path, keeps=keeps and not name.endswith("tool_result"))
        file = self._rules.files.get(path)
        is_refused = keeps and (file is None or not file.text) and not self._rules.strips_newest()
        if is_refused and file is not None:
            raise file.error()
        if is_refused:
            return part
        if self._is_read and kind == "image":
            self.images[path] = part
        elif self._is_read and kind == "file" and _can_be_read(part):
            self.files[path] = part
        # Among the outputs of code, text is in a part of type `logs`.
        text = "logs" if path.rpartition(".")[0].endswith(".outputs") else "text"
        if file is not None and file.text:
            self.notes += [f"{path}: {file.note}"] if file.note else []
            return {"type": text, text: file.text}
        about = [part.get(key) for key in ("title", "context")] if name == "document" else []
        return {"type": text, text: "\n".join([*filter(_is_text, about), self._line(kind, path)])}

    def _within(self, part: dict[str, Any], field: str, path: str, *, keeps: bool) -> dict[str, Any]:
        """Return `part` without the media in its field `field`; `part` itself if nothing changes.

        `path` is the path of the part. `keeps` is True in the newest user message, whose media are refused by default.
        """
        inner, at = part.get(field), f"{path}.{field}"
        without = self._parts(inner, at, keeps=keeps) if isinstance(inner, list) else self._part(inner, at, keeps=keeps)
        return part if without is inner else {**part, field: without}

    def _line(self, kind: str, path: str) -> str:
        if not self._is_read:
            return LINE.format(kind=kind.capitalize())
        description = self._rules.descriptions.get(path)
        if description is not None and description.text:
            self.notes.append(f"{path}: replaced by a description, because the model does not support {kind} input")
            return DESCRIBED.format(text=description.text)
        self.has_lost_media = True
        reason = f"the model does not support {kind} input"
        if (file := self._rules.files.get(path)) is not None:
            reason = file.problem
        elif description is not None:
            reason = f"{reason}; {description.problem}"
        self.notes.append(f"{path}: replaced by a line of text, because {reason}")
        return LINE.format(kind=kind.capitalize())


def _on_own_lines(part: dict[str, Any], *, is_first: bool, is_last: bool) -> dict[str, Any]:
    """Return a text part with line breaks before and after its text.

    The first part gets none before its text, and the last part none after its text.
    """
    name = part["type"]
    return {**part, name: "\n" * (not is_first) + part[name] + "\n" * (not is_last)}


def _can_be_read(part: Mapping[str, Any]) -> bool:
    """Return whether a file part has the fields of a file. Validation refuses other file parts."""
    source = part.get("source")
    if part.get("type") == "document":
        return isinstance(source, dict) and str(source.get("type")) in SOURCES
    return source is None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value)


def _same_if_unchanged(new: list[Any], old: list[Any]) -> list[Any]:
    return new if any(one is not other for one, other in zip(new, old, strict=True)) else old


def _is_user_message(item: Any) -> bool:
    """Return whether an item is a user message that does not consist only of tool results."""
    if not isinstance(item, dict) or item.get("role") != "user":
        return False
    parts = item.get("content")
    if not isinstance(parts, list) or not parts:
        return True
    return any(not isinstance(part, dict) or part.get("type") != "tool_result" for part in parts)


def _is_tool_message(item: Any) -> bool:
    """Return whether an item is a Chat Completions message with the result of a tool."""
    return isinstance(item, dict) and item.get("role") in ("tool", "function")


def _may_be_merged(parts: Sequence[Any]) -> bool:
    """Return whether a user message may consist of a message with media and a later message.

    This is possible if the message has several texts, and a text follows the last image or file.
    """
    types = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    last = max((index for index, kind in enumerate(types) if kind in MEDIA_PARTS), default=len(types))
    return "text" in types[last + 1 :] and types.count("text") > 1
