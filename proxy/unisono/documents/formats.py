"""Formats of files, decoding of text, and reasons why a file has no readable text."""

from __future__ import annotations

import codecs
import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Final

from unisono.core.input_files import InputFile


class FileFormat(StrEnum):
    """Format that decides how a file is read."""

    TEXT = "text"
    HTML = "html"
    PDF = "pdf"


class ExtractProblem(StrEnum):
    """Reason that the extraction process reports, or that is inferred from its exit."""

    BROKEN = "broken"
    ENCRYPTED = "encrypted"
    NO_TEXT = "no_text"
    TOO_MANY_PAGES = "too_many_pages"
    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"


SUPPORTED: Final = "plain text, Markdown, JSON, CSV, HTML or PDF"

PDF_MARK: Final = b"%PDF-"
_HTML_TYPES: Final = frozenset({"text/html", "application/xhtml+xml"})
_TEXT_TYPE: Final = re.compile(
    r"text/.+|application/(json|jsonl|x-ndjson|ndjson|xml|csv|sql|javascript|x-javascript|typescript|yaml|x-yaml|toml"
    r"|x-sh|x-python|x-tex|[a-z0-9.-]+\+(json|xml|yaml))"
)
# Text formats with so much markup that the text is not readable.
_UNREADABLE_TYPES: Final = frozenset({"text/rtf", "text/richtext"})
_TEXT_SUFFIX_NAMES: Final = """
    txt text md markdown mdx rst adoc org tex json jsonl ndjson json5 csv tsv xml yaml yml toml ini cfg conf env
    properties log py pyi ipynb js mjs cjs ts tsx jsx java kt kts scala c h cc cpp hpp cs go rs rb php pl lua r jl swift
    m sh bash zsh ps1 bat sql css scss less vue svelte graphql proto diff patch srt vtt ics eml dockerfile makefile
"""
_TEXT_SUFFIXES: Final = frozenset(_TEXT_SUFFIX_NAMES.split())
_HTML_SUFFIXES: Final = frozenset({"html", "htm", "xhtml"})

_CHARSET_NAMES: Final = """
    utf-8 ascii utf-16 utf-16-le utf-16-be utf-32 iso8859-1 iso8859-2 iso8859-15 cp1250 cp1251 cp1252 koi8-r gb18030 gbk
    big5 shift_jis euc_jp euc_kr
"""
# Accepted character sets, by their Python names. Other codecs are not text encodings, or take quadratic time.
CHARSETS: Final = frozenset(_CHARSET_NAMES.split())
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_META_CHARSET: Final = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)
# NUL and other control characters that text does not contain.
_BINARY: Final = re.compile("[\x00-\x06\x0e-\x1a\x1c-\x1f]")


def format_of(file: InputFile) -> FileFormat | None:
    """Return the format of a file, or None if the format is not supported.

    The format is determined by the first bytes of the file, its media type and its name, in this order.
    """
    if file.data.startswith(PDF_MARK) or file.media_type in ("application/pdf", "application/x-pdf"):
        return FileFormat.PDF
    if file.media_type in _HTML_TYPES:
        return FileFormat.HTML
    if _TEXT_TYPE.fullmatch(file.media_type):
        # Clients that do not know the type of an HTML file often send the type of plain text.
        is_html = _suffix(file.name) in _HTML_SUFFIXES
        return None if file.media_type in _UNREADABLE_TYPES else FileFormat.HTML if is_html else FileFormat.TEXT
    # Browsers may send the type of the program that opens the file, such as that of a spreadsheet for a CSV file.
    suffix = _suffix(file.name)
    if suffix == "pdf":
        return FileFormat.PDF
    if suffix in _HTML_SUFFIXES:
        return FileFormat.HTML
    return FileFormat.TEXT if suffix in _TEXT_SUFFIXES else None


def _suffix(name: str) -> str:
    path = PurePosixPath(name.lower())
    return path.suffix[1:] or path.name


def decoded(data: bytes, charset: str, *, is_html: bool = False) -> str | None:
    """Decode text by its byte order mark, `charset` or `<meta>` element, otherwise as UTF-8.

    In HTML, invalid bytes become U+FFFD. Otherwise, return None if the data is not valid text in this encoding.
    """
    name = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    if name is None and not charset and is_html and (found := _META_CHARSET.search(data[:4096])):
        charset = found[1].decode("ascii")
    if name is None:
        try:
            name = codecs.lookup(charset or "utf-8").name
        except (LookupError, ValueError):
            name = ""
        if name not in CHARSETS:
            if not is_html:
                return None
            name = "utf-8"
    try:
        text = data.decode(name, "replace" if is_html else "strict")
    except UnicodeDecodeError:
        return None
    return None if not is_html and _BINARY.search(text) else text
