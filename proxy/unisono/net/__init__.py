"""HTTP connections to servers, and rules for their addresses.

Imports no other package except `unisono.errors`; every package may import it.
"""
