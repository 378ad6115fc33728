"""Tokens to meaning and back. No I/O: recordings replay to the same events for ever."""
