"""Extraction in a separate process: its limits, its end, and the number of processes."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.documents.pdfs import bomb, encrypted, pdf
from unisono.documents.extractor import ExtractedText, FileLimits, TextExtractor
from unisono.documents.formats import ExtractProblem, FileFormat
from unisono.errors import FilesBusy

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs limits that macOS does not enforce")
MIB = 1024 * 1024
SLOW_HTML = b"<div>" * 1_500_000


def slow_pdf() -> bytes:
    """Return a file with a page that takes the parser many seconds."""
    return pdf(zlib.compress(b"BT /F1 12 Tf 72 700 Td " + b"(tea) Tj " * 190_000 + b"ET"), "Tea", "Tea")


def extractor(**limits: float) -> TextExtractor:
    return TextExtractor(FileLimits(**limits))  # type: ignore[arg-type]


def workers() -> list[str]:
    """Return the ids of all extracting processes that this process started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        # A thread or a process may end at any time.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):
                    line = Path(f"/proc/{child}/cmdline").read_bytes()
                    found += [child] if b"documents/worker.py" in line else []
    return found


async def test_pages_are_joined_and_those_without_text_counted() -> None:
    read = await extractor().extract(FileFormat.PDF, pdf("Green tea", "", "Black tea"), "")
    assert read == ExtractedText("Green tea\n\nBlack tea", 1)


async def test_html_is_read_with_its_title_and_charset() -> None:
    page = "<meta charset=iso-8859-1><title>Grün</title><p>Tee".encode("latin-1")
    assert await extractor().extract(FileFormat.HTML, page, "") == ExtractedText("Grün\n\nTee")


PROBLEMS: dict[str, tuple[Callable[[], bytes], dict[str, float], ExtractProblem]] = {
    "encrypted": (lambda: encrypted(pdf("Tea"), "secret"), {}, ExtractProblem.ENCRYPTED),
    "garbage": (lambda: b"%PDF-1.7\n" + bytes(range(256)) * 20, {}, ExtractProblem.BROKEN),
    "cut off": (lambda: pdf("Tea")[:300], {}, ExtractProblem.BROKEN),
    "no pages": (lambda: pdf(), {}, ExtractProblem.NO_TEXT),
    "pages": (lambda: pdf("Tea", "Tea"), {"max_pages": 1}, ExtractProblem.TOO_MANY_PAGES),
    "characters": (lambda: pdf("Green tea", "Black tea"), {"max_characters": 15}, ExtractProblem.TOO_LONG),
    "bomb": (bomb, {}, ExtractProblem.TOO_LARGE),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("file", "limits", "problem"), PROBLEMS.values(), ids=PROBLEMS)
async def test_a_pdf_that_cannot_be_read_has_a_problem(
    file: Callable[[], bytes], limits: dict[str, float], problem: ExtractProblem
) -> None:
    assert await extractor(**limits).extract(FileFormat.PDF, file(), "") == ExtractedText(problem=problem)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("format", "file"), [(FileFormat.PDF, slow_pdf), (FileFormat.HTML, lambda: SLOW_HTML)])
async def test_a_process_ends_at_its_time_limit(format: FileFormat, file: Callable[[], bytes]) -> None:
    read = await extractor(timeout_s=0.5).extract(format, file(), "")
    assert read == ExtractedText(problem=ExtractProblem.TOO_SLOW)


@linux
async def test_a_process_ends_at_its_memory_limit() -> None:
    read = await extractor(memory=100 * MIB).extract(FileFormat.HTML, b"Green tea. " * 5_000_000, "")
    assert read == ExtractedText(problem=ExtractProblem.TOO_LARGE)


@linux
async def test_a_cancelled_extraction_leaves_no_process() -> None:
    reading = asyncio.create_task(extractor().extract(FileFormat.PDF, slow_pdf(), ""))
    while not workers():
        await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert workers() == []


async def test_files_beyond_the_queue_are_refused_and_the_others_are_read() -> None:
    narrow = TextExtractor(FileLimits(), at_once=1, max_waiting=1)
    found = await asyncio.gather(
        *(narrow.extract(FileFormat.PDF, pdf(f"Tea {number}"), "") for number in range(3)), return_exceptions=True
    )
    assert found[:2] == [ExtractedText("Tea 0"), ExtractedText("Tea 1")]
    assert isinstance(found[2], FilesBusy)
    assert await narrow.extract(FileFormat.PDF, pdf("Tea 3"), "") == ExtractedText("Tea 3")
