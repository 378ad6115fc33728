"""Responses that go on without their client: owned by one process, logged as they grow, taken over by another one when
the owner dies, and read by whoever asks from the log alone."""
