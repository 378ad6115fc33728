"""Construction of a gateway's objects from the configuration.

Only `app` and the CLI may import this package.
"""
