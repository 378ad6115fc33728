"""Benchmarks of the gateway, next to a plain TCP relay: `python -m bench --help`.

Absolute figures depend on the machine and the time of day. Use the ratios inside one table.
"""
