"""Web page at `/`: gateway overview, playground, and token inspector."""
