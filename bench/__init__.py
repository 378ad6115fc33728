"""What the gateway costs, measured beside a bare TCP relay in the same run: `python -m bench --help`.

Absolute figures belong to one machine and one hour; the ratios inside one table are the result.
"""
