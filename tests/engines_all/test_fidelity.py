"""Comparisons of real engines: equal weights are equal, quantised and scaled ones are found."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.engines.demo_prompts import CHATS
from tests.engines_all.engines import running
from tests.engines_all.setup.places import GGUF, LLAMA_QUANTIZE, MLX_LM_CONVERT, MXFP4
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


# The rounding of vLLM in bf16 is 0.00012 nats on a CPU with instructions for bf16.
@pytest.mark.parametrize(("name", "arguments"), [("llamacpp", ()), ("vllm", ("--dtype", "float32"))])
async def test_engines_with_equal_weights_are_equal(name: str, arguments: Sequence[str], prompts: Path) -> None:
    with running(name, None, *arguments) as engine:
        report = await compared(f"{name}/tiny@{engine.url}", f"mlx/{MXFP4}", prompts)
    assert report["equal"]
    assert report["total"]["agreement"]["value"] > 0.999
    assert report["unscored"] == 0


def quantised(folder: Path, bits: int = 4) -> Path:
    """Return a copy of the model with matrices in a few bits, made by mlx-lm."""
    copy = folder / "copy"
    options = ["--quantize", "--q-bits", str(bits), "--q-group-size", "32"]
    make([MLX_LM_CONVERT, "--hf-path", MXFP4, "--mlx-path", copy, *options])
    return copy


def changed_copy(folder: Path, change: Callable[[str, Any], Any]) -> Path:
    """Return a copy of the model whose bf16 matrices are changed."""
    import mlx.core as mx

    def changed(name: str, weight: Any) -> Any:
        return change(name, weight).astype(weight.dtype) if weight.ndim == 2 and weight.dtype == mx.bfloat16 else weight

    copy, file = folder / "copy", "model.safetensors"
    shutil.copytree(MXFP4, copy)
    weights = {name: changed(name, weight) for name, weight in mx.load(str(MXFP4 / file)).items()}
    mx.save_safetensors(str(copy / file), weights, metadata={"format": "pt"})
    return copy


def scaled(folder: Path) -> Path:
    """Return a copy of the model in which attention and router of a layer are 5 % larger."""

    def change(name: str, weight: Any) -> Any:
        return weight * 1.05 if name.startswith("model.layers.1.") and name.endswith(".weight") else weight

    return changed_copy(folder, change)


def make(command: Sequence[str | Path]) -> None:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def is_found(report: Mapping[str, Any]) -> bool:
    return not report["equal"] and bool(report["divergences"])


@pytest.mark.parametrize("copied", [quantised, scaled])
async def test_a_changed_copy_is_found_with_its_first_token(
    copied: Callable[[Path], Path], prompts: Path, tmp_path: Path
) -> None:
    assert is_found(await compared(f"mlx/{MXFP4}", f"mlx/{copied(tmp_path)}", prompts))


async def test_a_model_of_llama_quantize_is_found_with_its_first_token(prompts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    # The experts are in MXFP4 already.
    make([LLAMA_QUANTIZE, "--allow-requantize", GGUF, copy, "Q4_0"])
    with running("llamacpp", None, "--model", str(copy)) as engine:
        report = await compared(f"mlx/{MXFP4}", f"llamacpp/tiny@{engine.url}", prompts)
    assert is_found(report)
