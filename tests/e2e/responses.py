"""The Responses API of a whole gateway, as a strict client uses it: every stream is checked as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.api.responses.folding import fold
from tests.e2e.gateway import Answer, Gateway, gateway
from tests.e2e.wires import ENCODING, Fake, Script, Wire, asked, deployment

Json = dict[str, Any]

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
OK = "<|channel|>final<|message|>ok<|return|>"
ANSWER = THOUGHT + OK
"""Thoughts and an answer."""

TOOL: Json = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = THOUGHT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'


@dataclass(frozen=True)
class Streamed:
    """A whole stream. `last` is the response its terminal event holds."""

    answer: Answer
    events: list[Json]

    @property
    def types(self) -> list[str]:
        return [str(event["type"]) for event in self.events]

    @property
    def last(self) -> Json:
        return dict(self.events[-1]["response"])


@dataclass
class Line:
    """A gateway with one backend behind it that says what it is told to."""

    wire: Wire
    fake: Fake
    gateway: Gateway
    root: str = "/v1"
    more: Json = field(default_factory=dict)
    """Fields of every request."""

    def say(self, *outputs: str | Script, **fields: Any) -> None:
        """What is generated next, in order, the last one for ever; markers are spelled."""
        scripts = [self.wire.script(each, **fields) if isinstance(each, str) else each for each in outputs]
        left = iter(scripts)
        self.fake.script = lambda asked: next(left, scripts[-1])  # type: ignore[assignment]
        self.fake.requests.clear()

    async def post(self, path: str = "", *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "input": "Hi", **self.more, **fields}
        return await self.gateway.post(f"{self.root}/responses{path}", json.dumps(body).encode(), **headers or {})

    async def whole(self, **fields: Any) -> Json:
        """The response, which comes as a whole."""
        answer = await self.post(**fields)
        assert answer.status == 200, answer.raw
        return dict(answer.body)

    async def streamed(self, **fields: Any) -> Streamed:
        """The stream, which is one that a strict client takes."""
        return streamed(await self.post(stream=True, **fields))

    async def responds(self, *, stream: bool, **fields: Any) -> Json:
        """The response, whichever way it comes."""
        return (await self.streamed(**fields)).last if stream else await self.whole(**fields)

    async def get(self, path: str) -> Answer:
        return await self.gateway.get(self.root + path)

    async def made(self, path: str, **fields: Any) -> Answer:
        return await self.gateway.post(self.root + path, json.dumps(fields).encode())

    async def conversation(self, *items: Json) -> str:
        answer = await self.made("/conversations", items=list(items))
        assert answer.status == 200, answer.raw
        return str(answer.body["id"])

    async def kept(self, response: Json) -> Json:
        """The response as it is kept, which is as it was told."""
        answer = await self.get(f"/responses/{response['id']}")
        assert answer.status == 200, answer.raw
        return dict(answer.body)

    async def items(self, conversation: str) -> list[Json]:
        answer = await self.get(f"/conversations/{conversation}/items?order=asc&limit=100")
        assert answer.status == 200, answer.raw
        return list(answer.body["data"])

    @property
    def prompts(self) -> list[str]:
        """What the model was given, markers spelled."""
        prompts = [request.json["prompt"] for request in asked(self.fake)]
        return [prompt if isinstance(prompt, str) else ENCODING.decode(prompt) for prompt in prompts]

    @property
    def said(self) -> str:
        """What the last prompt says behind its system message."""
        prompt = self.prompts[-1]
        assert prompt.endswith("<|start|>assistant")
        return prompt[prompt.index("<|end|>") + len("<|end|>") : -len("<|start|>assistant")]

    @property
    def tokens(self) -> list[list[int]]:
        """The prompts' token ids, from a backend that takes ids."""
        return [request.json["prompt"] for request in asked(self.fake)]


@asynccontextmanager
async def line(wire: Wire, **sections: Any) -> AsyncIterator[Line]:
    """A running gateway in front of a scripted backend of the wire's kind."""
    async with wire.fake() as fake:
        config = {
            "model_list": [deployment("gpt-oss", wire, fake)],
            "router_settings": {"allowed_fails": 1_000_000, "num_retries": 0},
            **sections,
        }
        async with gateway(config) as running:
            here = Line(wire, fake, running)
            here.say(ANSWER)
            yield here


def streamed(answer: Answer) -> Streamed:
    """The events of a stream. Each is one whole frame whose name is its type, they fold to the last response, and
    `[DONE]` comes behind that."""
    assert answer.status == 200, answer.raw
    assert answer.headers["content-type"].startswith("text/event-stream")
    *frames, rest = answer.raw.decode().split("\n\n")
    assert rest == ""
    told = [frame for frame in frames if not frame.startswith(":")]
    assert told.pop() == "data: [DONE]"
    events = []
    for frame in told:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    fold(events)
    return Streamed(answer, events)


def refusal(answer: Answer, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status == status, answer.raw
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert code in (None, error["code"]), error
    return str(error["message"])


def kinds(items: Sequence[Json]) -> list[str]:
    return [str(item["type"]) for item in items]


def text_of(response: Json) -> str:
    """What a response says aloud."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])
