"""Rules of the project: sizes, docstrings, no leftovers, folder layout, versions, CI and image."""

from __future__ import annotations

import ast
import io
import os
import re
import stat
import subprocess
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.deployment.test_release import DATA_FILES, data_files, packaged_files
from tests.lint.syntax import statements
from unisono import __version__

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "proxy").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCH = sorted((ROOT / "bench").rglob("*.py"))

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50
# Limits of a class of the engine, whose objects hold the state of an answer.
MAX_CLASS_LINES = 250
MAX_FIELDS = 12


# Only modules that contain the searched words are parsed, and no tree is stored: that halves the time of these tests.
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def offences(paths: list[Path], offence: Callable[[Path], object]) -> dict[str, object]:
    """Return the offending paths with the result of `offence`."""
    results = {str(path.relative_to(ROOT)): offence(path) for path in paths}
    return {name: result for name, result in results.items() if result}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_source_files_are_found() -> None:
    assert len(SOURCES) > 30
    assert len(TESTS) > 20


def test_modules_and_functions_are_short() -> None:
    assert offences(SOURCES, lambda path: len(text_of(path).splitlines()) > MAX_MODULE_LINES) == {}
    assert offences(SOURCES, long_functions) == {}


def long_functions(path: Path) -> list[str]:
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in functions(tree_of(path))
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def test_classes_of_the_engine_are_small() -> None:
    assert offences(sorted((ROOT / "proxy/unisono/engine").rglob("*.py")), large_classes) == {}


