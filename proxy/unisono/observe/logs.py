"""Logs: one JSON object per line on stderr, safe to read and safe to keep.

Control characters are escaped, so that nothing a client sends can forge a line. Configured secrets, bearer keys,
virtual keys and passwords in addresses are taken out where the line is made, whoever logged them. Bodies are never
logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TextIO

from unisono.core.secrecy import secret_spellings

REDACTED = "[redacted]"
LONGEST = 4000
"""Characters of one value; the rest is cut, so that no answer of a backend floods the log."""

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "color_message"}
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]+")
_VIRTUAL = re.compile(r"sk-uni-[A-Za-z0-9_%-]+")
"""Keys made here, in part too: none of them is in the configuration."""
_USERINFO = re.compile(r"://[^/\s@\"']+@")


class Secrets:
    """Known ones, and what looks like one."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = secret_spellings(secrets)
        self._known = re.compile(_any_of(known)) if known else None

    def taken_from(self, text: str) -> str:
        """`text` without them."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        text = _BEARER.sub(rf"\1 {REDACTED}", text)
        text = _VIRTUAL.sub(REDACTED, text)
        return _USERINFO.sub(f"://{REDACTED}@", text)


def _any_of(texts: Sequence[str]) -> str:
    """A pattern that tries the texts in their order, at each place only those with the same first letter."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return "|".join(f"{re.escape(first)}(?:{'|'.join(each)})" for first, each in rests.items())


class JsonLines(logging.Formatter):
    """A record as one line. Keys: `time` (UTC), `level`, `logger`, `message`, whatever came in `extra`, `error`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = Secrets(secrets)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._clean(record.getMessage()),
        }
        for key, value in vars(record).items():
            if key not in _STANDARD and not key.startswith("_"):
                line[self._clean(key)] = value if isinstance(value, bool | int | float) else self._clean(str(value))
        if record.exc_info:
            line["error"] = self._clean(self.formatException(record.exc_info), keep_end=True)
        return json.dumps(line)

    def _clean(self, text: str, *, keep_end: bool = False) -> str:
        """`text` without secrets, cut to size. The cut comes last, so that it cannot split a secret."""
        text = self._secrets.taken_from(text)
        if len(text) <= LONGEST:
            return text
        # A traceback says what happened in its last lines.
        return f"…{text[-LONGEST:]}" if keep_end else f"{text[:LONGEST]}…"


def start_logging(level: str, secrets: Iterable[str], stream: TextIO | None = None) -> Callable[[], None]:
    """Send everything that is logged from now on to `stream` (stderr), `level` and above. Returns how to undo it."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines(secrets))
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The server's own announcements repeat what the start-up screen says.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))

    def undo() -> None:
        root.setLevel(before[0])
        root.handlers[:] = before[1]

    return undo
