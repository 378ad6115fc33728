"""Files in requests: reading the file parts of each API, and replacing the parts with text.

A file becomes its name and its text, between two lines with a code that does not occur in the text. The same file
becomes the same text in every request and every process.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from hashlib import sha256
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, unquote_to_bytes

from unisono.api.body import MAX_RUN, has_piece_of_length, off_loop
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileField, FileReader, FileText, InputFile
from unisono.errors import InvalidRequest, UnisonoError, UnsupportedValue, well_formed

# Maximum number of files of one request that are read; the newest ones have priority.
MAX_FILES: Final = 64
# Maximum number of files of one request that are read at the same time, so that other requests find free processes.
MAX_CONCURRENT: Final = 2
MAX_NAME_LENGTH: Final = 200
DEFAULT_NAME: Final = "file"
# Length of a mark in hexadecimal digits.
MARK_LENGTH: Final = 16

# Characters that could end the name in its line, or hide a part of it.
_NOT_IN_NAME: Final = re.compile('[\x00-\x1f\x7f-\x9f"<>\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]')
_DATA_URL: Final = re.compile(r"data:([^,;]{0,128})((?:;[^,;]{0,128}){0,8}),", re.IGNORECASE)

_FLAT: Final = {FileField.DATA: "file_data", FileField.TYPE: "filename", FileField.URL: "file_url"}
# Paths of a file's fields within a part, for each form of file parts.
FLAT_FIELDS: Final = {**_FLAT, FileField.ID: "file_id"}
NESTED_FIELDS: Final = {one: f"file.{name}" for one, name in FLAT_FIELDS.items()}
SOURCE_FIELDS: Final = {
    FileField.DATA: "source.data",
    FileField.TYPE: "source.media_type",
    FileField.URL: "source.url",
    FileField.ID: "source.file_id",
}
# Fields with the content of a file, in the order of `Values`. The first field that is not empty is read.
CONTENT: Final = (FileField.DATA, FileField.URL, FileField.ID)
# Types of sources in Messages that are files, with the field of their content.
SOURCES: Final = {"base64": "data", "url": "url", "file": "file_id"}

NO_CONTENT: Final = FileText(problem="the file has no content; send it here")
NOT_TEXT: Final = FileText(problem="the value must be a string")
NOT_BASE64: Final = FileText(problem="the content is not valid base64")
TOO_MANY: Final = FileText(problem=f"only the {MAX_FILES} newest files of a request are read")
NOT_STORED: Final = FileText(
    problem="this gateway stores no files; send the content of the file instead of its id",
    field=FileField.ID,
    is_unsupported=True,
)
RUN_TOO_LONG: Final = (
    f"the file contains a run of more than {MAX_RUN:,} letters, symbols or blanks, which cannot be tokenized"
)

# Data, URL and id of a file, each None if it is missing.
Values: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """File part of a request.

    `content` is the file, or a FileText with the reason why there is no file. `fields` maps each FileField to the
    field's path within the part, for error messages.
    """

    content: InputFile | FileText
    name: str = ""
    # The client's text about the file.
    context: str = ""
    fields: Mapping[FileField, str] = field(default_factory=lambda: FLAT_FIELDS)
    # Note on fields without effect.
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReplacedFile:
    """Text that replaces a file part; if there is no text, the `problem` with the field `param`."""

    text: str = ""
    note: str = ""
    problem: str = ""
    param: str = ""
    is_unsupported: bool = False

    def error(self) -> InvalidRequest:
        """Return the error for the client, which states the problem and the field."""
        kind = UnsupportedValue if self.is_unsupported else InvalidRequest
        return kind(f"Invalid value for '{self.param}': {self.problem}.", param=self.param)


async def replaced_files(
    parts: Mapping[str, Mapping[str, Any]], reader: FileReader, tenant: str, size: int
) -> dict[str, ReplacedFile]:
    """Return the replacement of each file part; `parts` maps positions to parts, oldest first.

    `size` is the size of the request in bytes. Raises FilesBusy if too many files are waiting to be read.
    """
    files = await off_loop(lambda: {at: to_file(part, reader.max_bytes) for at, part in parts.items()}, size)
    newest = list(files)[-MAX_FILES:]
    late = FileText(problem=f"the files of the request were not read within {reader.timeout_s:g} s; send fewer of them")
    texts = dict.fromkeys(files, TOO_MANY) | dict.fromkeys(newest, late)
    slots = asyncio.Semaphore(MAX_CONCURRENT)
    failures: list[UnisonoError] = []

    async def read(at: str, content: InputFile | FileText) -> None:
        async with slots:
            try:
                texts[at] = content if isinstance(content, FileText) else await reader.read(content, tenant)
            except UnisonoError as failure:
                failures.append(failure)

    with suppress(TimeoutError):
        async with asyncio.timeout(reader.timeout_s), asyncio.TaskGroup() as reading:
            # A request is refused if its newest files cannot be read, so these are read first.
            for at in reversed(newest):
                reading.create_task(read(at, files[at].content))
    if failures:
        raise failures[0]
    return await off_loop(
        lambda: {at: _replaced(at, files[at], text) for at, text in texts.items()},
        sum(len(text.text) for text in texts.values()),
    )


def to_file(part: Mapping[str, Any], max_bytes: int) -> FilePart:
    """Return the file in a content part of any API."""
    inner, source = part.get("file"), part.get("source")
    if isinstance(source, dict):
        name, context = _text(part.get("title")), _text(part.get("context"))
        content = _content(_source_values(source), name, _text(source.get("media_type")), max_bytes)
        return FilePart(content, _name_of(content), context, SOURCE_FIELDS)
    if inner is not None and not isinstance(inner, dict):
        return FilePart(FileText(problem="the file must be an object"), fields=dict.fromkeys(FileField, "file"))
    # A part of Chat Completions without any content lacks the object `file`.
    is_nested = inner is not None or (part.get("type") == "file" and part.keys().isdisjoint(FLAT_FIELDS.values()))
    fields, given = (NESTED_FIELDS, inner or {}) if is_nested else (FLAT_FIELDS, part)
    if not isinstance(given.get("filename") or "", str):
        return FilePart(replace(NOT_TEXT, field=FileField.TYPE), fields=fields)
    name = _text(given.get("filename"))
    values = (given.get("file_data"), given.get("file_url"), given.get("file_id"))
    content = _content(values, name, "", max_bytes)
    note = _ignored(values, fields)
    if isinstance(content, InputFile) and content.media_type:
        # The media type is part of the `data:` URL, so an error about the type names the field with the URL.
        fields = {**fields, FileField.TYPE: fields[FileField.DATA]}
    return FilePart(content, _name_of(content), "", fields, note)


def _ignored(values: Values, fields: Mapping[FileField, str]) -> str:
    """Return a note on fields that are ignored, because only the first with content is read."""
    first, *others = [fields[one] for value, one in zip(values, CONTENT, strict=True) if value] or [""]
    return f"{' and '.join(others)} without effect, because {first} has the content" if others else ""


def _name_of(content: InputFile | FileText) -> str:
    return content.name if isinstance(content, InputFile) else ""


def _source_values(source: Mapping[str, Any]) -> Values:
    """Return the data, URL and id of a Messages source. Only the value for its type is not None."""
    kind = source.get("type")
    return tuple(source.get(name) if kind == at else None for at, name in SOURCES.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _content(values: Values, name: str, media_type: str, max_bytes: int) -> InputFile | FileText:
    """Return the file with the data, URL or id in `values`, or a FileText with the problem."""
    data, url, file_id = values
    for value, one in zip(values, CONTENT, strict=True):
        if value is not None and not isinstance(value, str):
            return replace(NOT_TEXT, field=one)
    if data:
        return _data(data, name, media_type, max_bytes)
    if url:
        # Some clients send the content as a `data:` URL in the field for the URL.
        is_data = url[:5].lower() == "data:"
        return (
            _data(url, name, media_type, max_bytes) if is_data else InputFile(name or _last(url), url=well_formed(url))
        )
    return NOT_STORED if file_id else NO_CONTENT


def _last(url: str) -> str:
    """Return the last segment of a URL's path, decoded."""
    path = url.partition("?")[0].partition("#")[0].partition("://")[2]
    return unquote(path.partition("/")[2].rpartition("/")[2], errors="replace")