def large_classes(path: Path) -> list[str]:
    sizes = [
        (node.name, (node.end_lineno or 0) - node.lineno + 1, len(fields_of(node)))
        for node in statements(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]
    return [
        f"{name}: {lines} lines, {fields} fields"
        for name, lines, fields in sizes
        if lines > MAX_CLASS_LINES or fields > MAX_FIELDS
    ]


def fields_of(declared: ast.ClassDef) -> set[str]:
    """Return the fields that a class declares or that its `__init__` sets."""
    fields = {
        node.target.id
        for node in declared.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for init in (node for node in declared.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
        stored = [
            node for node in ast.walk(init) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ]
        fields |= {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return fields


def test_every_module_has_a_docstring() -> None:
    assert offences([*SOURCES, *TESTS, *BENCH], has_no_docstring) == {}


def has_no_docstring(path: Path) -> bool:
    if text_of(path).startswith('"""'):
        return False
    tree = tree_of(path)
    return bool(tree.body) and not ast.get_docstring(tree)


LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP|placeholder)\b|NotImplementedError|\bpdb\b|breakpoint\(")
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "shared"}


def test_no_todo_vague_module_name_or_empty_function_remains() -> None:
    assert offences(SOURCES, lambda path: path.stem in VAGUE_NAMES) == {}
    assert offences(SOURCES, leftovers) == {}
    assert offences(SOURCES, empty_functions) == {}


def leftovers(path: Path) -> list[str]:
    return [line.strip() for line in text_of(path).splitlines() if LEFTOVERS.search(line)]


def empty_functions(path: Path) -> list[str]:
    if not re.search(r"(^|:)\s*(pass|\.\.\.)\s*(#|$)", text_of(path), re.M):
        return []
    tree = tree_of(path)
    classes = [node for node in statements(tree) if isinstance(node, ast.ClassDef)]
    protocols = [node for node in classes if any("Protocol" in ast.dump(base) for base in node.bases)]
    declared = {id(part) for protocol in protocols for part in protocol.body}
    return [node.name for node in functions(tree) if id(node) not in declared and does_nothing(node)]


def does_nothing(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a body is only `pass` or `...`; a body of only a docstring is allowed."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return bool(body) and all(
        isinstance(part, ast.Pass)
        or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and part.value.value is ...)
        for part in body
    )


def test_only_error_responses_catches_all_exceptions() -> None:
    """`api/error_responses.py` turns any exception into a response; elsewhere a broad `except` hides faults."""
    answering = ROOT / "proxy" / "unisono" / "api" / "error_responses.py"
    assert offences([path for path in SOURCES if path != answering], broad_catches) == {}


def broad_catches(path: Path) -> list[int]:
    """Return the lines that catch all exceptions without raising or using them."""
    broad: list[int] = []
    if not re.search(r"except\s*:|except\s+(Base)?Exception\b", text_of(path)):
        return broad
    for node in statements(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.id if isinstance(node.type, ast.Name) else ""
        raises = any(isinstance(part, ast.Raise) for part in ast.walk(node))
        used = node.name and any(isinstance(part, ast.Name) and part.id == node.name for part in ast.walk(node))
        if (node.type is None or caught in {"Exception", "BaseException"}) and not raises and not used:
            broad.append(node.lineno)
    return broad


def test_no_code_swallows_a_cancellation() -> None:
    """Code that awaits a task it cancelled cannot tell its own cancellation from the caller's.

    `core/tasks.py` waits for cancelled tasks without catching `CancelledError`.
    """
    assert offences([*SOURCES, *TESTS, *BENCH], swallowed_cancellations) == {}


CANCELLATIONS = {"CancelledError", "BaseException"}


def swallowed_cancellations(path: Path) -> list[int]:
    """Return the lines that suppress a cancellation, or catch it without raising it again."""
    swallowed: list[int] = []
    if not any(name in text_of(path) for name in CANCELLATIONS):
        return swallowed
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            suppressed = any(names_in(kind) & CANCELLATIONS for kind in node.args)
            is_swallowed = "suppress" in names_in(node.func) and suppressed
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            raised = any(isinstance(part, ast.Raise) for part in ast.walk(node))
            is_swallowed = "CancelledError" in names_in(node.type) and not raised
        else:
            continue
        if is_swallowed:
            swallowed.append(node.lineno)
    return swallowed


def names_in(node: ast.AST) -> set[str]:
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def test_every_test_can_be_collected_and_can_fail() -> None:
    assert offences(TESTS, uncollected_tests) == {}
    assert offences(TESTS, asserts_that_always_hold) == {}


def uncollected_tests(path: Path) -> list[str]:
    """Return the functions that pytest does not collect because of a missing underscore."""
    if not re.search(r"def test(?!_)", text_of(path)):
        return []
    names = [node.name for node in functions(tree_of(path))]
    return [name for name in names if name.startswith("test") and not name.startswith("test_")]


def asserts_that_always_hold(path: Path) -> list[int]:
    return [node.lineno for node in statements(tree_of(path)) if isinstance(node, ast.Assert) and can_hide(node.test)]


def can_hide(test: ast.expr) -> bool:
    """Return whether an assertion holds for all values of its variables, or for one side of its condition."""
    match test:
        case ast.Constant() | ast.JoinedStr() | ast.Lambda() | ast.GeneratorExp():
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return bool(parts)
        case ast.IfExp(body=body, orelse=orelse):
            return can_hide(body) or can_hide(orelse)
        case ast.BoolOp(values=values):
            return any(map(can_hide, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return can_hide(operand)
    return False


ALWAYS_HOLD = {
    "constant": "assert True",
    "tuple": "assert (x == 1, 'reason')",
    "condition with a constant": "assert x if y else True",
    "alternative that is constant": "assert x or not False",
}


@pytest.mark.parametrize("source", ALWAYS_HOLD.values(), ids=ALWAYS_HOLD)
def test_an_assertion_that_always_holds_is_found(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"assert x == (1, True)\nassert x if y else z\n{source}\n")
    assert asserts_that_always_hold(path) == [3]


def test_a_test_without_the_underscore_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def test_a(): ...\n\nasync def testing_b(): ...\n")
    assert uncollected_tests(path) == ["testing_b"]


COMMENTED_CODE = re.compile(r"#\s*(def |class |import |from \w+ import |return |if .+:$|for .+:$|\w+ = \w+\()")


def test_no_code_is_commented_out() -> None:
    assert offences([*SOURCES, *TESTS], commented_code) == {}


def commented_code(path: Path) -> list[str]:
    text = text_of(path)
    # Few modules have a line that looks like code in a comment; only those are tokenized.
    if COMMENTED_CODE.search(text) is None:
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return [comment for comment in comments if COMMENTED_CODE.match(comment)]


def test_every_test_folder_is_named_after_a_package_or_listed() -> None:
    packages = {path.name for package in ("proxy/unisono", "adapters") for path in (ROOT / package).iterdir()}
    others = {
        "adapters",
        "agents",
        "bench",
        "chaos",
        "compat",
        "contract",
        "deployment",
        "docs",
        "e2e",
        "engines",
        "engines_all",
        "failover",
        "fakes",
        "fields",
        "golden",
        "guardrails",
        "lint",
        "litellm_files",
        "lm_eval",
        "patterns",
        "phoenix",
        "providers",
        "soak",
        "structured",
        "webui",
        "__pycache__",
    }
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert folders - packages - others == set()


def test_the_version_is_the_same_in_all_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_entry_point_of_the_project_can_be_loaded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, points in project["entry-points"].items():
        installed = {point.name: point for point in entry_points(group=group)}
        assert installed.keys() >= points.keys()
        assert all(callable(installed[name].load()) for name in points)


def test_the_packages_contain_only_the_listed_data_files() -> None:
    assert data_files(packaged_files()) == DATA_FILES


def test_ci_runs_only_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]


MAKE_TARGETS = (
    "serve",
    "test",
    "unit",
    "test-sdk",
    "test-clients",
    "test-slow",
    "test-deep",
    "fmt",
    "bench",
    "clean",
    "help",
)


def test_make_has_its_documented_targets() -> None:
    subprocess.run(["make", "--dry-run", *MAKE_TARGETS], cwd=ROOT, capture_output=True, check=True, timeout=60)


def test_the_image_is_built_from_files_that_exist() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    copied = [source for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M) for source in line.split()[:-1]]
    assert {"proxy", "adapters", "pyproject.toml", "uv.lock"} <= set(copied)
    assert [source for source in copied if not (ROOT / source).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in copied} <= set(ignored)
    assert re.search(r"^USER (?!root)", text, re.M)


def test_the_smallest_configuration_in_the_readme_loads(tmp_path: Path) -> None:
    from unisono.app import build
    from unisono.config import load

    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        path = tmp_path / "config.yaml"
        path.write_text(block)
        names = re.findall(r"os\.environ/(\w+)", block)
        loaded = load(path, dict.fromkeys(names, "some-secret"))
        assert loaded.warnings == ()
        build(loaded.config)
        assert yaml.safe_load(block)["model_list"]


LOCKS = [path for path in sorted((ROOT / "tests").rglob("uv.lock")) if 'name = "unisono"' in path.read_text()]


@pytest.mark.parametrize("lock", LOCKS, ids=[path.parent.name for path in LOCKS])
def test_locks_of_the_tests_have_the_dependencies_of_the_project(lock: Path) -> None:
    """`uv lock --check` needs every package's metadata; the dependencies themselves are in the lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = next(each for each in tomllib.loads(lock.read_text())["package"] if each["name"] == "unisono")
    locked = {(each["name"], each.get("specifier", "")) for each in found["metadata"]["requires-dist"]}
    stated = [*project["dependencies"], *(each for some in project["optional-dependencies"].values() for each in some)]
    wanted = {(each.name, specifiers(each)) for each in map(Requirement, stated)}
    own = {("unisono", "")}
    assert {(name, ordered(specifier)) for name, specifier in locked} - own == wanted - own, (
        f"run `uv lock --project {lock.parent.relative_to(ROOT)}`"
    )


def specifiers(requirement: Requirement) -> str:
    return ordered(str(requirement.specifier))


def ordered(specifier: str) -> str:
    return ",".join(sorted(filter(None, specifier.split(","))))


def test_an_unknown_client_is_an_error_of_the_client_suites() -> None:
    """With an unknown name nothing would run, and nothing would fail."""
    ran = subprocess.run(
        [ROOT / "tests/e2e/run"], env=os.environ | {"CLIENTS": "openai.3"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "unknown client 'openai.3'" in ran.stderr
