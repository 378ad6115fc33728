"""Calls whose arguments exceed a limit of JSON parsers or writers.

Every API answers with status 200, and accepts its own answer when the client sends it back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.api.asgi import Exchange
from tests.depth import examples
from tests.e2e.gateway import Answer, config_of, to_answer
from tests.e2e.messages import message_in
from tests.fakes import FakeVllm, VllmScript
from unisono.app import build
from unisono.config import parse
from unisono.harmony.encoding import load_encoding

Json = dict[str, Any]
ENCODING = load_encoding()
DONE = "<|channel|>final<|message|>Done.<|return|>"
USER = {"role": "user", "content": "Hi"}
OBJECT = {"type": "object"}
DEFERRED = {"type": "function", "name": "look", "description": "Stars.", "parameters": OBJECT, "defer_loading": True}
BM25 = "tool_search_tool_bm25"


@dataclass(frozen=True)
class Surface:
    """An API with a tool that the model calls. `start` is the first text of the tool's arguments."""

    path: str
    called: str
    tools: list[Json]
    start: str = "{"
    fields: Json = field(default_factory=dict)


SURFACES = {
    "chat": Surface("/v1/chat/completions", "f", [{"type": "function", "function": {"name": "f"}}]),
    "messages": Surface("/v1/messages", "f", [{"name": "f", "input_schema": OBJECT}]),
    "messages, search by the gateway": Surface(
        "/v1/messages",
        BM25,
        [
            {"type": f"{BM25}_20251119", "name": BM25},
            {"name": "look", "description": "Stars.", "input_schema": OBJECT, "defer_loading": True},
        ],
        '{"query":"stars",',
    ),
    "responses": Surface("/v1/responses", "f", [{"type": "function", "name": "f", "parameters": OBJECT}]),
    "responses, search by the client": Surface(
        "/v1/responses",
        "tool_search",
        [{"type": "tool_search", "execution": "client", "description": "Search.", "parameters": OBJECT}],
    ),
    "responses, search by the gateway": Surface(
        "/v1/responses", "tool_search", [{"type": "tool_search"}, DEFERRED], '{"query":"stars",'
    ),
    "responses, in the background": Surface(
        "/v1/responses",
        "tool_search",
        [{"type": "tool_search", "execution": "client", "description": "Search.", "parameters": OBJECT}],
        fields={"background": True},
    ),
}


def nested(depth: int, inner: str = "") -> str:
    return "[" * depth + inner + "]" * depth


def of_one_kind(depth: int, inner: str = "1") -> str:
    return '{"a":' * depth + inner + "}" * depth


values = st.one_of(
    st.builds(nested, st.integers(1, 1_200)),
    st.builds(of_one_kind, st.integers(1, 1_200)),
    st.builds("{}e{}".format, st.integers(), st.integers(-400, 400)),
)


class RunningApp:
    """Application with its backend, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, app: Any, fake: FakeVllm) -> None:
        self._runner = runner
        self._app = app
        self._fake = fake

    def say(self, *outputs: str) -> None:
        scripts = iter([VllmScript(tokens=ENCODING.encode_marked(each)) for each in outputs])
        done = VllmScript(tokens=ENCODING.encode_marked(DONE))
        self._fake.script = lambda _: next(scripts, done)

    def request(self, method: str, path: str, body: bytes = b"") -> Exchange:
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        return self._runner.run(Exchange(self._app, method, path, body=body, headers=headers).run())

    def answer(self, surface: Surface, fields: bytes, *, stream: bool) -> Json:
        """Send a request, whose messages or items are `fields`, and return the whole answer."""
        body = {"model": "gpt-oss", "tools": surface.tools, "stream": stream, **surface.fields}
        if surface.path == "/v1/messages":
            body["max_tokens"] = 100_000
        response = self.request("POST", surface.path, json.dumps(body).encode()[:-1] + b"," + fields + b"}")
        assert response.status == 200, response.body[:500]
        if stream:
            return self._folded(surface, to_answer(200, dict(response.headers), response.body))
        answer: Json = json.loads(response.body)
        while answer.get("status") in ("queued", "in_progress"):
            self._runner.run(asyncio.sleep(0.01))
            answer = self.request("GET", f"/v1/responses/{answer['id']}").json()
        return answer

    def _folded(self, surface: Surface, answer: Answer) -> Json:
        match surface.path:
            case "/v1/responses":
                response: Json = answer.events[-1]["response"]
                return response
            case "/v1/messages":
                assert answer.events[-1]["type"] == "message_stop"
                return message_in(answer)
            case _:
                deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
                calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
                if not calls:
                    return {}
                first, *more = calls
                first["function"]["arguments"] += "".join(call["function"]["arguments"] for call in more)
                return {"choices": [{"message": {"role": "assistant", "tool_calls": [first]}}]}


def history_of(surface: Surface, answer: Json) -> bytes:
    """Return the field with the conversation that the client sends next."""
    match surface.path:
        case "/v1/responses":
            assert answer["status"] == "completed", answer["error"]
            assert [item["type"] for item in answer["output"]] != ["message"]
            outputs = [result for item in answer["output"] if (result := result_of(item))]
            return b'"input":' + json.dumps([USER, *answer["output"], *outputs]).encode()
        case "/v1/messages":
            content = answer["content"]
            assert content[0]["type"] in ("tool_use", "server_tool_use")
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "so"}
                for block in content
                if block["type"] == "tool_use"
            ]
            messages = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": results or "So?"}]
            return b'"messages":' + json.dumps(messages).encode()
        case _:
            message = answer["choices"][0]["message"]
            [call] = message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "so"}
            return b'"messages":' + json.dumps([USER, message, result]).encode()


def result_of(item: Json) -> Json | None:
    """Return the client's result of a call."""
    match item:
        case {"type": "tool_search_call", "execution": "client"}:
            return {"type": "tool_search_output", "call_id": item["call_id"], "execution": "client", "tools": []}
        case {"type": "function_call"}:
            return {"type": "function_call_output", "call_id": item["call_id"], "output": "so"}
        case _:
            return None


@pytest.fixture(scope="module")
def running_app() -> Iterator[RunningApp]:
    async def start(stack: AsyncExitStack) -> tuple[Any, FakeVllm]:
        fake = await stack.enter_async_context(FakeVllm())
        app = build(parse(config_of(f"vllm@{fake.url}", router_settings={"allowed_fails": 10**6}), {}).config)
        await stack.enter_async_context(app.lifespan())
        return app, fake

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        app, fake = runner.run(start(stack))
        try:
            yield RunningApp(runner, app, fake)
        finally:
            runner.run(stack.aclose())


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(value=nested(252), stream=False)
@example(value=nested(300), stream=True)
@example(value=of_one_kind(900), stream=False)
@example(value="1" * 30, stream=False)
@example(value="1e999", stream=False)
@example(value="9" * 400, stream=True)
@given(value=values, stream=st.booleans())
def test_any_arguments_are_answered_and_accepted_again(
    running_app: RunningApp, surface: Surface, value: str, stream: bool
) -> None:
    arguments = f'{surface.start}"a":{value}}}'
    running_app.say(
        f"<|channel|>commentary to=functions.{surface.called} <|constrain|>json<|message|>{arguments}<|call|>"
    )
    first = b'"input":"Hi"' if surface.path == "/v1/responses" else b'"messages":' + json.dumps([USER]).encode()
    is_streamed = stream and not surface.fields
    answer = running_app.answer(surface, first, stream=is_streamed)
    running_app.answer(surface, history_of(surface, answer), stream=is_streamed)
