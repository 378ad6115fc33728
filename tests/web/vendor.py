"""Fetch the libraries of the web page from npm: `python -m tests.web.vendor`, or `make vendor`.

`proxy/unisono/web/static/vendor/packages.json` names the versions, licences and files. A changed version is fetched
after the digest of its files was removed there; the script writes the new one.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "proxy/unisono/web/static/vendor"
PACKAGES = FOLDER / "packages.json"
LICENCES = FOLDER / "LICENSES.txt"


def packed(name: str, version: str, folder: Path) -> tarfile.TarFile:
    """Download a package with npm and return its archive."""
    command = ["npm", "pack", "--silent", f"{name}@{version}"]
    listed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=120)
    return tarfile.open(folder / listed.stdout.split()[-1])


def read(archive: tarfile.TarFile, path: str) -> bytes:
    member = archive.extractfile(f"package/{path}")
    assert member is not None, f"the package has no file {path}"
    return member.read()


def fetch(package: dict[str, Any], folder: Path) -> str:
    """Write the files of a package, and return its licence. Exits if a file has another digest than recorded."""
    with packed(package["name"], package["version"], folder) as archive:
        for name, file in package["files"].items():
            content = read(archive, file["source"])
            digest = hashlib.sha256(content).hexdigest()
            if file.get("sha256") not in (None, digest):
                sys.exit(f"{package['name']} {package['version']}: {file['source']} has the digest {digest}")
            file["sha256"] = digest
            (FOLDER / name).write_bytes(content)
        text = read(archive, package["licence_file"]).decode()
    return f"{package['name']} {package['version']} ({package['licence']})\n\n{text.strip()}\n"


def main() -> None:
    packages = json.loads(PACKAGES.read_text())
    with tempfile.TemporaryDirectory() as folder:
        licences = [fetch(package, Path(folder)) for package in packages]
    PACKAGES.write_text(json.dumps(packages, indent=2) + "\n")
    LICENCES.write_text(f"\n{'-' * 80}\n\n".join(licences))


if __name__ == "__main__":
    main()
