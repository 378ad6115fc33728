"""Worker process: a gateway on a listener that it shares with other workers.

The supervisor starts it as `python -m unisono.server.worker` with three descriptors: the listener, the memory with the
loads of all workers, and the socket for messages. If this socket is closed, the supervisor has exited. The worker then
finishes its responses and exits too.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys

from unisono.app import build
from unisono.bootstrap.gateway import Gateway
from unisono.bootstrap.observability import share_metrics
from unisono.observe.logs import start_logging
from unisono.observe.redaction import secrets_of
from unisono.server.accept_balancer import AcceptingProcess, Loads
from unisono.server.config_reload import AppSwitch
from unisono.server.ipc import Accepted, Serve, Up, first_message, next_message, to_bytes
from unisono.server.server import GatewayServer, connection_limit, server_config
from unisono.server.startup_screen import screen_lines


class Worker:
    """Gateway of a worker process, which the supervisor configures by messages.

    The worker starts with the configuration in `order`, the first message. Each further message makes the worker
    reload its configuration. If the reload succeeds, the worker reports this to the supervisor.
    """

    def __init__(self, order: Serve, channel: socket.socket, loads: Loads) -> None:
        settings = order.config.unisono
        start_logging(settings.log_level, secrets_of(order.config), log_format=settings.log_format)
        share_metrics(order.config, order.place)
        self._order = order
        self._channel = channel
        self._switch = AppSwitch(build(order.config, share=order.share), order.share)
        self._server = GatewayServer(
            server_config(self._switch, order.config, order.share),
            self._switch,
            started=self._report_started,
            reload=self._reload,
            place=AcceptingProcess(loads, order.place, connection_limit(order.config, order.share)),
        )
        self._orders_task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    def run(self, listener: socket.socket) -> None:
        self._server.run(sockets=[listener])

    async def _report_started(self, gateway: Gateway) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._channel)
        self._writer.write(
            to_bytes(
                Up(tuple(screen_lines(gateway, self._order.address, self._order.remarks, self._order.key_variable)))
            )
        )
        self._orders_task = asyncio.create_task(self._follow_orders(reader, self._writer), name="orders")

    async def _follow_orders(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while isinstance(order := await next_message(reader), Serve):
            self._order = order
            self._server.reload_soon()
        writer.close()
        if not self._server.should_exit:
            self._server.start_shutdown(notice=True)

    async def _reload(self) -> None:
        order = self._order
        # The reload may enable metrics that were off until now.
        share_metrics(order.config, order.place)
        await self._switch.reload(order.config)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(to_bytes(Accepted(order)))


def main() -> int:
    # The garbage collector is off during startup, as for a single process; see `cli.serve`.
    gc.disable()
    # Until the server handles SIGINT, the signal ends this process silently. The supervisor handles SIGHUP.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listening, memory, channel_file = map(int, sys.argv[1:])
    channel = socket.socket(fileno=channel_file)
    order = first_message(channel)
    if not isinstance(order, Serve):
        return 1
    with socket.socket(fileno=listening) as listener:
        Worker(order, channel, Loads(memory, order.share)).run(listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
