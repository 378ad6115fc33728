"""Formats and encodings of files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.input_files import InputFile
from unisono.documents.formats import FileFormat, decoded, format_of

CASES = {
    "type": (InputFile(media_type="text/csv"), FileFormat.TEXT),
    "type of JSON": (InputFile(media_type="application/ld+json"), FileFormat.TEXT),
    "type of HTML": (InputFile(media_type="text/html"), FileFormat.HTML),
    "HTML that is called text": (InputFile("a.htm", "text/plain"), FileFormat.HTML),
    "ending": (InputFile("A.PDF", "application/octet-stream"), FileFormat.PDF),
    "source code": (InputFile("a.rs"), FileFormat.TEXT),
    "a name without ending": (InputFile("Makefile"), FileFormat.TEXT),
    "first bytes": (InputFile(data=b"%PDF-1.4"), FileFormat.PDF),
    "a PDF that is called text": (InputFile("a.txt", "text/plain", data=b"%PDF-1.4"), FileFormat.PDF),
    "rich text": (InputFile("a.rtf", "text/rtf"), None),
    "office": (InputFile("a.docx"), None),
    "image": (InputFile("a.png", "image/png"), None),
    "nothing": (InputFile(), None),
}


@pytest.mark.parametrize(("file", "format"), CASES.values(), ids=CASES)
def test_the_format_is_that_of_type_name_or_content(file: InputFile, format: FileFormat | None) -> None:
    assert format_of(file) is format


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"))))
def test_text_in_utf_8_is_unchanged(text: str) -> None:
    assert decoded(text.encode(), "") == text.removeprefix("\ufeff")
    assert decoded(b"\xef\xbb\xbf" + text.encode(), "latin-1") == text


ENCODINGS = {
    "mark": ("Grün".encode("utf-16"), "", "Grün"),
    "charset": ("Grün".encode("cp1252"), "windows-1252", "Grün"),
    "wrong charset": (b"\xff\xff", "utf-8", None),
    "unknown charset": (b"a", "klingon", None),
    "no charset of text": (b"61", "hex", None),
    "control characters": (b"a\x00", "", None),
}


@pytest.mark.parametrize(("data", "charset", "text"), ENCODINGS.values(), ids=ENCODINGS)
def test_text_is_decoded_or_refused(data: bytes, charset: str, text: str | None) -> None:
    assert decoded(data, charset) == text


@given(st.binary(), st.sampled_from(["", "utf-8", "hex", "utf-16", "\x00"]))
def test_every_data_is_text_as_html(data: bytes, charset: str) -> None:
    assert isinstance(decoded(data, charset, is_html=True), str)
