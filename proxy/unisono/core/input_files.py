"""Files in requests, and the protocol of readers that extract their text."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from unisono.core.frozen import dataclass


class FileField(StrEnum):
    """Property of a file to which a problem refers; each API has its own field for the property."""

    DATA = "data"
    TYPE = "type"
    URL = "url"
    ID = "id"


@dataclass(frozen=True, slots=True)
class InputFile:
    """File of a request: its content, or the URL of its content.

    `media_type` is in lower case and without parameters. `media_type` and `charset` are empty if unknown.
    """

    name: str = ""
    media_type: str = ""
    charset: str = ""
    data: bytes = b""
    url: str = ""


@dataclass(frozen=True, slots=True)
class FileText:
    """Text of a file, or the `problem` that prevents reading it.

    `field` is the property of the file that causes the problem. `note` is a remark about the text for the client.
    `is_unsupported`: no file of this kind can be read.
    """

    text: str = ""
    note: str = ""
    problem: str = ""
    field: FileField = FileField.DATA
    is_unsupported: bool = False


class FileReader(Protocol):
    """Reader of files.

    `timeout_s` is the time limit for all files of a request together, in seconds. `max_bytes` is the size limit for
    each file.
    """

    @property
    def timeout_s(self) -> float: ...

    @property
    def max_bytes(self) -> int: ...

    async def read(self, file: InputFile, tenant: str) -> FileText:
        """Return the text of a file, or its problem. Raises FilesBusy if too many files are waiting."""
        ...
