"""Responses API over a WebSocket: frames, cached responses, and lanes."""
