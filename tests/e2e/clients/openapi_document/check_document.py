"""The gateway keeps to its OpenAPI document: whatever is asked, the answer is one the document has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.clients.conftest import Stage

HERE = Path(__file__).parent
LONGEST_S = 900.0


def test_every_answer_is_one_of_the_document(stage: Stage) -> None:
    run = subprocess.run(
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
        timeout=LONGEST_S,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout
