"""From the configuration to the objects of a running gateway. Only `app` and the command line import it."""
