"""Logs on stderr: one line per message, without secrets or control characters.

A line is a JSON object, or text for a terminal.

Control characters are escaped, so that client input cannot forge a line. Configured secrets, bearer keys, virtual keys
and passwords in URLs are redacted in the formatter, so that this applies to the messages of every logger. Bodies are
never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import filterfalse
from typing import Any, Final, TextIO

from unisono.observe.redaction import Secrets

# Name in `extra` of the fields of a request.
REQUEST: Final = "request"
# Maximum characters of one value. Longer values are truncated, so that no backend answer floods the log.
MAX_VALUE_LENGTH = 4000

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "color_message"}


_to_json = json.JSONEncoder().encode


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
            "message": record.getMessage(),
        }
        attributes = vars(record)
        for key in filterfalse(_STANDARD.__contains__, attributes):
            value = attributes[key]
            if key == REQUEST:
                line.update(value)
            elif not key.startswith("_"):
                line[key] = value if isinstance(value, bool | int | float) else str(value)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        text = _to_json(line)
        # Nearly all lines are short and contain no secret. If no character is escaped, the line contains every value
        # as it is, so one search finds every secret.
        if len(text) <= MAX_VALUE_LENGTH and "\\" not in text and not self._secrets.may_occur(text):
            return text
        return json.dumps(
            {self._clean(key): self._cleaned(value, keep_end=key == "error") for key, value in line.items()}
        )

    def _cleaned(self, value: Any, *, keep_end: bool = False) -> Any:
        """Return a value of any JSON type with every text in it cleaned."""
        if isinstance(value, dict):
            return {key: self._cleaned(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._cleaned(inner) for inner in value]
        return self._clean(value, keep_end=keep_end) if isinstance(value, str) else value

    def _clean(self, text: str, *, keep_end: bool = False) -> str:
        """Return `text` without secrets, truncated to the maximum length.

        If `keep_end` is True, the beginning of the text is cut off, else its end. Secrets are removed first, because a
        truncated secret would not be recognized.
        """
        text = self._secrets.redact(text)
        if len(text) <= MAX_VALUE_LENGTH:
            return text
        # The last lines of a traceback contain the error.
        return f"…{text[-MAX_VALUE_LENGTH:]}" if keep_end else f"{text[:MAX_VALUE_LENGTH]}…"


class TextLines(logging.Formatter):
    """Formatter of a record as a line of text for a terminal.

    The line has the time, the level if it is not `info`, the message, and the fields of `extra`. A traceback follows on
    lines of its own.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._lines = JsonLines(secrets)

    def format(self, record: logging.LogRecord) -> str:
        facts = json.loads(self._lines.format(record))
        level = "" if record.levelno == logging.INFO else f"{facts['level']}: "
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        # The message about a request already contains its fields.
        names = () if hasattr(record, REQUEST) else facts.keys() - {"time", "level", "logger", "message", "error"}
        added = "".join(f" {name}={_printable(str(facts[name]))}" for name in sorted(names))
        line = f"{time} {level}{_printable(facts['message'])}{added}"
        error = "\n".join(map(_printable, str(facts.get("error", "")).split("\n")))
        return f"{line}\n{error}" if error else line


def _printable(text: str) -> str:
    """Escape control characters, with which a client could forge a line or control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class LineHandler(logging.StreamHandler[TextIO]):
    """Handler that flushes each line without acquiring the handler's lock a second time."""

    def flush(self) -> None:
        self.stream.flush()


def start_logging(
    level: str, secrets: Iterable[str], stream: TextIO | None = None, log_format: str = "auto"
) -> Callable[[], None]:
    """Log records of `level` and above to `stream` (default stderr).

    `log_format` is `json`, `text`, or `auto` for text on a terminal. Returns a function that restores the previous
    handlers and level.
    """
    stream = sys.stderr if stream is None else stream
    handler = LineHandler(stream)
    is_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler.setFormatter(TextLines(secrets) if is_text else JsonLines(secrets))
    # No log format contains threads and processes, and each lookup costs time per line. Without `_srcfile`, the library
    # does not search the stack for the caller (Logging HOWTO, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    source_file, logging._srcfile = logging._srcfile, None
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The server's own messages repeat the start-up screen.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))

    def undo() -> None:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
        logging._srcfile = source_file

    return undo
