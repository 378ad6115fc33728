"""Construction of a gateway's objects from the configuration.

Imported by `app` and the CLI only.
"""
