"""Failover of Redis under load, followed by an audit of everything acknowledged to clients."""
