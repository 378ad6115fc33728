"""Types and protocols that all packages share. Uses no third-party library."""
