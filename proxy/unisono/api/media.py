"""Removal of images and other media from the history of a request.

gpt-oss reads text only. An image in the newest user message is refused, because the answer could not refer to it.
Clients send earlier images, and images in tool results, again with every later request. Refusing these images would
end the session, so each of them is replaced with one line of text. If the operator configured a vision model, this line
describes the image, and images in the newest message are replaced too. Files in all messages are replaced with their
texts. Images are described and files are read before validation, because validation does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Final, Protocol, Self, TypeGuard

from pydantic import ModelWrapValidatorHandler, ValidationInfo, model_validator
from starlette.requests import Request

from unisono.api.body import OFF_LOOP_BYTES, off_loop
from unisono.api.disconnects import until_disconnect
from unisono.api.field_types import MAX_MESSAGES, MAX_PARTS, OpenModel
from unisono.api.history_builder import MEDIA_PARTS
from unisono.api.image_descriptions import ImageDescriber, ImageDescription, VisionRequest
from unisono.api.input_files import SOURCES, ReplacedFile, replaced_files
from unisono.api.model_rules import ModelRules
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.core.recovery_rules import MEDIA_LEFT_OUT
from unisono.errors import UnisonoError

# Types of document sources that the model can read.
TEXT_SOURCES: Final = frozenset({"text", "content"})
# Fields of a message, a call's output or a tool result that hold parts.
PART_FIELDS: Final = ("content", "output", "outputs")

# Text in place of a removed part, for the model.
LINE: Final = "[{kind} removed here: this model reads text only.]"
DESCRIBED: Final = "[Image: {text}]"


def _never() -> bool:
    return False


async def all_read(_: Sequence[Any]) -> int:
    """Return 0 as the index of the first item that the model reads: the model reads all items."""
    return 0


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


class MediaHistory(OpenModel):
    """Request whose history may contain media.

    `HISTORY` is the name of the field with the history. `INSTRUCTIONS` is the name of a field with parts that precede
    the history, or "". Validation replaces media in both fields. If `KEEPS_NEWEST` is True, media in the newest user
    message are not replaced but refused, unless the validation context contains other MediaRules.
    """

    HISTORY: ClassVar[str] = "messages"
    INSTRUCTIONS: ClassVar[str] = ""
    KEEPS_NEWEST: ClassVar[bool] = True

    # Notes on the replaced parts, and recovery rules that were applied to the request itself. Validation stores notes
    # and rules in the instance only if there are any. Private attributes of Pydantic would cost every request 25 calls.
    media_notes: ClassVar[tuple[str, ...]] = ()
    recoveries: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _without_media(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        default = NO_MEDIA_RULES if cls.KEEPS_NEWEST else ALL_REPLACED
        rules = (info.context or {}).get("media", default)
        if rules is NOTHING_TO_REPLACE or not isinstance(value, dict):
            return handler(value)
        removal = MediaRemoval(cls.HISTORY, rules, cls.INSTRUCTIONS)
        request = handler(removal.body_without_media(value))
        if removal.notes:
            request.__dict__["media_notes"] = tuple(removal.notes)
        if removal.has_lost_media:
            request.__dict__["recoveries"] = (MEDIA_LEFT_OUT,)
        return request


class ModelWithRules(Protocol):
    """Settings of a model for any API, of which only `rules` matter here."""

    @property
    def rules(self) -> ModelRules: ...


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Body of a request whose media are to be replaced, with the caller who sent the body.

    `kind` is the class of the request, and `size` the size of the body in bytes. If `can_ask` is False, the vision
    model is not called, for example when only tokens are counted. `begin` takes the items of the history, and returns
    the index of the first item that the model reads. If the client of `request` disconnects, no more files are read.
    """

    body: Mapping[str, Any]
    caller: Caller
    kind: type[MediaHistory]
    request_id: str = ""
    size: int = 0
    can_ask: bool = True
    begin: Callable[[Sequence[Any]], Awaitable[int]] = all_read
    request: Request | None = None

    async def file_texts(self, media: MediaRemoval, reader: FileReader) -> dict[str, ReplacedFile]:
        """Return the texts that replace the file parts in `media`.

        Raises FilesBusy if too many files are waiting to be read. If the client disconnects first, stops reading and
        raises ClientGone, so that this client's files do not delay the files of other clients.
        """
        reading = replaced_files(media.files, reader, self.caller.tenant, self.size)
        return await (reading if self.request is None else until_disconnect(self.request, reading))


