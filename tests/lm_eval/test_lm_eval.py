"""lm-eval measures the same through the gateway as on vLLM itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gateway import gateway
from tests.engines_all.engines import Running, running
from tests.lm_eval.evaluation import MODEL, evaluate

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]

# Largest difference of a log-likelihood. The same text in another batch has slightly other values.
TOLERANCE = 1e-4
CHOICES = 18


@pytest.fixture(scope="module")
def engine() -> Iterator[Running]:
    # The first name is that of the answers, and the second one chooses the tokenizer of lm-eval.
    with running("vllm", None, "--served-model-name", "tiny", MODEL) as started:
        yield started


@pytest.mark.parametrize("batch_size", [1, 4])
async def test_likelihoods_and_accuracy_equal_those_of_vllm_itself(
    engine: Running, tmp_path: Path, batch_size: int
) -> None:
    deployment = {**engine.deployment(), "model_name": MODEL}
    async with gateway({"model_list": [deployment], "unisono": {"raw_completions": True}}) as site:
        through = await evaluate(tmp_path / "gateway", site.url, batch_size=batch_size)
    direct = await evaluate(tmp_path / "vllm", str(engine.url), batch_size=batch_size)
    assert len(direct.likelihoods) == CHOICES
    assert len({value for value, _ in direct.likelihoods}) > CHOICES // 2
    assert [value for value, _ in through.likelihoods] == pytest.approx(
        [value for value, _ in direct.likelihoods], abs=TOLERANCE
    )
    assert [is_greedy for _, is_greedy in through.likelihoods] == [is_greedy for _, is_greedy in direct.likelihoods]
    assert through.metrics == direct.metrics
