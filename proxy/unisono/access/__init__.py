"""Access control: authentication by API keys, life cycle of keys, limits, usage and prices."""
