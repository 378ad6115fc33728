"""Tests that need Open WebUI, in a separate environment: `make test-webui`."""

from pathlib import Path

OPEN_WEBUI = Path(__file__).parent.parent.parent / ".envs/webui/bin/open-webui"

collect_ignore_glob = [] if OPEN_WEBUI.exists() else ["test_*.py"]
