"""Routing of requests to deployments."""
