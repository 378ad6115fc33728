"""Lifecycle of one request: render, select a backend, generate in steps, parse, collect."""
