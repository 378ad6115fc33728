"""Hooks that come along. Each is an entry point (`unisono.hooks`) as anybody's is; none is asked unless it is named."""
