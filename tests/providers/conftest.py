"""Tests that need the extra `litellm`, in a separate environment: `make test-providers`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("litellm") else ["test_*.py"]
