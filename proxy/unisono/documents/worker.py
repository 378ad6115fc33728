"""Process that extracts the text of one file.

It runs as `worker.py SETTINGS`, with the file on its standard input. SETTINGS is JSON with `format`, `charset`,
`max_pages`, `max_characters`, and `limits` (resource name to number). The result is one JSON object on standard output:
`text` and, for a PDF, `unread_pages`, or `problem`, a value of `ExtractProblem`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    # An isolated interpreter does not find this package if the package is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from unisono.documents.formats import ExtractProblem, FileFormat, decoded
from unisono.toolservers.browser.html_text import read_html
from unisono.toolservers.python.sandbox import SET_NO_NEW_PRIVILEGES, SET_PARENT_DEATH_SIGNAL, limit, prctl

_CONTROLS: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
NICE: Final = 5
OOM_SCORE: Final = Path("/proc/self/oom_score_adj")


def html_text(data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    source = decoded(data, settings["charset"], is_html=True) or ""
    page = read_html(source, "")
    text = f"{page.title}\n\n{page.text}" if page.title else page.text
    if not text.strip():
        return {"problem": ExtractProblem.NO_TEXT}
    return {"problem": ExtractProblem.TOO_LONG} if len(text) > settings["max_characters"] else {"text": text}


def pdf_text(data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    from pypdf import PasswordType, PdfReader
    from pypdf.errors import LimitReachedError

    texts: list[str] = []
    length = unread = 0
    try:
        reader = PdfReader(BytesIO(data))
        # A file that only restricts printing or editing opens with an empty password.
        if reader.is_encrypted and reader.decrypt("") is PasswordType.NOT_DECRYPTED:
            return {"problem": ExtractProblem.ENCRYPTED}
        for number, page in enumerate(reader.pages):
            if number == settings["max_pages"]:
                return {"problem": ExtractProblem.TOO_MANY_PAGES}
            text = _page_text(page)
            texts.append(text)
            unread += not text
            length += len(text) + 2
            if length > settings["max_characters"]:
                return {"problem": ExtractProblem.TOO_LONG}
    except (LimitReachedError, MemoryError):
        return {"problem": ExtractProblem.TOO_LARGE}
    except Exception as error:
        # The library may raise any exception for a broken file.
        log(error)
        return {"problem": ExtractProblem.BROKEN}
    if not any(texts):
        return {"problem": ExtractProblem.NO_TEXT}
    return {"text": "\n\n".join(filter(None, texts)), "unread_pages": unread}


def _page_text(page: Any) -> str:
    """Return the text of a page, or "" if the page is broken or has no text.

    Raises LimitReachedError or MemoryError if the page exceeds a limit.
    """
    from pypdf.errors import LimitReachedError

    try:
        return _CONTROLS.sub("", page.extract_text().replace("\r\n", "\n").replace("\r", "\n")).strip()
    except (LimitReachedError, MemoryError):
        raise
    except Exception as error:
        log(error)
        return ""


def log(error: Exception) -> None:
    """Write an error to standard error, for manual runs of this script. The gateway discards it."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)


def main() -> None:
    settings = json.loads(sys.argv[1])
    # This process must end if the gateway dies, and other processes on this machine have priority.
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    prctl(SET_NO_NEW_PRIVILEGES, 1)
    os.nice(NICE)
    # If memory runs out, the kernel kills this process instead of the gateway.
    with suppress(OSError):
        OOM_SCORE.write_text("1000")
    is_pdf = settings["format"] == FileFormat.PDF
    if is_pdf:
        # The import precedes the limits, because its use of resources depends only on the library's version.
        import pypdf  # noqa: F401
    limit(settings["limits"])
    try:
        result = (pdf_text if is_pdf else html_text)(sys.stdin.buffer.read(), settings)
    except MemoryError:
        result = {"problem": ExtractProblem.TOO_LARGE}
    sys.stdout.buffer.write(json.dumps(result, ensure_ascii=False).encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
