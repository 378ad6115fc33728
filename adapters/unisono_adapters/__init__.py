"""Backend adapters: one module per kind, each with an `unisono.core.ports.Backend` class."""
