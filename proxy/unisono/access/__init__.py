"""Who may ask: keys, callers and what they may do."""
