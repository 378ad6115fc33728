"""Bundled hooks, registered as entry points (`unisono.hooks`) like third-party ones.

A hook runs only if the configuration names it.
"""
