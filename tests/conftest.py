"""Settings of every test: examples are judged by what they find, not by how long a busy machine takes to draw them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("project", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
