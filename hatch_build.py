"""Build hook for the address of the published project.

`UNISONO_REPOSITORY` is the URL of its repository, such as https://git.example.org/team/unisono. The package then names
this address, and its description, made of the README, has absolute links to the files of this version. Without the
variable, the package names no address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "UNISONO_REPOSITORY"
# Target of a Markdown link or image that is a path in the repository.
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


class ProjectAddress(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text()
        if repository := os.environ.get(VARIABLE, "").rstrip("/"):
            if not re.fullmatch(r"https://[^\s/]+/\S+", repository):
                raise ValueError(f"{VARIABLE} must be the https URL of a repository, but is {repository!r}")
            tag = f"v{metadata['version']}"
            readme = absolute_links(readme, repository, tag)
            metadata["urls"] = {
                "Homepage": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/README.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links name the files of a tag in a repository."""

    def absolute(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        return f"{image}{label}({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    return RELATIVE.sub(absolute, text)
