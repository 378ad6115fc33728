"""HTTP APIs of the gateway. Each has a schema, inbound and outbound conversions, and routes."""
