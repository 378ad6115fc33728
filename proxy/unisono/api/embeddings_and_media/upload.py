"""Multipart bodies, stored in a temporary file, and the gateway options in their parts.

The file is kept until the request is answered, and has two purposes. The model can be read wherever it is in the body,
and after a failure the body can be sent to a different deployment. All parts except the model are forwarded with their
own headers.

Options are routing, guardrails and tags, as in JSON bodies. A list or an object may be sent in one part as JSON, such
as `["a"]` in the part `fallbacks`. As in the OpenAI SDK, each value of the list or object may instead be sent in a part
of its own, whose name has brackets: `fallbacks[]`, `metadata[tags][]`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from secrets import token_hex
from tempfile import SpooledTemporaryFile
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from unisono.api.body import unread_body
from unisono.api.caller_options import GUARDRAILS
from unisono.api.routing_fields import FIELDS, TAG_OBJECTS
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import GATEWAY_FIELDS, Upload
from unisono.errors import InvalidRequest, StoreUnavailable, UnsupportedMediaType

# Fields that may contain options of the gateway. Options of the gateway are not forwarded to the backend.
OPTIONS: Final = FIELDS | GATEWAY_FIELDS | {"mock_response", GUARDRAILS, *TAG_OBJECTS}
_NAME: Final = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_KEY: Final = re.compile(r"\[([^\[\]]*)\]")
MAX_DEPTH: Final = 3


@dataclass(frozen=True, slots=True)
class OptionPart:
    """Part of a form that may contain options of the gateway.

    `field` and `keys` are read from the part's name: `metadata[tags]` has the field `metadata` and the key `tags`.
    `text` is the content of the part, and `head` its boundary and headers as bytes.
    """

    field: str
    keys: tuple[str, ...]
    text: str
    head: bytes


def option_field(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the field and keys in the name of a part; None if the field cannot have options."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in OPTIONS:
        return None
    return match[1], tuple(_KEY.findall(match[2]))


def read_options(parts: Iterable[OptionPart]) -> dict[str, Any]:
    """Return the values of the parts, as the fields of a JSON body.

    Raises InvalidRequest if a name has too many keys, or if the parts of a field contradict each other.
    """
    body: dict[str, Any] = {}
    for part in parts:
        if len(part.keys) > MAX_DEPTH:
            raise _invalid(part.field, f"must have at most {MAX_DEPTH} keys in brackets")
        value = part.text if part.keys else _value(part.text)
        _insert(body, (part.field, *part.keys), value, part.field)
    return body


def remaining_parts(parts: Iterable[OptionPart], body: Mapping[str, Any], rest: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of the parts to forward to the backend.

    `body` holds the fields of all `parts`. `rest` holds the same fields without the options of the gateway.
    """
    rewritten: set[str] = set()
    for part in parts:
        left = rest.get(part.field)
        if left is None or part.field in GATEWAY_FIELDS:
            continue
        if left == body[part.field]:
            yield part.head + part.text.encode() + b"\r\n"
        elif part.field not in rewritten:
            rewritten.add(part.field)
            yield _rewritten(part, left)


def _rewritten(part: OptionPart, left: Any) -> bytes:
    """Return a part that contains `left`, the rest of a field's value, as JSON.

    This part replaces all parts of the field, so its name is the name of the field without keys in brackets.
    """
    own_name = re.compile(rb'name="[^"]*"')
    head = own_name.sub(b'name="%b"' % part.field.encode(), part.head, count=1)
    return head + json.dumps(left).encode() + b"\r\n"


