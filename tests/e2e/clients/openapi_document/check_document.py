"""Conformance of all responses to the gateway's OpenAPI document, tested with schemathesis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from tests.e2e.clients.conftest import Stage

HERE = Path(__file__).parent
TIMEOUT_S = 2400.0


def test_every_response_conforms_to_the_openapi_document(stage: Stage) -> None:
    # The first request builds the document, which may take longer than schemathesis waits.
    document = Request(f"{stage.scripted}/openapi.json", headers={"authorization": f"Bearer {stage.key}"})
    with urlopen(document, timeout=120) as answer:
        assert answer.status == 200
    result = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("--no-color", "--config-file", str(HERE / "schemathesis.toml")),
            *("run", f"{stage.scripted}/openapi.json"),
        ],
        cwd=HERE,
        env={**os.environ, "UNISONO_KEY": stage.key, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout
