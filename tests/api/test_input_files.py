"""Quotation of files, and the forms of their parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.api.input_files import quoted_file, to_file
from unisono.core.input_files import FileText, InputFile


@given(st.text(), st.text())
def test_the_mark_stands_only_in_the_first_and_the_last_line(name: str, text: str) -> None:
    quoted = quoted_file(name, text)
    head, _, rest = quoted.partition("\n")
    mark = head[-18:-2]
    assert head.endswith(f' mark="{mark}">')
    assert quoted == f'{head}\n{text}\n</file mark="{mark}">'
    assert quoted.count(mark) == 2
    assert head.count('"') == 4
    assert rest.count(mark) == 1


def test_equal_files_have_equal_marks_and_different_files_different_ones() -> None:
    assert quoted_file("a", "b") == quoted_file("a", "b")
    assert len({quoted_file(name, text)[-18:] for name, text in (("a", "b"), ("a", "c"), ("b", "b"))}) == 3


DATA_URLS = {
    "base64": ("data:text/plain;base64,VGVh", InputFile("n", "text/plain", "", b"Tea")),
    "charset": ("data:text/csv;charset=latin-1;base64,VGVh", InputFile("n", "text/csv", "latin-1", b"Tea")),
    "percent signs": ("data:text/plain,Green%20tea", InputFile("n", "text/plain", "", b"Green tea")),
    "upper case": ("DATA:Text/Plain;BASE64,VGVh", InputFile("n", "text/plain", "", b"Tea")),
    "no type": ("data:;base64,VGVh", InputFile("n", "", "", b"Tea")),
    "line breaks": ("VG\r\nVh\n", InputFile("n", "", "", b"Tea")),
}


@pytest.mark.parametrize(("url", "file"), DATA_URLS.values(), ids=DATA_URLS)
def test_data_is_decoded(url: str, file: InputFile) -> None:
    assert to_file({"file_data": url, "filename": "n"}, 1_000).content == file
    assert to_file({"file": {"file_data": url, "filename": "n"}}, 1_000).content == file


def test_data_beyond_the_limit_is_not_decoded() -> None:
    content = to_file({"file_data": "A" * 2_000}, 1_000).content
    assert content == FileText(problem="the file is larger than 1,000 bytes")


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("type", "file", "source", "file_data", "file_url", "file_id", "filename", "title", "data", "url", "media_type")
texts = st.text() | st.sampled_from(["data:", "data:,", "data:a;b;c,d", "base64", "url", "https://a/b", "A", "QQ=="])


@given(st.dictionaries(st.sampled_from(NAMES), texts | json | st.dictionaries(st.sampled_from(NAMES), texts | json)))
def test_every_part_is_a_file_or_has_a_problem(part: dict[str, Any]) -> None:
    found = to_file(part, 1_000)
    assert isinstance(found.content, InputFile) or found.content.problem
    if isinstance(found.content, FileText):
        assert found.content.field in found.fields
