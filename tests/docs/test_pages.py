"""Documents: generated pages are current, configurations load, commands and links exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml

from tests.docs import mended, settings
from tests.docs.pages import PAGES, ROOT, blocks, commands
from unisono import __version__
from unisono.cli import main
from unisono.config import Config, ModelRegistry, load
from unisono.core.recovery_rules import RULES
from unisono.errors import UnisonoError
from unisono.hooks.text_guardrail import Blocked

GENERATED: dict[str, tuple[Callable[[], str], str]] = {
    "configuration": (settings.page, settings.COMMAND),
    "recoveries": (mended.page, mended.COMMAND),
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_current(name: str) -> None:
    page, command = GENERATED[name]
    assert (ROOT / "docs" / f"{name}.md").read_text() == page(), command


def test_every_recovery_rule_has_an_example() -> None:
    assert re.findall(r"^### `(.+)`$", mended.page(), re.M) == list(RULES)


def test_every_setting_has_a_description() -> None:
    assert [line for line in settings.page().splitlines() if line.endswith("|  |") and "---" not in line] == []


CONFIGS = [
    pytest.param(text, id=where)
    for where, text in blocks("yaml")
    # LiteLLM's own file is tested by another suite, which runs LiteLLM's proxy with it.
    if set(yaml.safe_load(text)) <= set(Config.model_fields) and not where.startswith("litellm-provider.md")
]


@pytest.mark.parametrize("text", CONFIGS)
def test_a_configuration_on_a_page_loads_without_a_warning(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    loaded = load(path, dict.fromkeys(re.findall(r"os\.environ/(\w+)", text), "a-secret-of-this-test"))
    assert loaded.warnings == ()
    ModelRegistry(loaded.config)


COMMANDS = [pytest.param(words, id=f"{where}: {' '.join(words)}") for where, words in commands("unisono")]


def test_the_pages_have_commands_and_configurations() -> None:
    assert len(COMMANDS) > 5
    assert len(CONFIGS) > 5


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_on_a_page_exists_with_its_options(words: list[str]) -> None:
    command: click.Command = main
    context = click.Context(main)
    shortened = "..." in words
    words = [word for word in words if word != "..."]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words.pop(0))
        assert found is not None
        command, context = found, click.Context(found, parent=context)
    given, _, _ = command.make_parser(context).parse_args(list(words))
    missing = [parameter.name for parameter in command.params if parameter.required and not given.get(parameter.name)]
    assert shortened or missing == []


MAKE = sorted({words[0] for _, words in commands("make") if words})


def test_make_targets_on_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert set(MAKE) <= targets


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_linked_files_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return explicit anchors of a page, and those that code hosts derive from headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    explicit = re.findall(r'<a id="([^"]+)"></a>', text)
    return {*explicit, *(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in words)}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_tables_have_one_row_per_line(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if "| --- |" in line and not re.fullmatch(r"[\s|:-]+", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_anchors_of_links_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#\s]*\.md|)#([^)\s]+)\)", page.read_text())
    assert [anchor for path, anchor in links if anchor not in anchors(page.parent / path if path else page)] == []


SOURCE_ROOTS = (ROOT, ROOT / "proxy/unisono")


def test_modules_of_the_symptom_table_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## From a symptom to the code")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+ \| (`.+) \|$", table, re.M)
    paths = [path for row in rows for path in re.findall(r"`(.+?)`", row)]
    assert len(rows) > 12
    assert [path for path in paths if not any((root / path).exists() for root in SOURCE_ROOTS)] == []


def kinds_of(error: type[UnisonoError]) -> Iterator[type[UnisonoError]]:
    yield error
    for kind in error.__subclasses__():
        yield from kinds_of(kind)


def test_the_api_page_lists_all_error_codes() -> None:
    listed = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text(), re.M)
    # Tests define errors too.
    own = [Blocked, *(kind for kind in kinds_of(UnisonoError) if kind.__module__ == UnisonoError.__module__)]
    assert {(int(status), code) for status, code in listed} == {(kind.status, kind.code) for kind in own}
    assert len(listed) == len({*listed})


def test_the_pages_install_unisono_from_a_wheel() -> None:
    """Package indexes do not have this project.

    `pip install unisono` would install nothing or a foreign package.
    """
    installed = [word for where, words in commands("pip") for word in words if "unisono" in word]
    assert installed
    assert [word for word in installed if not re.match(r"dist/unisono-[\d.]+-py3-none-any\.whl(\[|$)", word)] == []
    inline = [page.name for page in PAGES if re.search(r"`pip install '?unisono", page.read_text())]
    assert inline == []


def test_wheels_on_the_pages_are_of_this_version() -> None:
    named = {name for page in PAGES for name in re.findall(r"unisono-([\d.]+)-py3", page.read_text())}
    assert named == {__version__}
