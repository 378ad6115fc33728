"""What stands beside a gateway that is watched: a collector that takes its spans, and a reader of its metrics.

A process of its own: `python -m bench.monitor PORT METRICS_PORT`. It answers every request, spans or not, with 200 and
reads no more of it than where it ends; metrics are read once a second. `GET /seen` tells how much came.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass

import orjson
import uvloop
from aiohttp import ClientError, ClientSession, web

SCRAPE_EVERY_S = 1.0


@dataclass(slots=True)
class MonitorCounters:
    """Requests with spans, and reads of metrics that were answered."""

    exports: int = 0
    span_bytes: int = 0
    scrapes: int = 0
    metric_bytes: int = 0


class Monitor:
    def __init__(self) -> None:
        self.counters = MonitorCounters()

    async def receive_spans(self, request: web.Request) -> web.Response:
        self.counters.exports += 1
        self.counters.span_bytes += len(await request.read())
        return web.Response(content_type="application/x-protobuf")

    async def show_counters(self, _: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(asdict(self.counters)), content_type="application/json")

    async def scrape(self, port: int) -> None:
        """For ever; a gateway that is not there yet is asked again."""
        async with ClientSession() as session:
            while True:
                await asyncio.sleep(SCRAPE_EVERY_S)
                try:
                    async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                        read = len(await answer.read())
                except (ClientError, OSError):
                    continue
                if answer.status == 200:
                    self.counters.scrapes += 1
                    self.counters.metric_bytes += read


async def serve(port: int, metrics: int) -> None:
    monitor = Monitor()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", monitor.receive_spans)
    app.router.add_get("/seen", monitor.show_counters)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await monitor.scrape(metrics)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
