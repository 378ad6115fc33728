"""Comparisons of real engines: equal weights are equal, quantised and scaled ones are found."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.engines.demo_prompts import CHATS
from tests.engines_all.engines import running
from tests.engines_all.setup.places import MXFP4
from unisono.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

# Chats that the model was trained on, and prompts on which it is unsure.
QUESTIONS = [
    *(CHATS[name][0] for name in ("greeting", "sum", "sky", "joke")),
    "Explain the tides.",
    "Write a haiku about rain.",
]
# Rounding of other kernels is below it: 0.00001 nats between mlx and llama.cpp.
LIMITS = ("--min-agreement", "0.999", "--max-divergence", "0.0001", "--max-tokens", "40")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"name": text, "messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


async def compared(first: str, second: str, prompts: Path) -> dict[str, Any]:
    command = ["compare", first, second, "--prompts", str(prompts), "--json", *LIMITS]
    result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert result.exit_code in (0, 1), result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["equal"] is (result.exit_code == 0)
    print(f"{first} and {second}:", report["total"], report["divergences"][:1])
    return report


@pytest.mark.parametrize("name", ["llamacpp", "vllm"])
async def test_engines_with_equal_weights_are_equal(name: str, prompts: Path) -> None:
    with running(name) as engine:
        report = await compared(f"{name}/tiny@{engine.url}", f"mlx/{MXFP4}", prompts)
    assert report["equal"]
    assert report["total"]["agreement"]["value"] > 0.999
    assert report["unscored"] == 0


def quantised(name: str, weight: Any, bits: int = 4) -> Any:
    import mlx.core as mx

    if weight.ndim != 2 or weight.dtype != mx.bfloat16 or weight.shape[1] % 32:
        return weight
    packed = mx.quantize(weight, group_size=32, bits=bits)
    return mx.dequantize(*packed, group_size=32, bits=bits).astype(weight.dtype)


def scaled(name: str, weight: Any) -> Any:
    import mlx.core as mx

    is_matrix = name.startswith("model.layers.1.") and name.endswith(".weight") and weight.ndim == 2
    return (weight * 1.05).astype(weight.dtype) if is_matrix and weight.dtype == mx.bfloat16 else weight


def changed_copy(folder: Path, change: Callable[[str, Any], Any]) -> Path:
    """Return a copy of the model whose weights are changed."""
    import mlx.core as mx

    shutil.copytree(MXFP4, folder / "copy")
    file = "model.safetensors"
    weights = {name: change(name, weight) for name, weight in mx.load(str(MXFP4 / file)).items()}
    mx.save_safetensors(str(folder / "copy" / file), weights, metadata={"format": "pt"})
    return folder / "copy"


@pytest.mark.parametrize("change", [quantised, scaled])
async def test_a_changed_copy_is_found_with_its_first_token(
    change: Callable[[str, Any], Any], prompts: Path, tmp_path: Path
) -> None:
    report = await compared(f"mlx/{MXFP4}", f"mlx/{changed_copy(tmp_path, change)}", prompts)
    assert not report["equal"]
    assert report["divergences"]
