"""Tests of the capability matrix: complete, equal to its page, and true."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.contract.kinds import KINDS, Kind
from tests.docs import capabilities as matrix
from tests.docs.capabilities import MATRIX, Support
from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from tests.fakes.ollama import FakeOllama
from unisono.core.generation import OutputForm

PAGE = Path(__file__).parents[2] / "docs" / "capabilities.md"


def test_page_matches_the_matrix() -> None:
    assert PAGE.read_text() == matrix.page(), "python -m tests.docs.capabilities > docs/capabilities.md"


def test_every_feature_has_a_cell_for_every_backend_kind() -> None:
    assert set(matrix.KINDS) == {point.name for point in entry_points(group="unisono.backends")}
    assert {feature: set(cells) for feature, cells in MATRIX.items()} == {
        feature: set(matrix.KINDS) for feature in MATRIX
    }


@pytest.mark.parametrize("support", Support)
def test_every_support_level_is_explained(support: Support) -> None:
    assert f"- **{support}** " in matrix.page()


def test_refused_feature_has_an_error_and_a_note() -> None:
    for cells in MATRIX.values():
        for cell in cells.values():
            assert (cell.refusal is not None) is (cell.support is Support.REFUSED)
            assert cell.note or cell.support is not Support.REFUSED


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
async def test_matrix_matches_the_probed_capabilities(name: str, kind: Kind, tmp_path: Path) -> None:
    column = name.partition(" ")[0]
    async with kind.serve(tmp_path) as (backend, _):
        capabilities = (await backend.probe()).capabilities
    exact = capabilities.prompt is OutputForm.IDS and capabilities.output is OutputForm.IDS
    assert (MATRIX["chat"][column].support is Support.EXACT) is exact
    assert (MATRIX["logit_bias"][column].support is Support.EXACT) is capabilities.logit_bias
    scores = MATRIX["scores of given tokens (`unisono compare`)"]
    assert (scores[column].support is Support.EXACT) is capabilities.scores
    if name != "ollama template":
        assert (MATRIX["constrained decoding"][column].support is not Support.NONE) is bool(capabilities.constrain)


# Requests for features that some kinds refuse, by field.
REQUESTS = {
    "logit_bias": {"logit_bias": {"13225": 5}},
    "logprobs": {"logprobs": True},
}


def test_every_refused_field_has_a_request() -> None:
    refused = {cell.refusal[0] for cells in MATRIX.values() for cell in cells.values() if cell.refusal}
    assert refused == set(REQUESTS)


@pytest.mark.parametrize("column", ["vllm", "ollama", "replay"])
async def test_refused_feature_returns_the_documented_error(column: str) -> None:
    refusals = {cells[column].refusal for cells in MATRIX.values() if cells[column].refusal}
    async with FakeVllm() as vllm, FakeOllama(text="<|channel|>final<|message|>Hi") as ollama:
        target = {"vllm": f"vllm@{vllm.url}", "ollama": f"ollama@{ollama.url}", "replay": "replay/demo"}[column]
        async with gateway(config_of(target)) as client:
            answers = {field: await client.chat(**fields) for field, fields in REQUESTS.items()}
    errors = {
        (answer.body["error"]["param"], answer.body["error"]["code"])
        for answer in answers.values()
        if answer.status == 400
    }
    assert errors == refusals
