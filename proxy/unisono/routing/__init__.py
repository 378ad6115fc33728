"""Which backend answers."""
