"""Fixtures of the bench tests. `bench` is not installed, so the root of the checkout is added to the path."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench import prose  # noqa: E402
from bench.prose import Corpus  # noqa: E402
from unisono.harmony.encoding import Encoding, load_encoding  # noqa: E402


@pytest.fixture(scope="session")
def bench_encoding() -> Encoding:
    return load_encoding()


@pytest.fixture(scope="session")
def corpus(bench_encoding: Encoding) -> Corpus:
    return prose.build(bench_encoding)
