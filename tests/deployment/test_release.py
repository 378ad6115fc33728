"""What is released: a wheel that holds the two packages and nothing else, and works alone, away from the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.manifests import ROOT
from unisono import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

UV = shutil.which("uv") or str(ROOT / ".cache" / "uv" / "bin" / "uv")
DATA = {
    "unisono/harmony/vocab/NOTICE",
    "unisono/harmony/vocab/o200k_base.tiktoken",
    "unisono_adapters/demo/NOTICE",
    "unisono_adapters/demo/tiny_gpt_oss.packed",
    "unisono_adapters/recordings/demo.json",
}
"""What is in the wheel besides code, and files below `web/static`."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `make dist` makes."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["make", "-s", "dist", f"DIST={folder}", f"UV={UV}"], cwd=ROOT, check=True, timeout=200)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"unisono-{__version__}-py3-none-any.whl"


def test_what_is_released_is_named_by_its_version(dist: Path) -> None:
    names = {path.name for path in dist.iterdir() if not path.name.startswith(".")}
    ends = ("-py3-none-any.whl", ".tar.gz", ".cdx.json")
    assert names == {f"unisono-{__version__}{end}" for end in ends}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    about = f"unisono-{__version__}.dist-info/"
    inside = {name for name in names if not name.startswith(about)}
    sources = {str(path.relative_to(ROOT / root)) for root in ("proxy", "adapters") for path in files_of(ROOT / root)}
    assert inside == sources
    others = {name for name in inside if not name.endswith((".py", "/py.typed")) and "/web/static/" not in name}
    assert others == DATA
    licences = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert {f"{about}licenses/{name}" for name in licences} <= names
    assert any(name.endswith("demo/NOTICE") for name in licences)


def files_of(root: Path) -> Iterator[Path]:
    """What git would keep of a folder."""
    told = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."],
        cwd=root,
        capture_output=True,
        check=True,
        timeout=30,
    )
    return (root / name.decode() for name in told.stdout.split(b"\0") if name and (root / name.decode()).is_file())


def test_nothing_that_is_released_speaks_of_the_machine_it_was_made_on(dist: Path, wheel: Path) -> None:
    texts = {"bill": (dist / f"unisono-{__version__}.cdx.json").read_bytes()}
    with zipfile.ZipFile(wheel) as packed:
        texts |= {name: packed.read(name) for name in packed.namelist()}
    with tarfile.open(dist / f"unisono-{__version__}.tar.gz") as source:
        for member in source.getmembers():
            assert (member.uname, member.uid) == ("", 0)
            content = source.extractfile(member)
            texts[member.name] = b"" if content is None else content.read()
    assert [name for name, text in texts.items() if str(ROOT).encode() in text] == []


def test_the_bill_of_materials_names_all_that_is_needed(dist: Path) -> None:
    bill = json.loads((dist / f"unisono-{__version__}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", __version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for group in project["optional-dependencies"].values() for name in group),
    ]
    needed = {re.split(r"[\[<>=;]", name)[0] for name in wanted} - {"unisono"}
    assert needed <= {component["name"] for component in bill["components"]}
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"])


CONFIG = """
model_list: [{model_name: gpt-oss-demo, litellm_params: {model: mlx/demo}}]
store: {url: "memory://"}
"""


def test_the_wheel_alone_serves_the_demo_model(wheel: Path, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UV_", "VIRTUAL"))}
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "XDG_CACHE_HOME": str(tmp_path / "cache"), "UV_CACHE_DIR": uv_cache()}
    (tmp_path / "config.yaml").write_text(CONFIG)
    venv = tmp_path / "venv"
    for command in (["venv", "--quiet", str(venv)], ["pip", "install", "--quiet", f"{wheel}[demo]"]):
        subprocess.run([UV, *command], env={**environ, "VIRTUAL_ENV": str(venv)}, cwd=tmp_path, check=True, timeout=300)
    command = [str(venv / "bin" / "unisono"), "serve", "--port", "0", "--config", "config.yaml"]
    with serving(command, environ, tmp_path) as url:
        assert asked(f"{url}/health/liveness") == {"status": "alive"}
        assert [model["id"] for model in asked(f"{url}/v1/models")["data"]] == ["gpt-oss-demo"]
        message = [{"role": "user", "content": "What is the weather in Oslo?"}]
        chat = asked(f"{url}/v1/chat/completions", model="gpt-oss-demo", temperature=0, messages=message)
        assert chat["choices"][0]["message"]["content"]
        response = asked(f"{url}/v1/responses", model="gpt-oss-demo", temperature=0, input="Hi")
        assert response["status"] == "completed"
        assert asked(f"{url}/v1/responses/{response['id']}")["output"] == response["output"]


def uv_cache() -> str:
    return subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True, timeout=30).stdout.strip()


@contextmanager
def serving(command: list[str], environ: dict[str, str], folder: Path) -> Iterator[str]:
    """Its address, once it is ready."""
    with subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            [address] = re.findall(r"http://\S+?(?=/v1)", process.stdout.readline().decode())
            wait_until_ready(address)
            yield address
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def wait_until_ready(url: str) -> None:
    for _ in range(300):
        try:
            asked(f"{url}/health/readiness")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(url)


def asked(url: str, **fields: Any) -> Any:
    body = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
