"""The table of what works where: complete, the same as its page, and true."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.contract.kinds import KINDS, Kind
from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from tests.fakes.ollama import FakeOllama
from unisono.core.generation import OutputForm
from unisono_adapters import matrix
from unisono_adapters.matrix import MATRIX, Support

PAGE = Path(__file__).parents[2] / "docs" / "capabilities.md"


def test_the_page_is_what_the_data_says() -> None:
    assert PAGE.read_text() == matrix.page(), "python -m unisono_adapters.matrix > docs/capabilities.md"


def test_every_feature_has_a_cell_for_every_kind_there_is() -> None:
    assert set(matrix.KINDS) == {point.name for point in entry_points(group="unisono.backends")}
    assert {feature: set(cells) for feature, cells in MATRIX.items()} == {
        feature: set(matrix.KINDS) for feature in MATRIX
    }


@pytest.mark.parametrize("support", Support)
def test_every_word_is_explained(support: Support) -> None:
    assert f"- **{support}** " in matrix.page()


def test_what_is_refused_says_with_which_error() -> None:
    for cells in MATRIX.values():
        for cell in cells.values():
            assert (cell.refusal is not None) is (cell.support is Support.REFUSED)
            assert cell.note or cell.support is not Support.REFUSED


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
async def test_a_kind_is_what_its_adapter_says_it_is(name: str, kind: Kind, tmp_path: Path) -> None:
    column = name.partition(" ")[0]
    async with kind.serve(tmp_path) as (backend, _):
        able = (await backend.probe()).capabilities
    exact = able.prompt is OutputForm.IDS and able.output is OutputForm.IDS
    assert (MATRIX["chat"][column].support is Support.EXACT) is exact
    assert (MATRIX["logit_bias"][column].support is Support.EXACT) is able.logit_bias
    if name != "ollama template":
        assert (MATRIX["constrained decoding"][column].support is not Support.NONE) is bool(able.constrain)


ASKING = {
    "logit_bias": {"logit_bias": {"13225": 5}},
    "logprobs": {"logprobs": True},
}
"""Requests that ask for what some kind refuses, by the field."""


def test_everything_that_is_refused_somewhere_is_asked_for() -> None:
    refused = {cell.refusal[0] for cells in MATRIX.values() for cell in cells.values() if cell.refusal}
    assert refused == set(ASKING)


@pytest.mark.parametrize("column", ["vllm", "ollama", "replay"])
async def test_what_is_refused_is_refused_with_that_error(column: str) -> None:
    refusals = {cells[column].refusal for cells in MATRIX.values() if cells[column].refusal}
    async with FakeVllm() as vllm, FakeOllama(text="<|channel|>final<|message|>Hi") as ollama:
        at = {"vllm": f"vllm@{vllm.url}", "ollama": f"ollama@{ollama.url}", "replay": "replay/demo"}[column]
        async with gateway(config_of(at)) as running:
            answers = {field: await running.chat(**asked) for field, asked in ASKING.items()}
    seen = {
        (answer.body["error"]["param"], answer.body["error"]["code"])
        for answer in answers.values()
        if answer.status == 400
    }
    assert seen == refusals
