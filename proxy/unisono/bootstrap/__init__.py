"""From the configuration to the objects of a running gateway."""
