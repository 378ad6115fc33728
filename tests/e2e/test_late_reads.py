"""A delayed event loop is not a backend timeout: data counts if it arrived in time."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.e2e.gateway import gateway, message_of
from tests.fakes import Sleep, Step, Write
from tests.fakes.openai_api import OpenAiScript, chunks, streamed

LIMIT_S = 0.6
FIRST_TOKEN_S, BUSY_FROM_S, BUSY_UNTIL_S, REST_S = 0.4, 0.3, 1.2, 1.5
WORDS = ("One, ", "two, ", "three.")


def response_steps() -> list[Step]:
    """The head at once, the first words while the gateway is blocked, the rest afterwards."""
    script = OpenAiScript(words=WORDS)
    head, role, first, *rest = streamed(chunks({"model": "qwen", "stream": True}, script), script)
    return [head, Sleep(FIRST_TOKEN_S), role, first, Sleep(REST_S - FIRST_TOKEN_S), *rest]


@contextmanager
def threaded_server() -> Iterator[str]:
    """Serve from a thread, so that the event loop of the test does not delay it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(listener,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # Closing the socket would not wake the thread.
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


def serve(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            received = b""
            while not is_complete(received) and (read := connection.recv(65536)):
                received += read
            if not is_complete(received):
                continue
            if received.startswith(b"GET"):
                body = b'{"object": "list", "data": [{"id": "qwen", "object": "model"}]}'
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                continue
            for step in response_steps():
                match step:
                    case Write(data):
                        connection.sendall(data)
                    case Sleep(seconds):
                        time.sleep(seconds)


def is_complete(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


async def test_a_first_token_that_arrived_in_time_is_no_timeout() -> None:
    with threaded_server() as url:
        entry = {
            "model_name": "other",
            "litellm_params": {"model": "vllm/qwen", "api_base": url},
            "unisono": {"first_token_timeout_s": LIMIT_S},
        }
        async with gateway({"model_list": [entry], "router_settings": {"num_retries": 0}}) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(10)
            asyncio.get_running_loop().call_later(BUSY_FROM_S, time.sleep, BUSY_UNTIL_S - BUSY_FROM_S)
            reply = await running.chat(model="other", stream=True)
            assert message_of(reply).content == "".join(WORDS)
