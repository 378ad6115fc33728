"""Needs the extra `litellm`, in an environment of its own: `make test-providers`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("litellm") else ["test_*.py"]
