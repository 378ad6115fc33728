"""Selection of a deployment for each attempt: queues, limits, health and failover."""
