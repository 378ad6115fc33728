"""Integrations that run the engine inside another application's process."""
