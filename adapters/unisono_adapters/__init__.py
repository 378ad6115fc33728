"""One module per backend kind, each a class satisfying `unisono.core.ports.Backend`."""
