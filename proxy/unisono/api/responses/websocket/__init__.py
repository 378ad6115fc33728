"""Responses over one open socket: what its frames say, what it remembers, and who waits for whom."""
