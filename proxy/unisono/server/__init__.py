"""The serving process: listener, workers, reload. It covers what uvicorn does not serve."""
