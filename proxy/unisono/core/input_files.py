"""Files in requests, and the port that reads their texts."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from unisono.core.frozen import dataclass


class FileField(StrEnum):
    """Property of a file that a problem is about. Each API has its own field for it."""

    DATA = "data"
    TYPE = "type"
    URL = "url"
    ID = "id"


@dataclass(frozen=True, slots=True)
class InputFile:
    """File of a request: its content, or the URL of its content.

    `media_type` is in lower case and without parameters; it and `charset` are empty if unknown.
    """

    name: str = ""
    media_type: str = ""
    charset: str = ""
    data: bytes = b""
    url: str = ""


@dataclass(frozen=True, slots=True)
class FileText:
    """Text of a file, or the `problem` with its `field`. `note` is for the client.

    A file `is_unsupported` if no file of its kind can be read.
    """

    text: str = ""
    note: str = ""
    problem: str = ""
    field: FileField = FileField.DATA
    is_unsupported: bool = False


class FileReader(Protocol):
    """Reader of files.

    `timeout_s` is the limit for all files of a request in seconds, `max_bytes` the limit for each file.
    """

    @property
    def timeout_s(self) -> float: ...

    @property
    def max_bytes(self) -> int: ...

    async def read(self, file: InputFile, tenant: str) -> FileText:
        """Return the text of a file. Raises FilesBusy if too many files are waiting."""
        ...
