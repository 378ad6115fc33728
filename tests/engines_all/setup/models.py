"""Demo model as released in MXFP4, in bf16 for vLLM, and as GGUF for llama.cpp."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.engines_all.setup.places import BF16, ENVIRONMENTS, GGUF, MXFP4, TORCH
from tests.engines_all.setup.running import Commands
from unisono_adapters import demo

# Dependencies of llama.cpp's converter, in versions that work.
CONVERTER = (f"torch=={TORCH}", "transformers==4.57.6", "numpy<3", "sentencepiece<0.3", "protobuf<5", "pyyaml", "tqdm")


def set_up(commands: Commands) -> None:
    demo.expand(MXFP4, "mxfp4")
    demo.expand(BF16, "bf16")


def to_gguf(commands: Commands, sources: Path) -> None:
    """Convert the model with the converter in llama.cpp's `sources`."""
    if GGUF.exists():
        return
    set_up(commands)
    environment = ENVIRONMENTS / "gguf"
    ready = environment / ".ready"
    python = environment / "bin" / "python"
    if not ready.exists():
        commands.environment(environment)
        commands.install(python, "converter", *CONVERTER)
        ready.touch()
    unfinished = GGUF.with_suffix(".part")
    command = (python, sources / "convert_hf_to_gguf.py", "--outtype", "bf16", "--outfile", unfinished, MXFP4)
    commands.run("GGUF", *command, variables={"HF_HUB_OFFLINE": "1"})
    unfinished.rename(GGUF)
    shutil.rmtree(environment)  # 1 GB, needed for ten seconds
