"""Conversion between tokens and events. No I/O, so recordings replay identically."""
