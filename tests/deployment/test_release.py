"""Release files: a wheel with only the two packages that works without the repository."""

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
REPOSITORY = "https://git.example.org/team/unisono"
# Files of the wheel other than code and `web/static`.
# Tests of the project compare them with the source on every run, before a wheel is built.
DATA_FILES = {
    "unisono/config/ineffective_settings.yaml",
    "unisono/evaluation/compatibility.jsonl",
    "unisono/fidelity/prompts.jsonl",
    "unisono/harmony/vocab/NOTICE",
    "unisono/harmony/vocab/o200k_base.tiktoken",
    "unisono_adapters/demo/NOTICE",
    "unisono_adapters/demo/tiny_gpt_oss.packed",
    "unisono_adapters/recordings/demo.json",
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the output of `make dist`."""
    folder = tmp_path_factory.mktemp("dist")
    command = ["make", "-s", "dist", f"DIST={folder}", f"UV={UV}", f"REPOSITORY={REPOSITORY}/"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"unisono-{__version__}-py3-none-any.whl"


def test_release_files_are_named_by_the_version(dist: Path) -> None:
    names = {path.name for path in dist.iterdir() if not path.name.startswith(".")}
    ends = ("-py3-none-any.whl", ".tar.gz", ".cdx.json")
    assert names == {f"unisono-{__version__}{end}" for end in ends}


def test_the_wheel_contains_only_the_two_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = f"unisono-{__version__}.dist-info/"
    inside = {name for name in names if not name.startswith(metadata)}
    assert inside == packaged_files()
    assert data_files(inside) == DATA_FILES
    licences = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert {f"{metadata}licenses/{name}" for name in licences} <= names
    assert any(name.endswith("demo/NOTICE") for name in licences)


def test_the_package_links_to_the_files_of_its_version(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"unisono-{__version__}.dist-info/METADATA").decode()
    assert f"Project-URL: Homepage, {REPOSITORY}\n" in metadata
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", metadata)
    prefixes = {mark: f"{REPOSITORY}/{kind}/v{__version__}/" for mark, kind in (("!", "raw"), ("", "blob"))}
    ours = [(prefixes[mark], target) for mark, target in targets if target.startswith(REPOSITORY)]
    assert len(ours) > 10
    for prefix, target in ours:
        assert target.startswith(prefix)
        assert (ROOT / target.removeprefix(prefix).partition("#")[0]).is_file(), target
    assert all(re.match("https?:|#", target) for _, target in targets)


def packaged_files() -> set[str]:
    """Return the files of the two packages, relative to the root of a wheel."""
    return {str(path.relative_to(ROOT / root)) for root in ("proxy", "adapters") for path in files_of(ROOT / root)}


def data_files(names: set[str]) -> set[str]:
    return {name for name in names if not name.endswith((".py", "/py.typed")) and "/web/static/" not in name}


def files_of(root: Path) -> Iterator[Path]:
    """Yield the files of a folder that git does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."],
        cwd=root,
        capture_output=True,
        check=True,
        timeout=30,
    )
    return (root / name.decode() for name in listing.stdout.split(b"\0") if name and (root / name.decode()).is_file())


def test_release_files_contain_no_path_or_user_of_the_build_machine(dist: Path, wheel: Path) -> None:
    texts = {"bill": (dist / f"unisono-{__version__}.cdx.json").read_bytes()}
    with zipfile.ZipFile(wheel) as packed:
        texts |= {name: packed.read(name) for name in packed.namelist()}
    with tarfile.open(dist / f"unisono-{__version__}.tar.gz") as source:
        for member in source.getmembers():
            assert (member.uname, member.uid) == ("", 0)
            content = source.extractfile(member)
            texts[member.name] = b"" if content is None else content.read()
    assert [name for name, text in texts.items() if str(ROOT).encode() in text] == []


def test_the_bill_of_materials_lists_all_dependencies(dist: Path) -> None:
    bill = json.loads((dist / f"unisono-{__version__}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", __version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(name for group in project["optional-dependencies"].values() for name in group),
    ]
    needed = {re.split(r"[\[<>=;]", name)[0] for name in requirements} - {"unisono"}
    assert needed <= {component["name"] for component in bill["components"]}
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"])


CONFIG = """
model_list: [{model_name: gpt-oss-demo, litellm_params: {model: mlx/demo}}]
store: {url: "memory://"}
"""


def test_the_installed_wheel_serves_the_demo_model(wheel: Path, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UV_", "VIRTUAL"))}
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "XDG_CACHE_HOME": str(tmp_path / "cache"), "UV_CACHE_DIR": uv_cache()}
    (tmp_path / "config.yaml").write_text(CONFIG)
    venv = tmp_path / "venv"
    for command in (["venv", "--quiet", str(venv)], ["pip", "install", "--quiet", f"{wheel}[demo]"]):
        subprocess.run([UV, *command], env={**environ, "VIRTUAL_ENV": str(venv)}, cwd=tmp_path, check=True, timeout=300)
    command = [str(venv / "bin" / "unisono"), "serve", "--port", "0", "--config", "config.yaml"]
    with serving(command, environ, tmp_path) as url:
        assert fetch_json(f"{url}/health/liveness") == {"status": "alive"}
        assert [model["id"] for model in fetch_json(f"{url}/v1/models")["data"]] == ["gpt-oss-demo"]
        message = [{"role": "user", "content": "What is the weather in Oslo?"}]
        chat = fetch_json(f"{url}/v1/chat/completions", model="gpt-oss-demo", temperature=0, messages=message)
        assert chat["choices"][0]["message"]["content"]
        response = fetch_json(f"{url}/v1/responses", model="gpt-oss-demo", temperature=0, input="Hi")
        assert response["status"] == "completed"
        assert fetch_json(f"{url}/v1/responses/{response['id']}")["output"] == response["output"]


def uv_cache() -> str:
    return subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True, timeout=30).stdout.strip()


@contextmanager
def serving(command: list[str], environ: dict[str, str], folder: Path) -> Iterator[str]:
    """Run the gateway and yield its address when it is ready."""
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
            fetch_json(f"{url}/health/readiness")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(url)


def fetch_json(url: str, **fields: Any) -> Any:
    body = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
