"""OpenAPI document of the gateway, built from the request models on first use."""
