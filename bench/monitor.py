"""Collector of spans and reader of metrics for a monitored gateway.

Runs as a process: `python -m bench.monitor PORT METRICS_PORT`. It answers every export of spans with 200 and does not
parse the body. It reads the metrics every second. `GET /seen` returns the counters.
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
    """Received exports of spans, and successful reads of metrics."""

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
        """Read the metrics forever, also from a gateway that does not serve yet."""
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
