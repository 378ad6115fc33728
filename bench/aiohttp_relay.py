"""Minimal HTTP gateway: one aiohttp server and client that do not parse the content."""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web


async def main(port: int, upstream: int) -> None:
    async with ClientSession(
        f"http://127.0.0.1:{upstream}",
        connector=TCPConnector(limit=0),
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(),
    ) as session:

        async def relay(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            headers = {"content-type": "application/json"}
            async with session.request(request.method, request.path, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response

        runner = web.ServerRunner(web.Server(relay))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
