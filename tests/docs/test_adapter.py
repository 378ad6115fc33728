"""The example adapter of docs/adapters.md passes the contract of all backends."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.contract import test_backend, test_backend_failures, test_backend_leaving
from tests.contract.kinds import IDS, KEY, Kind, on_a_wire
from tests.docs.pages import blocks
from tests.fakes import FakeVllm
from unisono.core.generation import OutputForm
from unisono.core.ports import Backend, BackendOptions
from unisono.core.probe import Check


@cache
def example() -> ModuleType:
    [(_, source)] = [block for block in blocks("python") if block[0].startswith("adapters.md")]
    module = ModuleType("acme_unisono")
    exec(compile(source, "docs/adapters.md", "exec"), module.__dict__)
    return module


def acme(url: str) -> Backend:
    built: Backend = example().AcmeBackend(BackendOptions("acme", "tiny", url, KEY))
    return built


@pytest.fixture(name="kind")
def acme_kind() -> Kind:
    return Kind(on_a_wire(FakeVllm, acme, tokens=IDS), OutputForm.IDS, at=acme)


@pytest.fixture
def wired(kind: Kind) -> Kind:
    return kind


def contract_tests() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the tests of the contract that have a fixture of a kind, and no parameters for it."""
    for module in (test_backend, test_backend_failures, test_backend_leaving):
        for name, test in vars(module).items():
            if not name.startswith("test_") or not callable(test):
                continue
            parametrized = {str(mark.args[0]) for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"}
            fixtures = {"kind", "wired"} & set(inspect.signature(test).parameters)
            if fixtures and not any(
                "kind" in of or "wired" in of for of in parametrized | {str(c) for c in parametrized}
            ):
                yield name, test


vars(sys.modules[__name__]).update(contract_tests())


async def test_a_model_that_is_not_served_is_a_finding_without_a_remedy(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path) as (backend, server):
        server.models = {"data": [{"id": "other"}]}
        (finding,) = (await backend.probe()).fatal
    assert (finding.check, finding.remedy) == (Check.MODEL, "")


def test_the_contract_has_tests() -> None:
    assert len(dict(contract_tests())) > 15
