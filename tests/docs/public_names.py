"""Public names of the gateway as sorted lines, to find names that a change removes.

`python -m tests.docs.public_names` prints the names. `--source FOLDER` prints those of another checkout, with the
installed dependencies. `--missing FILE` prints only the names in FILE that this version lacks.
`python -m tests.docs.public_names > tests/golden/public_names.txt` updates the list that a test compares.

This module imports `unisono` only where it reads names, because modules have other names in older versions.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "public_names.txt"
COMMAND = f"python -m tests.docs.public_names > {GOLDEN.relative_to(ROOT)}"
# A gateway with every optional route and metric.
CONFIG: Mapping[str, Any] = {
    "model_list": [
        {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": "http://127.0.0.1:9"}}
    ],
    "store": {"url": "memory://"},
    "unisono": {"raw_completions": True, "metrics_per_key": True},
}
IMPORT = "import "


def public_names(source: Path = ROOT) -> list[str]:
    """Return all public names of the checkout `source`.

    It must be the checkout that Python imports.
    """
    found = {
        *_of_routes(),
        *_of_configuration(),
        *_of_commands(),
        *_of_metrics(),
        *_of_errors(),
        *_of_recoveries(),
        *_of_entry_points(source),
        *_of_sources(source),
        *_of_documented_names(source),
    }
    return sorted(found)


def missing(names: Iterable[str], present: Collection[str]) -> list[str]:
    """Return the names that are not `present`.

    A former name that can still be imported is not missing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return [
            name
            for name in names
            if name not in present and not (name.startswith(IMPORT) and _is_importable(name.removeprefix(IMPORT)))
        ]


# -- HTTP


def _app() -> Any:
    app = importlib.import_module("unisono.app")
    config = importlib.import_module("unisono.config")
    return app.build(config.parse(CONFIG, {}).config)


def _of_routes() -> Iterator[str]:
    """Yield each route with its method, and the fields of the OpenAPI document."""
    app = _app()
    # The application lists all routes after the first request that needs FastAPI.
    document = asyncio.run(_get(app, "/openapi.json"))
    for method, path in _routes(app.routes):
        yield f"route {method} {path}"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if isinstance(operation, dict):
                yield from _of_operation(f"{method.upper()} {path}", operation, document)


