"""What is given to commands: words of any kind, by whoever has another encoding."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from unisono.cli import main

HALF = "a\udcff"
"""Bytes that are no UTF-8, as Python hands them over."""


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def words(param: click.Parameter, value: str) -> list[str]:
    return [param.opts[-1], value] if isinstance(param, click.Option) else [value]


def asked(command: click.Command, with_half: click.Parameter) -> list[str]:
    """All that it needs, and one word that is none."""
    needed = [param for param in command.params if param.required or param is with_half]
    return [word for param in needed for word in words(param, HALF if param is with_half else "x")]


ASKED = {
    " ".join((*path, str(param.name))): [*path, *asked(command, param)]
    for path, command in commands(main)
    for param in command.params
    if not isinstance(param.type, click.Path) and not (isinstance(param, click.Option) and param.is_flag)
}


@pytest.mark.parametrize("arguments", [*ASKED.values(), ["trace", HALF]], ids=[*ASKED, "trace id"])
def test_words_that_are_no_utf_8_are_refused_in_a_line(arguments: list[str]) -> None:
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2, refused.output
    assert "a\\udcff" in refused.output.splitlines()[-1]


def test_a_file_may_have_any_name() -> None:
    looked = CliRunner().invoke(main, ["trace", f"{HALF}.json"])
    assert looked.exit_code == 1
    assert "No such file" in looked.output
