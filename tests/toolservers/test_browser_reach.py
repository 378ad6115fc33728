"""Which addresses the browser dials: public ones, whatever a name, a spelling or a redirect makes of them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from tests.toolservers.running import moved, page, website
from unisono.toolservers.browser.pages import BrowsingError
from unisono.toolservers.browser.web import Web, is_public

_PRIVATE = """
    0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 127.9.9.9 169.254.169.254 172.16.0.1 192.168.1.1 192.0.2.1 198.18.0.1
    224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 168.63.129.16
    :: ::1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 fc00::1 fd12::1 fe80::1 fe80::1%eth0 fec0::1 ff02::1
    2001::1 2001:db8::1 2002:7f00:1::1 100::1
"""
PRIVATE = _PRIVATE.split()
PUBLIC = ("8.8.8.8", "93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:82a::200e")


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_inside_are_not_dialled(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_outside_are(address: str) -> None:
    assert is_public(ip_address(address))


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


def only(*allowed: str) -> Web:
    addresses = {ip_address(address) for address in allowed}

    def may_dial(address: IPv4Address | IPv6Address) -> bool:
        return address in addresses

    return Web(may_dial)


async def test_a_redirect_is_judged_like_the_first_request() -> None:
    async with website({"/secret": page("secret"), "/ok": page("ok")}) as site:
        port = site.rpartition(":")[2]
        outside = {"/in": moved(f"http://127.0.0.1:{port}/secret"), "/on": moved("/there"), "/there": page("there")}
        async with website(outside) as other:
            web = only("127.0.0.1")
            try:
                assert (await web.read(f"{other}/on")).text == "there"
                assert (await web.read(f"{other}/in")).text == "secret"
                outside["/in"] = moved(f"http://127.0.0.2:{port}/secret")
                with pytest.raises(BrowsingError, match="not on the public Internet"):
                    await web.read(f"{other}/in")
            finally:
                await web.aclose()


async def test_where_a_page_really_was_is_what_is_cited() -> None:
    async with website({"/a": moved("/b"), "/b": page("b", "text/plain")}) as site:
        web = only("127.0.0.1")
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
        web = only("127.0.0.1")
        assert (await web.read(f"{site}/")).text.endswith("café")
        await web.aclose()
