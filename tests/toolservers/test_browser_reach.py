"""Which addresses the browser dials: public ones, whatever a name, a spelling or a redirect makes of them."""

from __future__ import annotations

import pytest

from tests.toolservers.running import moved, page, website
from unisono.toolservers.browser.visited_pages import BrowsingError
from unisono.toolservers.browser.web import Web

SPELLINGS = ("127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]")


@pytest.mark.parametrize("host", SPELLINGS)
async def test_this_machine_is_not_opened_however_it_is_written(host: str) -> None:
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


async def test_what_is_refused_is_told_apart_from_what_is_not_there() -> None:
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


async def test_where_a_page_really_was_is_what_is_cited() -> None:
    async with website({"/a": moved("/b"), "/b": page("b", "text/plain")}) as site:
        web = Web(private=True)
        document = await web.read(f"{site}/a")
        assert (document.url, document.text, document.is_html) == (f"{site}/b", "b", False)
        await web.aclose()


TEXTS = {
    "declared": ("text/html; charset=iso-8859-1", b"<p>caf\xe9"),
    "in the document": ("text/html", b'<meta charset="windows-1252"><p>caf\xe9'),
    "by a mark": ("text/plain", b"\xef\xbb\xbfcaf\xc3\xa9"),
    "nowhere": ("text/plain", b"caf\xc3\xa9"),
}


@pytest.mark.parametrize(("declared", "body"), TEXTS.values(), ids=TEXTS)
async def test_a_page_is_read_in_its_own_encoding(declared: str, body: bytes) -> None:
    from aiohttp import web as answers

    def said(_: object) -> answers.Response:
        return answers.Response(body=body, headers={"content-type": declared})

    async with website({"/": said}) as site:
        web = Web(private=True)
        assert (await web.read(f"{site}/")).text.endswith("café")
        await web.aclose()
