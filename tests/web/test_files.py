"""The files of the page: what they are sent with, what they may not hold, and that nothing else is open."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.asgi import Exchange
from tests.test_app import KEY, built, entry
from unisono.api.asgi_layers import HEALTH_PATHS
from unisono.web.files import FILES, FOLDER, PATHS

MOST_BYTES = 200_000
MOST_LINES = 400
CONTENT = {name: (FOLDER / name).read_text() for name in sorted(FILES)}
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setHTML|\beval\(|Function\("
)
ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\")]*")
NO_ADDRESS = {"http://www.w3.org/2000/svg"}
"""The name of SVG's namespace: nothing is asked for there."""
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", re.IGNORECASE)
DATA = ("/v1/status", "/v1/traces", "/v1/traces/req_1", "/v1/usage", "/v1/models", "/metrics")


def gateway(key: str | None = KEY) -> Any:
    return built(entry("gpt-oss", "vllm/a"), key=key)


async def got(path: str, method: str = "GET", key: str | None = KEY, **headers: str) -> Exchange:
    sent = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return await Exchange(gateway(key), method, path, headers=sent).run()


# -- what is in them


def test_all_of_it_is_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("name", CONTENT)
def test_nothing_comes_from_outside_and_nothing_is_read_as_markup(name: str) -> None:
    text = CONTENT[name]
    assert not set(ADDRESS.findall(text)) - NO_ADDRESS
    assert not MARKUP.search(text)
    assert len(text.splitlines()) <= MOST_LINES


def test_the_page_has_no_code_and_no_style_of_its_own() -> None:
    page = CONTENT["index.html"]
    without_icon = re.sub(r'<link rel="icon"[^\n]*', "", page)
    assert not INLINE.search(without_icon)
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', page))
    imported = {name for text in CONTENT.values() for name in re.findall(r'from "/page/([^"]+)"', text)}
    assert named | imported | {"index.html"} == FILES


# -- how they are sent


@pytest.mark.parametrize("key", [KEY, None], ids=["with keys", "without"])
@pytest.mark.parametrize("path", sorted(PATHS))
async def test_each_is_open_and_may_do_nothing_but_its_work(path: str, key: str | None) -> None:
    answer = await got(path, key=key)
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


async def test_what_a_browser_has_is_not_sent_again() -> None:
    first = await got("/page/app.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for given in (tag, f'"other", {tag}', f"W/{tag}"):
        again = await got("/page/app.js", if_none_match=given)
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == tag
    assert (await got("/page/app.js", if_none_match='"other"')).status == 200
    assert (await got("/", method="HEAD")).status == 200
    assert (await got("/", method="POST")).status == 405


# -- what is behind the door all the same


@pytest.mark.parametrize("path", [*DATA, "/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/routes.py", "//"])
async def test_nothing_else_is_open(path: str) -> None:
    assert (await got(path)).status == 401
    assert (await Exchange(gateway(), "POST", "/v1/inspect", json={"text": "x"}).run()).status == 401


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../app.py", "/page/__init__.py"])
async def test_there_are_no_other_files(path: str) -> None:
    assert (await got(path, authorization=f"Bearer {KEY}")).status == 404


async def test_without_keys_the_page_is_for_this_machine_only() -> None:
    for path in ("/", "/page/app.js", "/v1/status"):
        for headers in ({"host": "evil.example"}, {"host": "localhost:4000", "origin": "https://evil.example"}):
            assert (await got(path, key=None, **headers)).status == 403


def test_of_open_paths_there_are_health_and_these() -> None:
    assert not PATHS & HEALTH_PATHS
    assert all(path == "/" or re.fullmatch(r"/page/[a-z]+\.(?:js|css)", path) for path in PATHS)
