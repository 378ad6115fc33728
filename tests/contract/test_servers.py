"""Tests of the Redis server helper: which process answers on a port."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.servers import Server


def test_server_does_not_start_on_an_occupied_port(tmp_path: Path) -> None:
    first = Server(tmp_path / "first").start()
    second = Server(tmp_path / "second", port=first.port)
    try:
        with pytest.raises(RuntimeError, match="Address already in use"):
            second.start()
        with first.client() as client:
            assert client.ping()
    finally:
        second.end()
        first.end()
