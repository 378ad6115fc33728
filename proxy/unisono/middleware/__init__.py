"""Observers and gates around a generation: hooks, quotas, telemetry, draining."""