def _value(text: str) -> Any:
    """Parse a text as JSON; return the text itself if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _insert(target: Any, path: tuple[str, ...], value: Any, field: str) -> None:
    """Put a value at a path in `target`; an empty key in the path appends to a list.

    Raises InvalidRequest if the parts of a field contradict each other.
    """
    key, *rest = path
    if rest:
        empty: Any = [] if rest[0] == "" else {}
        if key == "":
            raise _invalid(field, "is a list of lists or objects; send it as JSON")
        inner = target.setdefault(key, empty)
        if type(inner) is not type(empty):
            raise _invalid(field, "is sent in two different forms, such as a value and a list; use one form")
        _insert(inner, tuple(rest), value, field)
    elif key == "":
        target.append(value)
    elif key in target:
        raise _invalid(field, "occurs twice; send it once")
    else:
        target[key] = value


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{field}': it {problem}.", param=field)


# Maximum size in bytes of a body that stays in memory.
MEMORY_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 64 * 1024
MAX_PARTS: Final = 100
MAX_FIELD_BYTES: Final = 64 * 1024
# Header fields of a part that are forwarded.
FORWARDED: Final = (b"content-disposition", b"content-type")
MODEL: Final = "model"


class SpooledUpload(Upload):
    """Multipart body of a request.

    `fields` are the text fields of the body, including the model. `files` are the names of the fields with files.
    `options` are parts that may contain options of the gateway. These parts are forwarded only if the code that uses
    the upload adds them with `write`.
    """

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.options: list[OptionPart] = []
        self.files: set[str] = set()
        self._boundary = token_hex(16)
        self._size = 0
        self._file = SpooledTemporaryFile[bytes](MEMORY_BYTES)

    @property
    def media_type(self) -> str:
        return f"multipart/form-data; boundary={self._boundary}"

    def size(self, model: str) -> int:
        return self._size + len(self._begin(model)) + len(self._end)

    async def pieces(self, model: str) -> AsyncIterator[bytes]:
        yield self._begin(model)
        position = 0
        while data := await asyncio.to_thread(self._read, position):
            position += len(data)
            yield data
        yield self._end

    async def write(self, data: bytes) -> None:
        """Append bytes to the parts. Raises StoreUnavailable if the disk is full."""
        self._size += len(data)
        try:
            # Small bodies stay in memory, where a write takes no time.
            if self._size <= MEMORY_BYTES:
                self._file.write(data)
            else:
                await asyncio.to_thread(self._file.write, data)
        except OSError as error:
            raise StoreUnavailable("The gateway has no disk space for this upload; try again later.") from error

    def part_head(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers if name in FORWARDED)
        return b"--%b\r\n%b\r\n" % (self._boundary.encode(), lines)

    def close(self) -> None:
        """Delete the file. May be called more than once."""
        self._file.close()

    def _begin(self, model: str) -> bytes:
        name = model.encode("utf-8", "replace")
        return self.part_head([(b"content-disposition", b'form-data; name="model"')]) + name + b"\r\n"

    @property
    def _end(self) -> bytes:
        return b"--%b--\r\n" % self._boundary.encode()

    def _read(self, position: int) -> bytes:
        self._file.seek(position)
        return self._file.read(PIECE_BYTES)


class PartReader:
    """Reader of the parts of a multipart body.

    `output` holds the bytes that are to be forwarded and are not in the upload yet.
    """

    def __init__(self, upload: SpooledUpload, boundary: bytes) -> None:
        self.output = bytearray()
        self.is_complete = False
        self._upload = upload
        self._headers: list[tuple[bytes, bytes]] = []
        self._name_bytes = self._value_bytes = b""
        self._name = ""
        self._text: bytearray | None = None  # text of the current part; None for a file
        self._option: tuple[str, tuple[str, ...]] | None = None
        self._parts = 0
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body. Raises InvalidRequest or FormParserError."""
        if data:
            self.parser.write(data)

    def finish(self) -> None:
        """Raise InvalidRequest if the body is not complete."""
        if not self.is_complete:
            raise InvalidRequest("The multipart body is incomplete: it ends before its closing boundary.")

    def _on_part_begin(self) -> None:
        self._headers = []
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"The body has more than {MAX_PARTS} parts; send fewer.")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name_bytes += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value_bytes += data[start:end]

    def _on_header_end(self) -> None:
        self._headers.append((self._name_bytes.lower(), self._value_bytes))
        self._name_bytes = self._value_bytes = b""

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(dict(self._headers).get(b"content-disposition"))
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise InvalidRequest("A part of the body has no name; set it in the part's 'Content-Disposition' header.")
        self._name = name.decode("utf-8", "replace")
        self._option = None
        if b"filename" in options:
            if self._name == MODEL or option_field(self._name) is not None:
                field = self._name[:64]
                raise InvalidRequest(f"'{field}' must be a text field; send it without a file name.", param=field)
            self._text = None
            self._upload.files.add(self._name)
        else:
            if self._name in self._upload.fields and self._name == MODEL:
                raise InvalidRequest("'model' occurs twice in the body.", param=MODEL)
            self._text = bytearray()
            self._option = option_field(self._name)
        if self._is_forwarded:
            self.output += self._upload.part_head(self._headers)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._text is not None:
            self._text += data[start:end]
            if len(self._text) > MAX_FIELD_BYTES:
                name = self._name[:64]
                raise InvalidRequest(f"'{name}' is longer than {MAX_FIELD_BYTES:,} bytes; shorten it.", param=name)
        if self._is_forwarded:
            self.output += data[start:end]

    def _on_part_end(self) -> None:
        if self._option is not None and self._text is not None:
            text, head = self._text.decode("utf-8", "replace"), self._upload.part_head(self._headers)
            self._upload.options.append(OptionPart(*self._option, text, head))
        elif self._text is not None:
            self._upload.fields[self._name] = self._text.decode("utf-8", "replace")
        if self._is_forwarded:
            self.output += b"\r\n"

    @property
    def _is_forwarded(self) -> bool:
        return self._name != MODEL and self._option is None

    def _on_end(self) -> None:
        self.is_complete = True


async def read_upload(request: Request) -> SpooledUpload:
    """Return the multipart body of a request, which the caller must close.

    Raises InvalidRequest for an invalid body, UnsupportedMediaType for a body that is not a form, StoreUnavailable if
    the disk is full, ClientGone if the client disconnects, and the errors of the middleware `BodyLimits`.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise UnsupportedMediaType("The body must be a form, with 'Content-Type: multipart/form-data; boundary=...'.")
    upload = SpooledUpload()
    try:
        reader = PartReader(upload, options[b"boundary"])
        async for data in request.stream():
            reader.feed(data)
            await upload.write(bytes(reader.output))
            reader.output.clear()
        reader.finish()
    except FormParserError as error:
        upload.close()
        raise InvalidRequest(f"The body is not valid multipart/form-data: {str(error)[:200]}.") from None
    except ClientDisconnect:
        upload.close()
        raise unread_body(request) from None
    except BaseException:
        upload.close()
        raise
    return upload