def _data(data: str, name: str, media_type: str, max_bytes: int) -> InputFile | FileText:
    """Decode base64 or a `data:` URL to a file, or return the problem as a `FileText`."""
    found = _DATA_URL.match(data)
    options = found[2].lower().split(";")[1:] if found else []
    if found:
        media_type = found[1]
    elif data[:5].lower() == "data:":
        return FileText(problem="the content is not a valid `data:` URL")
    encoded = data[found.end() :] if found else data
    declared, *more = media_type.lower().split(";")
    charset = next((one.strip()[8:].strip("\"' ") for one in (*options, *more) if one.strip()[:8] == "charset="), "")
    if len(encoded) * 3 // 4 > max_bytes + 3:
        return FileText(problem=f"the file is larger than {max_bytes:,} bytes")
    if found and "base64" not in (option.strip() for option in options):
        content = unquote_to_bytes(well_formed(encoded))
    else:
        try:
            content = b64decode("".join(encoded.split()), validate=True)
        except ValueError:
            return NOT_BASE64
    return InputFile(name, declared.strip(), charset, content)


def _replaced(at: str, part: FilePart, text: FileText) -> ReplacedFile:
    problem = text.problem
    if not problem and has_piece_of_length(text.text, MAX_RUN):
        problem = RUN_TOO_LONG
    if problem:
        return ReplacedFile(
            problem=problem, param=f"{at}.{part.fields[text.field]}", is_unsupported=text.is_unsupported
        )
    quoted = quoted_file(part.name, text.text)
    note = "; ".join(filter(None, (part.note, text.note)))
    return ReplacedFile(f"{part.context}\n{quoted}" if part.context else quoted, note)


def quoted_file(name: str, text: str) -> str:
    """Return a file as text for the model: its name, and its text between two lines with a mark.

    The mark is a hash of the name and the text that does not occur in them. So the text cannot imitate the end of the
    file.
    """
    shown = _NOT_IN_NAME.sub("_", well_formed(name)).strip() or DEFAULT_NAME
    if len(shown) > MAX_NAME_LENGTH:
        shown = f"{shown[: MAX_NAME_LENGTH - 1]}…"
    digest = sha256(f"{shown}\0{text}".encode("utf-8", "replace"))
    while (mark := digest.hexdigest()[:MARK_LENGTH]) in text or mark in shown:
        digest = sha256(digest.digest())
    return f'<file name="{shown}" mark="{mark}">\n{text}\n</file mark="{mark}">'