def _routes(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _routes(inner.routes)
        elif hasattr(route, "methods"):
            yield from ((method, route.path) for method in route.methods or ())
        else:
            yield "WEBSOCKET", route.path


async def _get(app: Any, path: str) -> Any:
    sent: list[Mapping[str, Any]] = []

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    return json.loads(b"".join(message.get("body", b"") for message in sent))


def _of_operation(name: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        parameter = _resolved(parameter, document)
        yield f"parameter {name} {parameter['in']} {parameter['name']}"
    for content in _resolved(operation.get("requestBody", {}), document).get("content", {}).values():
        yield from (f"request field {name} {field}" for field in _fields(content.get("schema", {}), document))
    for status, answer in operation.get("responses", {}).items():
        answer = _resolved(answer, document)
        if not status.startswith("2"):
            continue
        yield from (f"response header {name} {header}" for header in answer.get("headers", {}))
        for content in answer.get("content", {}).values():
            yield from (f"response field {name} {field}" for field in _fields(content.get("schema", {}), document))


def _resolved(value: Any, document: Mapping[str, Any]) -> Any:
    while "$ref" in value:
        found: Any = document
        for part in value["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        value = found
    return value


def _fields(schema: Any, document: Mapping[str, Any], depth: int = 3) -> Iterator[str]:
    """Yield the paths of the properties of a schema, to a limited depth."""
    if not isinstance(schema, dict) or not depth:
        return
    schema = _resolved(schema, document)
    for name, inner in schema.get("properties", {}).items():
        yield name
        yield from (f"{name}.{field}" for field in _fields(inner, document, depth - 1))
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _fields(part, document, depth)
    if "items" in schema:
        yield from _fields(schema["items"], document, depth)


# -- configuration and command line


def _of_configuration() -> Iterator[str]:
    config = importlib.import_module("unisono.config")
    yield from _of_section(config.Config, "")
    yield from (f"backend kind {kind}" for kind in (*config.KINDS, *config.KIND_ALIASES))


def _of_section(model: Any, path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        for key in {name, field.alias or name}:
            yield f"config {path}{key}"
        for kind, suffix in _parts_of_type(field.annotation):
            if hasattr(kind, "model_fields"):
                yield from _of_section(kind, f"{path}{name}{suffix}.")
            elif get_origin(kind) is Literal:
                yield from (f"config {path}{name}{suffix} = {value}" for value in get_args(kind))


def _parts_of_type(kind: Any, suffix: str = "") -> Iterator[tuple[Any, str]]:
    yield kind, suffix
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _parts_of_type(inner[0], suffix)
    elif origin is tuple:
        yield from _parts_of_type(inner[0], f"{suffix}[]")
    elif origin is dict:
        yield from _parts_of_type(inner[1], f"{suffix}.NAME")
    elif origin in (Union, UnionType):
        for part in inner:
            yield from _parts_of_type(part, suffix)


def _of_commands() -> Iterator[str]:
    import click

    def walk(command: click.Command, words: str) -> Iterator[str]:
        yield f"command {words}"
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            if isinstance(parameter, click.Argument):
                names = [str(parameter.name).upper()]
            yield from (f"command {words} {name}" for name in names)
            if isinstance(parameter.type, click.Choice):
                yield from (f"command {words} {names[0]} {choice}" for choice in parameter.type.choices)
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                yield from walk(inner, f"{words} {name}")

    yield from walk(importlib.import_module("unisono.cli").main, "unisono")


# -- metrics, errors, recoveries, entry points


def _of_metrics() -> Iterator[str]:
    from prometheus_client.metrics import MetricWrapperBase

    app = _app()
    for metric in gc.get_objects():
        # `isinstance` asks the object, which fails for a weak proxy whose object is gone.
        if issubclass(type(metric), MetricWrapperBase) and metric._name.startswith("unisono_"):
            labels = ", ".join(metric._labelnames)
            total = "_total" if metric._type == "counter" else ""
            yield f"metric {metric._type} {metric._name}{total}({labels})"
    del app


def _of_errors() -> Iterator[str]:
    def walk(error: Any) -> Iterator[Any]:
        yield error
        for kind in error.__subclasses__():
            yield from walk(kind)

    base = importlib.import_module("unisono.errors").UnisonoError
    importlib.import_module("unisono.hooks.blocklist")
    kinds = [kind for kind in walk(base) if kind.__module__.startswith("unisono.")]
    yield from (f"error {kind.status} {kind.type} {kind.code}" for kind in kinds)


def _of_recoveries() -> Iterator[str]:
    try:
        rules = importlib.import_module("unisono.core.recovery_rules")
    except ModuleNotFoundError:
        rules = importlib.import_module("unisono.core.rules")
    yield from (f"recovery {rule}" for rule in rules.RULES)


def _of_entry_points(source: Path) -> Iterator[str]:
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    yield from (f"extra {name}" for name in project["optional-dependencies"])
    for group, found in {"console_scripts": project["scripts"], **project["entry-points"]}.items():
        yield from (f"entry point {group} {name}" for name in found)


# -- names in source files

_HEADER = re.compile(r"x-unisono-[a-z-]*[a-z]", re.I)
_VARIABLE = re.compile(r"(UNISONO|XDG|OTEL|PROMETHEUS)_[A-Z0-9_]*[A-Z0-9]|NO_COLOR")


def _of_sources(source: Path) -> Iterator[str]:
    """Yield headers, environment variables, and the `extra` keys of log messages."""
    for path in [*(source / "proxy").rglob("*.py"), *(source / "adapters").rglob("*.py")]:
        text = path.read_text()
        if not (_HEADER.search(text) or _VARIABLE.search(text) or "extra" in text):
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from (f"header {name.lower()}" for name in _HEADER.findall(node.value))
                if _VARIABLE.fullmatch(node.value):
                    yield f"environment {node.value}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "request_log.")):
                yield from (f"log extra {key}" for key in _extra_keys(node, tree))


def _extra_keys(call: ast.Call, tree: ast.Module) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg != "extra":
            continue
        names = {node.id for node in ast.walk(keyword.value) if isinstance(node, ast.Name)}
        yield from _dict_keys(keyword.value)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id in names for target in targets):
                    yield from _dict_keys(node.value)


def _dict_keys(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Dict):
            yield from (str(key.value) for key in node.keys if isinstance(key, ast.Constant))


# -- names that authors of hooks and adapters import

_PAGES = ("adapters.md", "hooks.md")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
_DOTTED = re.compile(r"`(unisono(?:_adapters)?(?:\.\w+)+)")


def _of_documented_names(source: Path) -> Iterator[str]:
    """Yield each documented name with its attributes.

    For a documented module, yield everything that it defines.
    """
    for name in set(_documented(source)):
        yield from _of_object(name)


def _documented(source: Path) -> Iterator[str]:
    for page in _PAGES:
        text = (source / "docs" / page).read_text()
        yield from filter(_is_importable, _DOTTED.findall(text))
        for block in _BLOCK.findall(text):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("unisono"):
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)
                    # Hooks and adapters also use the other classes of these modules.
                    yield from [str(node.module)] if str(node.module).startswith("unisono.core.") else []


def _of_object(path: str) -> Iterator[str]:
    yield IMPORT + path
    found = _imported(path)
    if inspect.ismodule(found):
        if not path.rpartition(".")[2].startswith("_"):
            for name, value in vars(found).items():
                if not name.startswith("_") and getattr(value, "__module__", None) == found.__name__:
                    yield from _of_object(f"{path}.{name}")
    elif inspect.isclass(found):
        yield from (f"{IMPORT}{path}.{name}" for name in _attributes(found))


def _attributes(kind: type) -> set[str]:
    inherited = {name for base in (object, Exception, str) for name in dir(base)}
    annotated = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    return {name for name in (annotated | set(dir(kind))) - inherited if not name.startswith("_")}


def _is_importable(path: str) -> bool:
    try:
        _imported(path)
    except (ImportError, AttributeError):
        return False
    return True


def _imported(path: str) -> Any:
    """Return the object of a dotted path: a module, a name in it, or an attribute of a class."""
    module, names = path, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            if not module:
                raise
            names.insert(0, name)
    for name in names:
        if inspect.isclass(found) and name in _attributes(found):
            found = getattr(found, name, None)
        else:
            found = getattr(found, name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the public names of the gateway.")
    parser.add_argument("--source", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--missing", type=Path, help="print only the names of this file that are missing")
    options = parser.parse_args()
    source = options.source.resolve()
    if source != ROOT and "PUBLIC_NAMES_SOURCE" not in os.environ:
        paths = os.pathsep.join(str(source / package) for package in ("proxy", "adapters"))
        environment = {**os.environ, "PYTHONPATH": paths, "PUBLIC_NAMES_SOURCE": str(source)}
        command = [sys.executable, "-m", "tests.docs.public_names", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    names = public_names(source)
    if options.missing:
        names = missing(options.missing.read_text().splitlines(), frozenset(names))
    sys.stdout.writelines(f"{name}\n" for name in names)


if __name__ == "__main__":
    main()
