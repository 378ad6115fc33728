"""The example of the page's playground, on which the demo model was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODULE = Path(__file__).parent.parent / "proxy/unisono/web/static/example.js"


def _example() -> dict[str, Any]:
    """The module's default export, which is written as JSON."""
    module = MODULE.read_text()
    example: dict[str, Any] = json.loads(module.partition("export default")[2].rstrip().removesuffix(";"))
    return example


EXAMPLE_MESSAGE: str = _example()["message"]
EXAMPLE_TOOL: dict[str, Any] = _example()["tool"]
