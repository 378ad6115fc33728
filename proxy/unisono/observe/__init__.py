"""Observability: logs, metrics, spans and recordings."""
