"""Example message and tool of the web page's playground; the demo model was trained on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODULE = Path(__file__).parent.parent / "proxy/unisono/web/static/views/exampletool.js"


def _example() -> dict[str, Any]:
    """Return the default export of the module, which is written as JSON."""
    module = MODULE.read_text()
    example: dict[str, Any] = json.loads(module.partition("export default")[2].rstrip().removesuffix(";"))
    return example


EXAMPLE_MESSAGE: str = _example()["message"]
EXAMPLE_TOOL: dict[str, Any] = _example()["tool"]
