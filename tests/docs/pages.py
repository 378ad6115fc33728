"""Code blocks and commands of the documents."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield the page and number, and the text, of every block of a language."""
    for page in PAGES:
        found = [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]
        yield from ((f"{page.name} {number}", text) for number, text in enumerate(found, 1))


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the block and the arguments of every command in shell blocks that runs a program."""
    for where, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\||;|>|\$\(", line.strip().removeprefix("$ ")):
                words = shlex.split(part.strip().rstrip(")"), comments=True)
                while words and re.fullmatch(r"\w+=.*|uvx|--from|\S*\.whl(\[.*\])?", words[0]):
                    words.pop(0)
                if words[:1] == [program]:
                    yield where, words[1:]
