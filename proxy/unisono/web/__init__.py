"""The page at `/`: what the gateway is doing, a place to try it, and what a model wrote, token by token."""
