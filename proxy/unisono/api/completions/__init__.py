"""Completions of raw prompts: `POST /v1/completions`."""
