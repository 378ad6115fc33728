"""The encoding, loaded once."""

from __future__ import annotations

import pytest

from unisono.harmony.encoding import Encoding, load_encoding


@pytest.fixture(scope="session")
def encoding() -> Encoding:
    return load_encoding()
