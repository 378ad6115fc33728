"""Settings of every test: examples are judged by what they find, not by how long a busy machine takes to draw them, and
nothing is kept where whoever runs the tests keeps their own."""

from __future__ import annotations

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
