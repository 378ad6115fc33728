"""Each check of `make lint` reports a violation and accepts correct text or code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint import structure, words

CONTROLS = {
    "docstring": '"""Whoever asked is told what is kept behind it."""\n',
    "comment": "# Nobody said what goes behind it.\n",
    "message": 'def fail() -> None:\n    raise ValueError("nobody knows what was asked")\n',
    "log message": 'def fail() -> None:\n    log.warning("somebody has taken what is kept")\n',
}


@pytest.mark.parametrize("source", CONTROLS.values(), ids=CONTROLS)
def test_listed_words_are_found_in_every_kind_of_text(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert len(list(words.check_words([path]))) == 1


def test_code_and_allowed_phrases_are_not_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Run it behind a proxy: `asked` is a field.\n```\nsaid told kept\n```\n")
    assert list(words.check_words([page])) == []


def test_long_first_lines_and_too_many_clause_openings_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'"""{"Long " * 30}."""\n')
    assert len(list(words.check_first_lines([path]))) == 1
    path.write_text("".join(f'def f{n}() -> None:\n    """What it does."""\n' for n in range(41)))
    assert len(list(words.check_first_lines([path]))) == 1


def test_a_missing_constant_named_in_a_docstring_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Read up to `MAX_BYTES`."""\nMAX_BYTES = 3\n')
    assert list(words.check_constants([path])) == []
    path.write_text('"""Read up to `MOST_BYTES`."""\nMAX_BYTES = 3\n')
    assert len(list(words.check_constants([path]))) == 1


def test_a_shared_class_name_is_found_except_for_a_protocol(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("class Store(Protocol): ...\n\nclass Store: ...\n")
    assert list(structure.check_class_names([path])) == []
    path.write_text("class Store: ...\n\nclass Store: ...\n")
    assert len(list(structure.check_class_names([path]))) == 1


def test_the_length_limit_includes_nested_functions(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def outer() -> None:\n    def inner() -> None: ...\n" + "    inner()\n" * 50)
    assert len(list(structure.check_function_lengths([path]))) == 1


CYCLES = {
    "modules": {"a.py": "from pkg import b\n", "b.py": "import pkg.a\n"},
    "deferred import": {"a.py": "from pkg import b\n", "b.py": "def f():\n    from pkg.a import x\n"},
    "packages": {
        "one/x.py": "from pkg.two import y\n",
        "two/y.py": "",
        "two/z.py": "import pkg.one.w\n",
        "one/w.py": "",
    },
}


@pytest.mark.parametrize("files", CYCLES.values(), ids=CYCLES)
def test_import_cycles_are_found(tmp_path: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    assert list(structure.check_cycles({"pkg": tmp_path})) != []


def test_type_checking_imports_are_not_cycles(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from pkg import b\n")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    from pkg import a\n")
    assert list(structure.check_cycles({"pkg": tmp_path})) == []
