"""Access control: authentication by API keys, life cycle of keys, and usage per key."""
