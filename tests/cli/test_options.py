"""Command-line arguments that are refused: not valid UTF-8, or without effect."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from unisono.cli import main

# Bytes that are not valid UTF-8, as Python decodes arguments.
INVALID_UTF8 = "a\udcff"


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def arguments_for(param: click.Parameter, value: str) -> list[str]:
    return [param.opts[-1], value] if isinstance(param, click.Option) else [value]


def valid_value(param: click.Parameter) -> str:
    if isinstance(param.type, click.Choice):
        return param.type.choices[0]
    return __file__ if isinstance(param.type, click.Path) else "x"


def arguments_with_invalid(command: click.Command, invalid: click.Parameter) -> list[str]:
    """Return all required arguments and the given parameter with invalid UTF-8."""
    params = [param for param in command.params if param.required or param is invalid]
    return [
        argument
        for param in params
        for argument in arguments_for(param, INVALID_UTF8 if param is invalid else valid_value(param))
    ]


CASES = {
    " ".join((*path, str(param.name))): [*path, *arguments_with_invalid(command, param)]
    for path, command in commands(main)
    for param in command.params
    # Paths, and arguments for another program, may be any bytes.
    if not isinstance(param.type, click.Path) and param.type is not click.UNPROCESSED
    if not (isinstance(param, click.Option) and param.is_flag)
}


@pytest.mark.parametrize("arguments", [*CASES.values(), ["trace", INVALID_UTF8]], ids=[*CASES, "trace id"])
def test_an_argument_that_is_not_utf8_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert "a\\udcff" in result.output.splitlines()[-1]


def test_a_file_name_need_not_be_utf8() -> None:
    result = CliRunner().invoke(main, ["trace", f"{INVALID_UTF8}.json"])
    assert result.exit_code == 1
    assert "No such file" in result.output


def groups(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Group]]:
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from groups(command, *path, name)


IGNORED = [
    [*path, param.opts[0], valid_value(param), name]
    for path, group in groups(main)
    for param in group.params
    if isinstance(param, click.Option) and not param.is_eager
    for name in group.commands
]


@pytest.mark.parametrize("arguments", IGNORED, ids=" ".join)
def test_an_option_of_a_group_is_refused_in_front_of_a_command(arguments: list[str]) -> None:
    *_, option, _, command = arguments
    result = CliRunner().invoke(main, [*arguments, "x"])
    assert (result.exit_code, f"Write {option} after the command `{command}`." in result.output) == (2, True)


def test_a_variable_with_the_configuration_does_not_precede_a_command() -> None:
    result = CliRunner(env={"UNISONO_CONFIG": "none.yaml"}).invoke(main, ["models", "drain", "x"])
    assert "none.yaml: cannot read the file" in result.output


@pytest.mark.parametrize("arguments", [["keys", "list"], ["usage"], ["models", "drain", "x"]], ids=" ".join)
def test_a_named_configuration_is_refused_next_to_the_address_of_a_gateway(arguments: list[str]) -> None:
    both = [*arguments, "--config", "none.yaml", "--url", "http://127.0.0.1:9"]
    result = CliRunner().invoke(main, both)
    assert (result.exit_code, "Give either --config or --url." in result.output) == (2, True)
