"""Tests that need Phoenix, in a separate environment: `make test-phoenix`."""

from pathlib import Path

PHOENIX = Path(__file__).parent.parent.parent / ".envs/phoenix/bin/phoenix"

collect_ignore_glob = [] if PHOENIX.exists() else ["test_*.py"]
