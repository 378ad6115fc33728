"""Server tools: tools of a request that the gateway runs itself."""
