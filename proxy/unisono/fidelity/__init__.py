"""Fidelity: measures whether a backend still computes what its reference computes."""
