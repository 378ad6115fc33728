"""Set-up for mlx-lm: the model folder and a Hugging Face cache.

mlx_lm.server lists the cache as its models. mlx-lm itself is installed in the project's environment.
"""

from __future__ import annotations

from tests.engines_all.setup import models
from tests.engines_all.setup.places import CACHE, MLX_LM_SERVER
from tests.engines_all.setup.running import Commands, SetupFailed


def set_up(commands: Commands) -> None:
    if not MLX_LM_SERVER.exists():
        raise SetupFailed("mlx-lm is not installed; it is part of the `demo` extra")
    (CACHE / "hub" / "hub").mkdir(parents=True, exist_ok=True)
    models.set_up(commands)
