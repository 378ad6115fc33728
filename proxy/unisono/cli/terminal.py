"""Text for terminals: tables, and untrusted text with control characters spelled out."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

STDERR = 2


def harmless(text: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def on_one_line(text: str) -> str:
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def has_colour() -> bool:
    """Return True if standard output is a terminal and NO_COLOR is unset (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def occupy_closed_streams() -> None:
    """Open `os.devnull` in place of each closed standard stream, also for child processes.

    Otherwise, the next socket or file would get the number of a standard stream, and the log would be written to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends


def table_lines(rows: Sequence[Sequence[str]], *, numbers_from: int | None = None) -> Iterator[str]:
    """Yield one aligned line per row; rows may contain untrusted text.

    Columns from the 0-based index `numbers_from` on are right-aligned. If it is None, all columns are left-aligned.
    """
    cells = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = (
            cell.ljust(width) if numbers_from is None or index < numbers_from else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(aligned).rstrip()


def print_key(output: str, secret: str) -> None:
    """Print output that contains a new secret, which cannot be printed again.

    If standard output fails, the secret is printed to standard error. Raises OSError in this case.
    """
    try:
        _write(output)
    except OSError:
        click.echo(f"Standard output failed. The key is valid and shown once:\n{secret}", err=True)
        raise


def _write(output: str) -> None:
    # Without a standard output, `click.echo` would do nothing.
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    click.echo(output)
