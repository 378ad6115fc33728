"""The architecture page names only existing code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.code_names import wrong_names
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = {"unisono": ROOT / "proxy" / "unisono", "unisono_adapters": ROOT / "adapters" / "unisono_adapters"}


def test_every_name_on_the_page_is_defined_in_its_linked_file() -> None:
    assert list(wrong_names(PAGE.read_text(), PAGE.parent)) == []


def test_every_package_has_a_row() -> None:
    _, _, table = PAGE.read_text().partition("\n## Packages\n")
    named = {word for row in table.splitlines() if row.startswith("| `") for word in row.split("|")[1].split("`")[1::2]}
    folders = {path.name for path in PACKAGES["unisono"].iterdir() if (path / "__init__.py").is_file()}
    assert named == folders | {"app", "errors", "unisono_adapters"}


CODE = """
TABLE: dict = {}

class Kept:
    def run(self): ...

def helper(): ...
"""
LINK = "[`code.py`](code.py)"
WRONG = {
    "an absent file": ("[`gone.py`](gone.py)", "gone.py: there is no file gone.py"),
    "a link that differs from its label": ("[`b/code.py`](code.py)", "b/code.py: the link leads to code.py"),
    "an unknown class": (f"| {LINK} `Kept`, `Gone` |", "Gone: not defined in code.py"),
    "an unknown method": (f"| {LINK} `Kept.run`, `Kept.stop` |", "Kept.stop: not defined in code.py"),
    "an unknown function": (f"| {LINK} `helper`, `render` |", "render: not defined in code.py"),
    "an unknown constant": (f"| {LINK} `TABLE`, `OTHER` |", "OTHER: not defined in code.py"),
    "a name without a link": ("| `Kept` |", "Kept: not defined in a linked file"),
    "a link in another cell": (f"| `Kept` | {LINK} |", "Kept: not defined in a linked file"),
    "a name on the line before its link": (f"The class `Gone`\n({LINK}) is one.", "Gone: not defined in code.py"),
}


@pytest.mark.parametrize(("page", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_name_is_found(page: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    assert list(wrong_names(page, tmp_path)) == [error]


@pytest.mark.parametrize("name", ["BodyLimits", "to_generation_request", "Renderer.prompt", "STEPS", "render.py"])
def test_a_renamed_name_on_the_page_is_found(name: str) -> None:
    text = PAGE.read_text()
    assert name in text
    assert list(wrong_names(text.replace(name, f"Un{name}"), PAGE.parent)) != []


def test_packages_values_and_commands_are_not_checked(tmp_path: Path) -> None:
    assert list(wrong_names("`core` opens `final`: `unisono serve` reads `pyproject.toml`.", tmp_path)) == []
