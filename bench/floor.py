"""Minimal gateway that does only the Harmony work of an answer: a lower bound for Python.

It renders the prompt with openai-harmony, requests token ids from vLLM over its own connections, separates
reasoning and content, and sends chunks of the Chat API. It has no repairs, limits, state, failover or validation.
The clients of the benchmark compare every answer with what the backend generated, as for all contenders.
"""

from __future__ import annotations

import asyncio
import codecs
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import httptools
import orjson
import uvicorn
from openai_harmony import Conversation, Message, Role, SystemContent

from bench.vllm_wire import MODEL
from unisono.core.generation import CALL, END, MESSAGE, RETURN
from unisono.harmony.encoding import load_encoding
from unisono.harmony.library_parser import load_library

CHUNK_HEAD: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":0,"model":"%b",' % MODEL.encode()
)
REQUEST_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
DELTA: Final = CHUNK_HEAD + b'"choices":[{"index":0,"delta":{"%s":'
FIELDS: Final = {"analysis": "reasoning_content", "final": "content"}


class ChatAnswer:
    """Chunks of one answer, from the tokens of the backend."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self._header: list[int] | None = []
        self._before = {name: DELTA % field.encode() for name, field in FIELDS.items()}
        self._channel = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.texts = {"analysis": "", "final": ""}
        self.tokens = 0

    def chunks(self, tokens: list[int]) -> bytes:
        """Return the chunks for further tokens."""
        text, out = "", []
        self.tokens += len(tokens)
        for token in tokens:
            if self._header is not None:
                if token == MESSAGE:
                    header = self._encoding.decode(self._header)
                    self._channel = "final" if header.endswith("final") else "analysis"
                    self._header = None
                else:
                    self._header.append(token)
            elif token in (END, RETURN, CALL):
                out.append(self._chunk(text))
                text, self._header = "", []
            else:
                text += self._decoder.decode(self._encoding.decode_bytes([token]))
        out.append(self._chunk(text))
        return b"".join(out)

    def _chunk(self, text: str) -> bytes:
        if not text:
            return b""
        self.texts[self._channel] += text
        return self._before[self._channel] + orjson.dumps(text) + b'},"finish_reason":null}]}\n\n'


class Connection(asyncio.Protocol):
    """Connection to the backend: a queue of the parts of one body."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.parts: list[bytes] = []
        self.is_complete = False
        self.waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class Floor:
    """ASGI application of the minimal gateway."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._idle: list[Connection] = []
        self._harmony = load_library()
        self._system = Message.from_role_and_content(Role.SYSTEM, SystemContent.new())
        self._encoding = load_encoding()

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        if scope["path"] == "/health":
            await _send_json(send, b"{}")
            return
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message.get("more_body"):
                break
        requested = orjson.loads(body)
        prompt = self._prompt(requested["messages"])
        answer = ChatAnswer(self._encoding)
        if not requested.get("stream"):
            async for tokens in self._tokens(prompt, requested["max_tokens"]):
                answer.chunks(tokens)
            await _send_json(send, self._body(answer, len(prompt)))
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for tokens in self._tokens(prompt, requested["max_tokens"]):
            if chunks := answer.chunks(tokens):
                await send({"type": "http.response.body", "body": chunks, "more_body": True})
        usage = orjson.dumps(_usage(len(prompt), answer.tokens))
        end = CHUNK_HEAD + b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        counts = CHUNK_HEAD + b'"choices":[],"usage":' + usage + b"}\n\n"
        await send({"type": "http.response.body", "body": end + counts + b"data: [DONE]\n\n", "more_body": False})

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        turns = [Message.from_role_and_content(Role(each["role"]), each["content"]) for each in messages]
        conversation = Conversation.from_messages([self._system, *turns])
        return self._harmony.render_conversation_for_completion(conversation, Role.ASSISTANT)

    async def _tokens(self, prompt: list[int], limit: int) -> AsyncIterator[list[int]]:
        body = orjson.dumps(
            {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": limit,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                "skip_special_tokens": False,
            }
        )
        loop = asyncio.get_running_loop()
        if self._idle:
            connection = self._idle.pop()
        else:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._upstream)
        connection.is_complete = False
        connection.transport.writelines((REQUEST_HEAD % len(body), body))
        rest = b""
        while not connection.is_complete or connection.parts:
            if not connection.parts:
                connection.waiter = loop.create_future()
                await connection.waiter
            *events, rest = (rest + b"".join(connection.parts)).split(b"\n\n")
            connection.parts.clear()
            tokens: list[int] = []
            for event in events:
                if event != b"data: [DONE]" and (choices := orjson.loads(event[6:])["choices"]):
                    tokens += choices[0]["token_ids"]
            if tokens:
                yield tokens
        self._idle.append(connection)

    def _body(self, answer: ChatAnswer, prompt_tokens: int) -> bytes:
        message = {"role": "assistant", **{field: answer.texts[name] for name, field in FIELDS.items()}}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = _usage(prompt_tokens, answer.tokens)
        return orjson.dumps({"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage})


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


async def _send_json(send: Callable[..., Any], body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


if __name__ == "__main__":
    uvicorn.run(Floor(int(sys.argv[2])), port=int(sys.argv[1]), http="httptools", access_log=False, log_level="warning")
