"""What operators see: logs."""
