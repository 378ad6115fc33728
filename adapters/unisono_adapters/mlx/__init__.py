"""mlx-lm as a backend: a process of its own on this machine (`mlx`), or its server (`mlx_server`)."""
