"""Files of the web page: headers, forbidden content, and access without a key."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.asgi import Exchange
from tests.test_app import KEY, built, entry
from unisono.api.asgi_layers import HEALTH_PATHS
from unisono.web.files import FILES, FOLDER, PATHS

# Limit of all files together, each compressed.
MAX_COMPRESSED_BYTES = 250_000
MAX_LINES = 400
VENDOR = "vendor/"
# Data about the libraries, which is not served.
NOT_SERVED = {"vendor/packages.json", "vendor/LICENSES.txt"}
CONTENT = {name: (FOLDER / name).read_text() for name in sorted(FILES) if not name.startswith(VENDOR)}
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setHTML|\beval\(|Function\("
)
ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\")]*")
# Name of the SVG namespace. Browsers send no request to it.
ALLOWED_ADDRESSES = {"http://www.w3.org/2000/svg"}
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", re.IGNORECASE)
DATA_PATHS = ("/v1/status", "/v1/traces", "/v1/traces/req_1", "/v1/usage", "/v1/models", "/metrics")


def gateway(key: str | None = KEY) -> Any:
    return built(entry("gpt-oss", "vllm/a"), key=key)


async def request(path: str, method: str = "GET", key: str | None = KEY, **headers: str) -> Exchange:
    sent = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return await Exchange(gateway(key), method, path, headers=sent).run()


# -- content


def test_the_files_are_small() -> None:
    paths = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert paths == FILES | NOT_SERVED
    assert sum(len(gzip.compress((FOLDER / name).read_bytes())) for name in FILES) < MAX_COMPRESSED_BYTES


def test_libraries_are_unchanged_and_have_their_licences() -> None:
    packages = json.loads((FOLDER / VENDOR / "packages.json").read_text())
    licences = (FOLDER / VENDOR / "LICENSES.txt").read_text()
    digests = {VENDOR + name: file["sha256"] for package in packages for name, file in package["files"].items()}
    assert digests == {
        name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in FILES if name.startswith(VENDOR)
    }
    for package in packages:
        assert f"{package['name']} {package['version']} ({package['licence']})" in licences


@pytest.mark.parametrize("name", CONTENT)
def test_a_file_has_no_foreign_addresses_and_inserts_no_markup(name: str) -> None:
    text = CONTENT[name]
    assert not set(ADDRESS.findall(text)) - ALLOWED_ADDRESSES
    assert not MARKUP.search(text)
    assert len(text.splitlines()) <= MAX_LINES


def test_the_page_has_no_inline_code_or_style() -> None:
    page = CONTENT["index.html"]
    without_icon = re.sub(r'<link rel="icon"[^\n]*', "", page)
    assert not INLINE.search(without_icon)
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', page))
    # Modules are imported at the start or on demand; a stylesheet or script of a library is an element.
    used = {name for text in CONTENT.values() for name in re.findall(r'"/page/([a-z/]+\.(?:js|css))"', text)}
    assert named | used | {"index.html"} == FILES


# -- headers


@pytest.mark.parametrize("key", [KEY, None], ids=["with a key", "without keys"])
@pytest.mark.parametrize("path", sorted(PATHS))
async def test_every_file_is_public_and_has_a_strict_security_policy(path: str, key: str | None) -> None:
    answer = await request(path, key=key)
    assert answer.status == 200
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy == [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    kinds = {".css": "text/css", ".js": "text/javascript"}
    assert answer.headers["content-type"] == f"{kinds.get(Path(path).suffix, 'text/html')}; charset=utf-8"


async def test_a_cached_file_is_not_sent_again() -> None:
    first = await request("/page/app.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for given in (tag, f'"other", {tag}', f"W/{tag}"):
        again = await request("/page/app.js", if_none_match=given)
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == tag
    assert (await request("/page/app.js", if_none_match='"other"')).status == 200
    assert (await request("/", method="HEAD")).status == 200
    assert (await request("/", method="POST")).status == 405


# -- access


@pytest.mark.parametrize(
    "path", [*DATA_PATHS, "/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/routes.py", "//"]
)
async def test_other_paths_require_a_key(path: str) -> None:
    assert (await request(path)).status == 401
    assert (await Exchange(gateway(), "POST", "/v1/inspect", json={"text": "x"}).run()).status == 401


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../app.py", "/page/__init__.py"])
async def test_other_files_are_not_found(path: str) -> None:
    assert (await request(path, authorization=f"Bearer {KEY}")).status == 404


async def test_without_keys_foreign_hosts_and_origins_are_refused() -> None:
    for path in ("/", "/page/app.js", "/v1/status"):
        for headers in ({"host": "evil.example"}, {"host": "localhost:4000", "origin": "https://evil.example"}):
            assert (await request(path, key=None, **headers)).status == 403


def test_public_paths_are_only_files_of_the_page() -> None:
    assert not PATHS & HEALTH_PATHS
    assert all(path in ("/", "/docs") or re.fullmatch(r"/page/(?:[a-z]+/)?[a-z]+\.(?:js|css)", path) for path in PATHS)
