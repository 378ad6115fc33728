"""Addresses that the browser connects to: only public ones, also after redirects."""

from __future__ import annotations

import pytest

from tests.toolservers.running import moved, page, website
from unisono.toolservers.browser.visited_pages import BrowsingError
from unisono.toolservers.browser.web import Web

SPELLINGS = ("127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]")


@pytest.mark.parametrize("host", SPELLINGS)
async def test_loopback_is_refused_in_every_spelling(host: str) -> None:
    reached: list[str] = []

    def secret(request: object) -> object:
        reached.append(host)
        return page("secret")(request)  # type: ignore[arg-type]

    async with website({"/": secret}) as site:
        web = Web()
        try:
            with pytest.raises(BrowsingError):
                await web.read(f"http://{host}:{site.rpartition(':')[2]}/")
        finally:
            await web.aclose()
    assert reached == []


async def test_refused_addresses_differ_from_unreachable_ones() -> None:
    web = Web()
    with pytest.raises(BrowsingError, match="not on the public Internet"):
        await web.read("http://127.0.0.1:9/")
    await web.aclose()


async def test_every_redirect_is_checked() -> None:
    pages = {"/on": moved("/there"), "/there": page("there"), "/in": moved("http://169.254.169.254/latest/meta-data/")}
    async with website(pages) as site:
        web = Web(private=True)
        try:
            assert (await web.read(f"{site}/on")).text == "there"
            with pytest.raises(BrowsingError, match="not on the public Internet"):
                await web.read(f"{site}/in")
        finally:
            await web.aclose()


async def test_a_document_has_the_url_after_redirects() -> None:
    async with website({"/a": moved("/b"), "/b": page("b", "text/plain")}) as site:
        web = Web(private=True)
        document = await web.read(f"{site}/a")
        assert (document.url, document.text, document.is_html) == (f"{site}/b", "b", False)
        await web.aclose()


TEXTS = {
    "HTTP header": ("text/html; charset=iso-8859-1", b"<p>caf\xe9"),
    "meta element": ("text/html", b'<meta charset="windows-1252"><p>caf\xe9'),
    "byte order mark": ("text/plain", b"\xef\xbb\xbfcaf\xc3\xa9"),
    "not declared": ("text/plain", b"caf\xc3\xa9"),
}


@pytest.mark.parametrize(("declared", "body"), TEXTS.values(), ids=TEXTS)
async def test_a_page_is_decoded_with_its_encoding(declared: str, body: bytes) -> None:
    from aiohttp import web as answers

    def respond(_: object) -> answers.Response:
        return answers.Response(body=body, headers={"content-type": declared})

    async with website({"/": respond}) as site:
        web = Web(private=True)
        assert (await web.read(f"{site}/")).text.endswith("café")
        await web.aclose()
