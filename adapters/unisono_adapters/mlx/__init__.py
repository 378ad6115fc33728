"""mlx-lm as a backend: a process on this machine (`mlx`), or its own server (`mlx_server`)."""
