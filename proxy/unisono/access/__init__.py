"""Access control: keys, callers and their permissions."""
