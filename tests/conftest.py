"""Settings for all tests.

Hypothesis examples have no deadline, so that a slow machine causes no failures. Gateways never write to the data folder
of the user who runs the tests.
"""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.depth import DEEP, examples
from tests.mcp.conftest import Upstream, start_upstream
from tests.sampling import mark_sampled
from unisono.harmony.encoding import Encoding, load_encoding

settings.register_profile(
    "project",
    deadline=None,
    max_examples=examples(100),
    derandomize=not DEEP,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")

# `make test-parser` runs the tests with the parser of openai-harmony.
if os.environ.get("TEST_PARSER") == "library":
    Encoding.uses_library_parser = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/M", help="run only the modules of part N of M parts")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the modules of other parts. The parts are disjoint and complete by construction."""
    part = config.getoption("--part")
    if part is None or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    number, _, parts = part.partition("/")
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if zlib.crc32(path.encode()) % int(parts) != int(number) - 1 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_sampled(items)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """Disable garbage collection until the tests run: it takes a quarter of the time for collecting all modules."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, which would visit their million objects again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _separate_data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Data folder of gateways without a `store:`, in this process and in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data-home")))
        yield


@pytest.fixture(scope="session")
def _tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    # Its process imports the SDK, which takes two seconds of processor time.
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, server):
        yield server


@pytest.fixture(scope="module")
def upstream(_tool_server: Upstream) -> Upstream:
    """The shared tool server, without notes of other modules. Tests that change or end a server start their own."""
    _tool_server.notes.unlink(missing_ok=True)
    return _tool_server


@pytest.fixture(scope="session")
def encoding() -> Encoding:
    """Harmony encoding, loaded once per session."""
    return load_encoding()
