"""Build of the image without a container engine: each Dockerfile step runs in a plain Debian root.

The last stage serves with the privileges of the compose files: no root, no capability, and only the volume and /tmp are
writable. Differences from an engine: Python of Debian instead of the base image, and no cache mounts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deployment.manifests import ROOT, instructions, words_of

NEEDED = ("debootstrap", "chroot", "unshare", "setpriv", "ip")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap and chroot need root"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {NEEDED}"),
]
# Files that an engine copies from its host: name resolution and certificates.
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
BUILD_ARGS = {"EXTRAS": "--extra demo"}
KEY = "sk-of-this-test-0123456789"
CONFIG = """
model_list: [{model_name: gpt-oss-demo, litellm_params: {model: mlx/demo}}]
general_settings: {master_key: os.environ/UNISONO_MASTER_KEY}
"""


@dataclass
class BuildStage:
    root: Path
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
    folder: str = "/"

    def run(self, command: str) -> None:
        environ = {"HOME": "/root", "SSL_CERT_FILE": HOST_FILES[-1], **self.environ}
        words = ["chroot", str(self.root), "/bin/sh", "-euc", f"cd {self.folder}; {command}"]
        completed = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=600)
        assert completed.returncode == 0, f"{command}\n{completed.stdout}{completed.stderr}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create a Debian root with Python and nothing of this project."""
    root = tmp_path_factory.mktemp("plain") / "root"
    packages = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", packages, "stable", root], check=True, timeout=600)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for path in filter(os.path.exists, HOST_FILES):
        shutil.copy(path, f"{root}{path}")
    yield root
    shutil.rmtree(root.parent)


@pytest.fixture(scope="module")
def image(plain: Path) -> BuildStage:
    """Build the last stage of the Dockerfile."""
    stages: dict[str, BuildStage] = {}
    stage = BuildStage(plain)
    for word, rest in instructions():
        match word:
            case "FROM":
                stage = BuildStage(plain.with_name(f"stage-{len(stages)}"))
                stages[rest.partition(" AS ")[2]] = stage
                subprocess.run(["cp", "-a", plain, stage.root], check=True, timeout=120)
            case "ARG":
                name, _, value = rest.partition("=")
                stage.environ[name] = BUILD_ARGS.get(name, value.strip('"'))
            case "ENV":
                for name, value in (each.split("=", 1) for each in shlex.split(rest)):
                    stage.environ[name] = value.replace("$PATH", stage.environ["PATH"])
            case "WORKDIR":
                stage.folder = rest
                Path(f"{stage.root}{rest}").mkdir(parents=True, exist_ok=True)
            case "RUN":
                stage.run(re.sub(r"^(--mount=\S+\s+)+", "", rest))
            case "COPY":
                copy_files(rest.split(), stage, stages)
    return stage


def copy_files(words: list[str], stage: BuildStage, stages: Mapping[str, BuildStage]) -> None:
    source = ROOT
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *names, target = words
    for name in names:
        origin = source / name.lstrip("/")
        goal = stage.root / (target.lstrip("/") if target.startswith("/") else f"{stage.folder.lstrip('/')}/{target}")
        subprocess.run(["cp", "-aT" if origin.is_dir() else "-a", origin, goal], check=True, timeout=120)


SERVE_IN_ROOT = """
set -eu
root=$1 state=$2; shift 2
ip link set lo up
mount --make-rprivate /
mount --bind "$root" "$root"; mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
mount --bind "$state" "$root/var/lib/unisono"
inside="chroot $root setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all"
$inside unisono "$@" &
gateway=$!
for _ in $(seq 120); do $inside sh -c "$HEALTH" 2>/dev/null && break; kill -0 $gateway; sleep 0.5; done
$inside sh -c '! touch /opt/unisono/mark 2>/dev/null && touch /var/lib/unisono/mark'
$inside python -c "$ASK"
kill -TERM $gateway
wait $gateway
"""
ASK = """
import json, os, urllib.request
body = json.dumps({"model": "gpt-oss-demo", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0})
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["UNISONO_MASTER_KEY"]}
request = urllib.request.Request("http://127.0.0.1:4000/v1/chat/completions", body.encode(), headers)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def test_the_image_serves_without_root_on_a_read_only_file_system(image: BuildStage, tmp_path: Path) -> None:
    [*_, health] = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    state = tmp_path / "state"
    subprocess.run(["cp", "-a", image.root / "var/lib/unisono", state], check=True, timeout=30)
    config = Path(f"{image.root}{words_of('CMD')[-1]}")
    config.parent.mkdir()
    config.write_text(CONFIG)
    environ = {
        **image.environ,
        "HOME": image.folder,
        "UNISONO_MASTER_KEY": KEY,
        "HEALTH": shlex.join(json.loads(health.partition("CMD ")[2])),
        "ASK": ASK,
    }
    command = ["unshare", "-mnpf", "--kill-child", "sh", "-c", SERVE_IN_ROOT, "sh", image.root, state, *words_of("CMD")]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    [answer] = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith('{"id"')]
    assert answer["choices"][0]["message"]["content"]
    assert "Stopped." in completed.stdout + completed.stderr
