"""Sampling parameters that backends receive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.core.generation import SEEDS, VOCABULARY, Sampling

# case: (parameters of a request, parameters that backends receive with a different value)
CASES: dict[str, tuple[Sampling, dict[str, object]]] = {
    "defaults": (Sampling(), {}),
    "usual": (Sampling(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7), {}),
    "temperature 0": (Sampling(temperature=0.0), {}),
    "temperature that is 0 in 32 bits": (Sampling(temperature=5e-324), {"temperature": 0.0}),
    "temperature whose inverse overflows in 32 bits": (Sampling(temperature=1e-40), {"temperature": 0.0}),
    "top_p 0": (Sampling(top_p=0.0), {"temperature": 0.0, "top_p": 1.0}),
    "top_p that is 0 in 32 bits": (Sampling(top_p=1e-300), {"temperature": 0.0, "top_p": 1.0}),
    "top_k of all tokens but one": (Sampling(top_k=VOCABULARY - 1), {}),
    "top_k of all tokens": (Sampling(top_k=VOCABULARY), {"top_k": 0}),
    "top_k above the vocabulary": (Sampling(top_k=10**9), {"top_k": 0}),
    "top_k -1": (Sampling(top_k=-1), {"top_k": 0}),
    "seed 0": (Sampling(seed=0), {}),
    "seed -1, random on some engines": (Sampling(seed=-1), {"seed": SEEDS - 1}),
    "seed -1 in 32 bits": (Sampling(seed=2**32 - 1), {"seed": 1}),
    "seed -1 in 32 bits, of 63 bits": (Sampling(seed=2**63 - 1), {"seed": 1}),
    "smallest seed": (Sampling(seed=-(2**63)), {"seed": SEEDS - 2}),
}


@pytest.mark.parametrize(("requested", "changes"), CASES.values(), ids=CASES)
def test_backends_receive_only_values_that_every_engine_accepts(
    requested: Sampling, changes: dict[str, object]
) -> None:
    assert requested.for_backends() == replace(requested, **changes)
