"""Unisono inside of others: the engine in a process that is not the gateway's."""
