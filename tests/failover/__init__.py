"""Failover of Redis under load: everything a client got acknowledged is looked for afterwards."""
