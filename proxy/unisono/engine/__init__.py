"""The life of one request: render, pick a backend, generate in steps, route, fold."""