async def media_context(
    resolve: Callable[[str, Caller], ModelWithRules],
    source: MediaSource,
    describer: ImageDescriber | None = None,
    reader: FileReader | None = None,
) -> dict[str, MediaRules]:
    """Return Pydantic's validation context for a body, which contains its MediaRules.

    The rules contain descriptions of images and texts of files. The model is looked up only if the body has images or
    files, or if the newest user message has media that may have to be replaced. Raises FilesBusy if too many files are
    waiting to be read.
    """
    is_large = source.size > OFF_LOOP_BYTES
    args = source.body, source.kind
    if not (await asyncio.to_thread(has_parts, *args) if is_large else has_parts(*args)):
        return {"media": NOTHING_TO_REPLACE}

    def rules() -> ModelRules | None:
        name = source.body.get("model")
        try:
            return resolve(name, source.caller).rules if isinstance(name, str) else None
        except UnisonoError:
            # The lookup after the validation raises this error again.
            return None

    def strips_newest() -> bool:
        return (found := rules()) is not None and found.strips_media

    media = await _media_in(source) if describer is not None or reader is not None else None
    found = rules() if media is not None and (media.images or media.files) else None
    if media is None or found is None:
        return {"media": MediaRules(strips_newest)}
    items = source.body.get(source.kind.HISTORY)
    begin = await source.begin(items) if isinstance(items, list) else 0
    media = await _media_in(source, begin) if begin else media
    context = MediaRules(strips_newest, begin)
    if describer is not None and found.vision_model is not None and media.images:
        vision = VisionRequest(
            found.vision_model, source.caller, source.request_id, source.size, can_ask=source.can_ask
        )
        context = replace(context, descriptions=await describer.describe(media.images, vision))
    if reader is not None and media.files:
        context = replace(context, files=await source.file_texts(media, reader))
    return {"media": context}


def has_parts(body: Mapping[str, Any], kind: type[MediaHistory]) -> bool:
    """Return True if a body has lists of content parts. Most Chat requests have only strings."""
    if isinstance(body.get(kind.INSTRUCTIONS), list):
        return True
    items = body.get(kind.HISTORY)
    if not isinstance(items, list):
        return False
    for item in items:
        if isinstance(item, dict):
            for field in item.keys() & PART_FIELDS:
                if isinstance(item[field], list):
                    return True
    return False


async def file_context(source: MediaSource, reader: FileReader | None) -> dict[str, MediaRules]:
    """Return Pydantic's validation context for a body that names no model.

    The context contains the texts of files, but no descriptions of images. Raises FilesBusy if too many files are
    waiting to be read.
    """
    if reader is None:
        return {}
    media = await _media_in(source)
    files = await source.file_texts(media, reader) if media.files else {}
    return {"media": replace(ALL_REPLACED, files=files)}


async def with_file_texts(source: MediaSource, reader: FileReader | None) -> Mapping[str, Any]:
    """Return the body with texts instead of files, for the hooks of a pass-through request.

    If there are no files or no reader, returns the body itself. Raises FilesBusy if too many files are waiting to be
    read.
    """
    media = None if reader is None else await _media_in(source)
    if reader is None or media is None or not media.files:
        return source.body
    files = await source.file_texts(media, reader)
    removal = MediaRemoval(source.kind.HISTORY, replace(ALL_REPLACED, files=files), source.kind.INSTRUCTIONS)
    return await off_loop(lambda: removal.body_without_media(source.body), source.size)


async def _media_in(source: MediaSource, begin: int = 0) -> MediaRemoval:
    """Return a MediaRemoval whose `images` and `files` are those of the body, oldest first."""
    rules = replace(ALL_REPLACED, begin=begin) if begin else ALL_REPLACED
    removal = MediaRemoval(source.kind.HISTORY, rules, source.kind.INSTRUCTIONS)
    await off_loop(lambda: removal.body_without_media(source.body), source.size)
    return removal


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
    # - Lists and objects are copied only where something is removed.

    def __init__(self, path: str, rules: MediaRules, instructions: str = "") -> None:
        self._path = path
        self._instructions = instructions
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
                        without = self._parts(parts, f"{self._path}.{index}.{field}", keeps=index == newest)
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
