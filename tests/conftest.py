"""Settings of every test: examples are judged by what they find, not by how long a busy machine takes to draw them, and
nothing is kept where whoever runs the tests keeps their own."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.depth import DEEP, examples
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what the quick run leaves out of a test with the mark `sampled`."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        mark = of_one[0].get_closest_marker("sampled")
        assert mark is not None
        # In the order of a checksum: every n-th case would always have the same value of one parameter.
        of_one.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in of_one[-(-len(of_one) // mark.kwargs["one_in"]) :]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For gateways that are started without a `store:`, in this process and in others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data-home")))
        yield


@pytest.fixture(scope="session")
def encoding() -> Encoding:
    """Loaded once."""
    return load_encoding()
