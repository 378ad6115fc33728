"""The Responses API of a whole gateway, used by a strict client that checks every stream."""

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
# Reasoning and an answer.
ANSWER = THOUGHT + OK

TOOL: Json = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = THOUGHT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'


@dataclass(frozen=True)
class Streamed:
    """A whole stream. `last` is the response in its terminal event."""

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
    """A gateway with one scripted backend."""

    wire: Wire
    fake: Fake
    gateway: Gateway
    root: str = "/v1"
    # Additional fields of every request.
    more: Json = field(default_factory=dict)

    def say(self, *outputs: str | Script, **fields: Any) -> None:
        """Script the next outputs, in order; the last one is repeated. Markers are spelled as text."""
        scripts = [self.wire.script(each, **fields) if isinstance(each, str) else each for each in outputs]
        left = iter(scripts)
        self.fake.script = lambda _: next(left, scripts[-1])  # type: ignore[assignment]
        self.fake.requests.clear()

    async def post(self, path: str = "", *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "input": "Hi", **self.more, **fields}
        return await self.gateway.post(f"{self.root}/responses{path}", json.dumps(body).encode(), **headers or {})

    async def whole(self, **fields: Any) -> Json:
        """Send a request without streaming and return the response."""
        answer = await self.post(**fields)
        assert answer.status == 200, answer.raw
        return dict(answer.body)

    async def streamed(self, **fields: Any) -> Streamed:
        """Send a streaming request and return its validated stream."""
        return streamed(await self.post(stream=True, **fields))

    async def responds(self, *, stream: bool, **fields: Any) -> Json:
        """Send a request, streaming or not, and return the response."""
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
        """Return the stored response."""
        answer = await self.get(f"/responses/{response['id']}")
        assert answer.status == 200, answer.raw
        return dict(answer.body)

    async def items(self, conversation: str) -> list[Json]:
        answer = await self.get(f"/conversations/{conversation}/items?order=asc&limit=100")
        assert answer.status == 200, answer.raw
        return list(answer.body["data"])

    @property
    def prompts(self) -> list[str]:
        """Prompts that the model received, with markers spelled as text."""
        prompts = [request.json["prompt"] for request in asked(self.fake)]
        return [prompt if isinstance(prompt, str) else ENCODING.decode(prompt) for prompt in prompts]

    @property
    def said(self) -> str:
        """The last prompt after its system message."""
        prompt = self.prompts[-1]
        assert prompt.endswith("<|start|>assistant")
        return prompt[prompt.index("<|end|>") + len("<|end|>") : -len("<|start|>assistant")]

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of the prompts, for a backend that takes ids."""
        return [request.json["prompt"] for request in asked(self.fake)]


@asynccontextmanager
async def line(wire: Wire, **sections: Any) -> AsyncIterator[Line]:
    """Run a gateway with a scripted backend of the wire's kind."""
    async with wire.fake() as fake:
        config = {
            "model_list": [deployment("gpt-oss", wire, fake)],
            "router_settings": {"allowed_fails": 1_000_000, "num_retries": 0},
            **sections,
        }
        async with gateway(config) as running:
            harness = Line(wire, fake, running)
            harness.say(ANSWER)
            yield harness


def streamed(answer: Answer) -> Streamed:
    """Parse and check a stream.

    Every frame is named after its type, the frames fold to the last response, and `[DONE]` follows.
    """
    assert answer.status == 200, answer.raw
    assert answer.headers["content-type"].startswith("text/event-stream")
    *frames, rest = answer.raw.decode().split("\n\n")
    assert rest == ""
    data_frames = [frame for frame in frames if not frame.startswith(":")]
    assert data_frames.pop() == "data: [DONE]"
    events = []
    for frame in data_frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    fold(events)
    return Streamed(answer, events)


def refusal(answer: Answer, status: int, param: str | None = None, code: str | None = None) -> str:
    """Check an error in OpenAI's format and return its message."""
    assert answer.status == status, answer.raw
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert code in (None, error["code"]), error
    return str(error["message"])


def kinds(items: Sequence[Json]) -> list[str]:
    return [str(item["type"]) for item in items]


def text_of(response: Json) -> str:
    """Return the text of a response."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])
