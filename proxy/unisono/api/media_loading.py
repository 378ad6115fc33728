"""Loading of the texts that replace images and files in the history of a request.

gpt-oss reads text only. An image in the newest user message is refused, because the answer could not refer to it.
Clients send earlier images, and images in tool results, again with every later request. Refusing these images would
end the session, so each of them is replaced with one line of text. If the operator configured a vision model, this line
describes the image, and images in the newest message are replaced too. Files in all messages are replaced with their
texts. Images are described and files are read before validation, because validation does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self

from pydantic import ModelWrapValidatorHandler, ValidationInfo, model_validator
from starlette.requests import Request

from unisono.api.body import OFF_LOOP_BYTES, off_loop
from unisono.api.disconnects import until_disconnect
from unisono.api.field_types import OpenModel
from unisono.api.image_descriptions import ImageDescriber, VisionRequest
from unisono.api.input_files import ReplacedFile, replaced_files
from unisono.api.media_replacement import (
    ALL_REPLACED,
    NO_MEDIA_RULES,
    NOTHING_TO_REPLACE,
    PART_FIELDS,
    HistoryFields,
    MediaRemoval,
    MediaRules,
)
from unisono.api.model_rules import ModelRules
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.core.recovery_rules import MEDIA_LEFT_OUT
from unisono.errors import UnisonoError


async def all_read(_: Sequence[Any]) -> int:
    """Return 0 as the index of the first item that the model reads: the model reads all items."""
    return 0


class MediaHistory(OpenModel):
    """Request whose history may contain media.

    Validation replaces media in the fields that `FIELDS` names. If `KEEPS_NEWEST` is True, media in the newest user
    message are not replaced but refused, unless the validation context contains other MediaRules.
    """

    FIELDS: ClassVar[HistoryFields] = HistoryFields("messages")
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
        removal = MediaRemoval(cls.FIELDS, rules)
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
    items = source.body.get(source.kind.FIELDS.history)
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
    if isinstance(body.get(kind.FIELDS.instructions), list):
        return True
    items = body.get(kind.FIELDS.history)
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
    removal = MediaRemoval(source.kind.FIELDS, replace(ALL_REPLACED, files=files))
    return await off_loop(lambda: removal.body_without_media(source.body), source.size)


async def _media_in(source: MediaSource, begin: int = 0) -> MediaRemoval:
    """Return a MediaRemoval whose `images` and `files` are those of the body, oldest first."""
    rules = replace(ALL_REPLACED, begin=begin) if begin else ALL_REPLACED
    removal = MediaRemoval(source.kind.FIELDS, rules)
    await off_loop(lambda: removal.body_without_media(source.body), source.size)
    return removal
