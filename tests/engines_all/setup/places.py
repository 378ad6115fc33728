"""Where the engines of the suite live: environments in .envs, what is built and expanded in .cache, nothing elsewhere.

Each is named by what it was made of, so a change of version or model makes a new one beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unisono_adapters import demo

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENTS = ROOT / ".envs"
CACHE = ROOT / ".cache" / "engines"
LOGS = CACHE / "logs"

VLLM = "0.32.0"
TORCH = "2.13.0"
LLAMA_CPP_PYTHON = "0.3.36"
"""The version of the package whose sources hold llama.cpp; its server has no release number of its own there."""

VLLM_ENVIRONMENT = ENVIRONMENTS / f"vllm-{VLLM}"
VLLM_PYTHON = VLLM_ENVIRONMENT / "bin" / "python"
VLLM_READY = VLLM_ENVIRONMENT / ".ready"
LLAMA_SERVER = CACHE / f"llama-server-{LLAMA_CPP_PYTHON}"
MLX_LM_SERVER = Path(sys.executable).parent / "mlx_lm.server"

_MODEL = demo.default_folder().name
MXFP4 = CACHE / f"{_MODEL}-mxfp4"
BF16 = CACHE / f"{_MODEL}-bf16"
GGUF = CACHE / f"{_MODEL}.gguf"
