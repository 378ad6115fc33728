"""mlx-lm as a backend: a local engine process (`mlx`), or its server (`mlx_server`)."""
