"""mlx-lm is in the project's own environment already; what is missing is the model's folder, and the hub's cache,
which mlx_lm.server lists when it is asked for its models."""

from __future__ import annotations

from tests.engines_all.setup import models
from tests.engines_all.setup.places import CACHE, MLX_LM_SERVER
from tests.engines_all.setup.running import Commands, SetupFailed


def set_up(commands: Commands) -> None:
    if not MLX_LM_SERVER.exists():
        raise SetupFailed("mlx-lm is not in this environment: it is part of the `demo` extra")
    (CACHE / "hub" / "hub").mkdir(parents=True, exist_ok=True)
    models.set_up(commands)
