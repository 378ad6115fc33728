"""mlx-lm as a backend: as a local engine process (`mlx`), or mlx_lm.server (`mlx_server`)."""
