"""Rules for outgoing connections. Standard library only; every package may import them."""
