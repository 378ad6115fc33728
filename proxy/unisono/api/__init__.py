"""HTTP in, HTTP out: each surface is a schema, an inbound and an outbound translation, and routes."""
