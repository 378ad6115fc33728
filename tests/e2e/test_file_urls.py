"""Files that requests name by URL: downloaded from the hosts that the operator allows, and from no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.documents.pdfs import pdf
from tests.e2e.responses import Line, line
from tests.e2e.surfaces import unisono_object
from tests.e2e.test_media import ANSWERED, TEXT, send, user
from tests.e2e.wires import WIRES
from unisono.api.input_files import quoted_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
MAX_BYTES = 100_000


@dataclass
class Site:
    """Web server with files; `paths` are those of the requests that it received."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        match request.path:
            case "/tea.pdf":
                return web.Response(body=pdf("Green tea"), content_type="application/pdf")
            case "/tea":
                return web.Response(text="Grün", content_type="text/plain", charset="iso-8859-1")
            case "/data.csv":
                return web.Response(body=b"tea,2", content_type="application/octet-stream")
            case "/moved":
                return web.Response(status=302, headers={"location": "/tea.pdf"})
            case "/away":
                return web.Response(status=302, headers={"location": "http://169.254.169.254/latest"})
            case "/round":
                return web.Response(status=302, headers={"location": "/round"})
            case "/large":
                return web.Response(body=b"a " * MAX_BYTES, content_type="text/plain")
            case "/endless":
                return await self.endless(request)
            case "/squeezed":
                return web.Response(body=b"a", content_type="text/plain", headers={"content-encoding": "gzip"})
            case "/broken":
                return web.Response(body=b"%PDF-1.4", content_type="application/pdf")
            case "/zip":
                return web.Response(body=b"PK", content_type="application/zip")
        return web.Response(status=404)

    async def endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/plain"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"a " * 10_000)
        except ConnectionError:
            return response


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    serving = Site()
    app = web.Application()
    app.router.add_get("/{path:.*}", serving.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    host, port = runner.addresses[0][:2]
    serving.url = f"http://{host}:{port}"
    yield serving
    await runner.cleanup()


ALLOWED = {"host": "127.0.0.1", "ports": [], "plain_http": True, "private": True}
FILES = {"allowed_hosts": [ALLOWED], "max_bytes": MAX_BYTES}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Line]:
    async with line(WIRES["vllm"], unisono={"files": FILES}) as running:
        yield running


def input_file(url: str, **fields: Any) -> Json:
    return {"type": "input_file", "file_url": url, **fields}


READ = {
    "pdf": ("/tea.pdf", {}, "tea.pdf", "Green tea"),
    "charset": ("/tea", {}, "tea", "Grün"),
    "ending": ("/data.csv?v=1", {}, "data.csv", "tea,2"),
    "name": ("/data.csv", {"filename": "mine.csv"}, "mine.csv", "tea,2"),
    "redirect": ("/moved", {}, "moved", "Green tea"),
}


@pytest.mark.parametrize(("path", "fields", "name", "text"), READ.values(), ids=READ)
async def test_a_file_at_an_allowed_host_is_read(
    harness: Line, site: Site, path: str, fields: Json, name: str, text: str
) -> None:
    answer = await send(harness, "responses", [user(input_file(site.url + path, **fields))])
    assert answer.status == 200, answer.raw
    assert quoted_file(name, text) in harness.prompts[-1]
    assert not {name.lower() for name in site.headers[-1]} & {"authorization", "cookie", "x-api-key"}


async def test_a_document_at_an_allowed_host_is_read(harness: Line, site: Site) -> None:
    block = {"type": "document", "title": "Tea", "source": {"type": "url", "url": f"{site.url}/tea.pdf"}}
    answer = await send(harness, "messages", [user(block)])
    assert answer.status == 200, answer.raw
    assert quoted_file("Tea", "Green tea") in harness.prompts[-1]


REFUSED = {
    "another host": ("http://localhost:{port}/tea.pdf", "unsupported_value", "not allowed"),
    "another spelling": ("http://127.1:{port}/tea.pdf", "unsupported_value", "not allowed"),
    "a user": ("http://a:b@127.0.0.1:{port}/tea.pdf", "unsupported_value", "not allowed"),
    "a redirect away": ("{url}/away", "unsupported_value", "not allowed"),
    "redirects": ("{url}/round", "invalid_value", "redirects more than 3 times"),
    "size": ("{url}/large", "invalid_value", "larger than 100,000 bytes"),
    "no end": ("{url}/endless", "invalid_value", "larger than 100,000 bytes"),
    "compression": ("{url}/squeezed", "invalid_value", "compressed"),
    "status": ("{url}/missing", "invalid_value", "HTTP status 404"),
    "a broken file": ("{url}/broken", "invalid_value", "broken"),
    "type": ("{url}/zip", "unsupported_value", "`application/zip` is not supported"),
    "nobody listens": ("http://127.0.0.1:1/a.txt", "invalid_value", "cannot be downloaded"),
}


@pytest.mark.parametrize(("url", "code", "reason"), REFUSED.values(), ids=REFUSED)
async def test_any_other_url_is_refused(harness: Line, site: Site, url: str, code: str, reason: str) -> None:
    part = input_file(url.format(url=site.url, port=site.url.rpartition(":")[2]))
    answer = await send(harness, "responses", [user(part)])
    assert answer.status == 400, answer.raw
    assert (answer.body["error"]["param"], answer.body["error"]["code"]) == ("input.0.content.0.file_url", code)
    assert reason in answer.body["error"]["message"]
    assert harness.prompts == []


async def test_nothing_is_downloaded_unless_the_operator_allows_it(site: Site) -> None:
    site.paths.clear()
    async with line(WIRES["vllm"]) as closed:
        answer = await send(closed, "responses", [user(input_file(f"{site.url}/tea.pdf"))])
        assert (answer.status, answer.body["error"]["param"]) == (400, "input.0.content.0.file_url")
        later = await send(closed, "responses", [user(input_file(f"{site.url}/tea.pdf")), ANSWERED, "Go on."])
        assert unisono_object(later)["recoveries"] == ["media-left-out"]
    assert site.paths == []


async def test_a_history_that_is_sent_again_downloads_nothing(harness: Line, site: Site) -> None:
    first = user(input_file(f"{site.url}/tea.pdf?once"))
    await send(harness, "responses", [first])
    before = len(site.paths)
    await send(harness, "responses", [first, ANSWERED, user({**TEXT, "type": "input_text"})])
    assert len(site.paths) == before
    assert quoted_file("tea.pdf", "Green tea") in harness.prompts[-1]
