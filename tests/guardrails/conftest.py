"""Tests that need Presidio, in a separate environment: `make test-guardrails`."""

from tests.guardrails.service import PYTHON

collect_ignore_glob = [] if PYTHON.exists() else ["test_*.py"]
