"""Logs: one JSON object per line on stderr, without secrets or control characters.

Control characters are escaped, so that client input cannot forge a line. Configured secrets, bearer keys, virtual
keys and passwords in URLs are redacted in the formatter, whichever logger wrote them. Bodies are never logged.
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
# Maximum characters of one value. The rest is cut, so that no backend answer floods the log.
MAX_VALUE_LENGTH = 4000

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "color_message"}
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]+")
# Virtual keys issued by the gateway, also partial ones. None of them is in the configuration.
_VIRTUAL = re.compile(r"sk-uni-[A-Za-z0-9_%-]+")
# User and password in a URL, which library errors repeat.
_USERINFO = re.compile(r"://[^/\s@\"']+@")


class Secrets:
    """Redaction of known secrets and of text that looks like one."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = secret_spellings(secrets)
        self._known = re.compile(_any_of(known)) if known else None

    def redact(self, text: str) -> str:
        """Return `text` with secrets replaced."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        text = _BEARER.sub(rf"\1 {REDACTED}", text)
        text = _VIRTUAL.sub(REDACTED, text)
        return _USERINFO.sub(f"://{REDACTED}@", text)


def _any_of(texts: Sequence[str]) -> str:
    """Build a pattern that tries the texts in order, grouped by first letter for speed."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return "|".join(f"{re.escape(first)}(?:{'|'.join(each)})" for first, each in rests.items())


class JsonLines(logging.Formatter):
    """Formatter of a record as one line of JSON.

    Keys: `time` (UTC), `level`, `logger`, `message`, the fields of `extra`, `error`.
    """

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
        """Return `text` without secrets, cut to size.

        The cut comes last, so that it cannot split a secret.
        """
        text = self._secrets.redact(text)
        if len(text) <= MAX_VALUE_LENGTH:
            return text
        # The last lines of a traceback contain the error.
        return f"…{text[-MAX_VALUE_LENGTH:]}" if keep_end else f"{text[:MAX_VALUE_LENGTH]}…"


def start_logging(level: str, secrets: Iterable[str], stream: TextIO | None = None) -> Callable[[], None]:
    """Log records of `level` and above to `stream` (default stderr).

    Returns a function that restores the previous handlers and level.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines(secrets))
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The server's own messages repeat the start-up screen.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))

    def undo() -> None:
        root.setLevel(before[0])
        root.handlers[:] = before[1]

    return undo
