"""A folder as a search engine: ranking, snippets and confinement to the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.errors import ConfigError
from unisono.toolservers.browser.folder import Folder
from unisono.toolservers.browser.visited_pages import BrowsingError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of documents, next to a file outside of it."""
    (tmp_path / "secret.txt").write_text("the secret key")
    root = tmp_path / "docs"
    (root / "guide").mkdir(parents=True)
    (root / "guide" / "set up.md").write_text("Intro\n\n# Setting up\n\nInstall the gateway.\nThen a key is needed.\n")
    (root / "backends.html").write_text("<title>Backends</title><p>gateway <a href='guide/set%20up.md'>first</a></p>")
    (root / "long.txt").write_text("gateway " + "filler " * 5000)
    (root / ".hidden.txt").write_text("gateway hidden key")
    (root / "picture.png").write_bytes(b"gateway")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    (root / "linked").symlink_to(tmp_path)
    return root


async def test_titles_rank_higher_and_long_documents_lower(root: Path) -> None:
    found = await Folder(root).search("Gateway backends", 10)
    assert [result.url for result in found] == [
        "file:///backends.html",
        "file:///guide/set%20up.md",
        "file:///long.txt",
    ]
    assert found[0].title == "Backends"
    assert found[1].title == "Setting up"


async def test_a_snippet_shows_the_matching_line(root: Path) -> None:
    (result,) = await Folder(root).search("key needed", 10)
    assert result.snippet == "Then a key is needed."


async def test_the_number_of_results_is_limited(root: Path) -> None:
    assert len(await Folder(root).search("gateway", 2)) == 2
    assert await Folder(root).search("zebra", 2) == []
    assert await Folder(root).search("!?", 2) == []


async def test_the_next_search_sees_changed_files(root: Path) -> None:
    folder = Folder(root)
    assert await folder.search("zebra", 5) == []
    (root / "new.txt").write_text("a zebra")
    assert [result.url for result in await folder.search("zebra", 5)] == ["file:///new.txt"]
    (root / "new.txt").unlink()
    assert await folder.search("zebra", 5) == []


@pytest.mark.parametrize("url", ["file:///guide/set%20up.md", "file:/guide/set up.md", "file:///guide/set%20up.md#top"])
async def test_a_document_is_read_by_its_url(root: Path, url: str) -> None:
    document = await Folder(root).read(url)
    assert (document.url, document.title) == ("file:///guide/set%20up.md", "Setting up")
    assert document.text.startswith("Intro")


OUTSIDE = (
    "file:///etc/passwd",
    "file:///../secret.txt",
    "file:///guide/../../secret.txt",
    "file:///%2e%2e/secret.txt",
    "file:///link.txt",
    "file:///linked/secret.txt",
    "file:///.hidden.txt",
    "file:///picture.png",
    "file://localhost/etc/passwd",
    "file:///guide",
    "file:",
    "file:///a\x00b",
)


@pytest.mark.parametrize("url", OUTSIDE)
async def test_other_files_cannot_be_read(root: Path, url: str) -> None:
    with pytest.raises(BrowsingError, match="the document does not exist"):
        await Folder(root).read(url)


async def test_a_document_replaced_by_a_symlink_is_not_read(root: Path, tmp_path: Path) -> None:
    folder = Folder(root)
    await folder.search("gateway", 5)
    (root / "long.txt").unlink()
    (root / "long.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(BrowsingError, match="cannot be read"):
        await folder.read("file:///long.txt")


async def test_unreadable_and_huge_files_are_not_searched(root: Path) -> None:
    os.mkfifo(root / "pipe.txt")
    (root / "huge.txt").write_text("zebra " * 500_000)
    assert await Folder(root).search("zebra", 5) == []


def test_a_missing_folder_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder does not exist"):
        Folder(tmp_path / "nowhere")
