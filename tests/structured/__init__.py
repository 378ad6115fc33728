"""Share of valid answers under JSON schemas and regular expressions of increasing difficulty, on real engines."""
