"""Fake backends whose model reads its prompt.

After a header it writes a body, after half a recipient a tool's name, and otherwise the next scripted output. Servers
with constrained decoding apply the constraint of the request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.gateway import Answer, Gateway, config_of, gateway, message_of
from tests.e2e.messages import message_in, of_chat
from tests.e2e.messages import message_of as in_messages
from tests.e2e.responses import Json, streamed
from tests.fakes import FakeMlxServer, FakeVllm, MlxScript, VllmScript, constraints
from tests.fakes.constraints import Held
from tests.fakes.llamacpp import FakeLlamaCpp, LlamaCppScript
from tests.fakes.ollama import FakeOllama, OllamaScript
from tests.fakes.sglang import FakeSglang, SglangScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
START = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.<|end|>{START}"
STOPS = ("<|return|>", "<|call|>")


def answers(text: str) -> str:
    """Return model output with reasoning and an answer."""
    return f"{THOUGHT}<|channel|>final<|message|>{text}<|return|>"


def calls(name: str, arguments: str = "{}") -> str:
    """Return model output with reasoning and a tool call."""
    return f"{THOUGHT}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


# Tokens or characters per event, and pauses between the events. Without a pause, one network read has several events.
FRAMINGS: Mapping[str, Mapping[str, Any]] = {
    f"{size} per event, {pause}": {"per_chunk": size, "delay_s": delay_s}
    for size in (1, 16, 32)
    for pause, delay_s in (("without pauses", 0.0), ("with pauses", 0.02))
}


def _ids(script: type[Any]) -> Callable[..., Any]:
    return lambda output, **more: script(tokens=ENCODING.encode_marked(output), **more)


def _text(script: type[Any]) -> Callable[..., Any]:
    def written(output: str, **more: Any) -> Any:
        stop = next((stop for stop in STOPS if output.endswith(stop)), "")
        return script(text=output.removesuffix(stop), **{"per_chunk": 3, **more})

    return written


def tokens_for(kind: Kind, output: str, framing: Mapping[str, Any]) -> int:
    """Return a `max_tokens` that is just enough for `output`."""
    size = len(ENCODING.encode_marked(output))
    if kind.name in ("vllm", "sglang", "llamacpp"):
        return size
    # These fake servers count pieces of text as tokens, and the gateway estimates the tokens of a cut text.
    return len(output) if framing["per_chunk"] == 1 else size + 8


def _never(body: dict[str, Any]) -> Held | None:
    return None


@dataclass(frozen=True)
class Kind:
    """A backend kind.

    `name` is the kind in the configuration. `held` reads the constraint from a request.
    """

    name: str
    fake: Callable[[], Any]
    script: Callable[..., Any]
    held: Callable[[dict[str, Any]], Held | None]
    guided: bool = True
    # Whether constrained decoding supports a choice of texts.
    chooses: bool = True


KINDS = {
    "vllm": Kind("vllm", FakeVllm, _ids(VllmScript), constraints.vllm),
    "vllm, unguided": Kind("vllm", FakeVllm, _ids(VllmScript), constraints.vllm, guided=False, chooses=False),
    "sglang": Kind("sglang", FakeSglang, _ids(SglangScript), constraints.sglang),
    "llamacpp": Kind("llamacpp", lambda: FakeLlamaCpp(context=131_072), _ids(LlamaCppScript), constraints.llamacpp),
    "ollama": Kind("ollama", FakeOllama, _text(OllamaScript), constraints.ollama, chooses=False),
    "mlx_server": Kind("mlx_server", FakeMlxServer, _text(MlxScript), _never, guided=False, chooses=False),
}


@dataclass(frozen=True)
class Asked:
    """A generation that was requested from the model.

    `behind` is the part of its prompt after the last `<|start|>assistant`.
    """

    prompt: str
    behind: str
    held: Held | None


@dataclass
class Model:
    """Scripted model.

    `first` are its outputs from the start of a message, `bodies` its outputs after a header; the last one is repeated.
    `name` is the tool that it calls.
    """

    first: Sequence[str] = ()
    bodies: Sequence[str] = ()
    name: str = ""
    asked: list[Asked] = field(default_factory=list)
    # The same requests as received by the server.
    requests: list[dict[str, Any]] = field(default_factory=list)
    _begun: int = 0
    _written: int = 0

    def says(self, prompt: str, held: Held | None) -> str:
        after_start = prompt.rpartition(START)[2]
        self.asked.append(Asked(prompt, after_start, held))
        if after_start.endswith("<|message|>"):
            return self._body() + (STOPS[1] if " to=" in after_start else STOPS[0])
        if held is not None and held.texts:
            [choice] = [text for text in held.texts if text.endswith(self.name)]
            return choice + STOPS[1]
        if after_start.endswith(" to=functions"):
            return f".{self.name} <|constrain|>json<|message|>{self._body()}{STOPS[1]}"
        self._begun += 1
        return self.first[min(self._begun, len(self.first)) - 1]

    def _body(self) -> str:
        self._written += 1
        return self.bodies[min(self._written, len(self.bodies)) - 1]


@dataclass
class Desk:
    """A gateway with one such backend."""

    kind: Kind
    fake: Any
    gateway: Gateway
    model: Model = field(default_factory=Model)

    def think(self, *first: str, bodies: Sequence[str] = (), name: str = "", **script: Any) -> Model:
        """Set and return the model; `script` are additional fields of the server's script."""
        self.model = model = Model(first, bodies, name)

        def script_for(body: dict[str, Any]) -> Any:
            model.requests.append(body)
            prompt = body["prompt"]
            marked = prompt if isinstance(prompt, str) else ENCODING.decode(prompt)
            return self.kind.script(model.says(marked, self.kind.held(body)), **script)

        self.fake.script = script_for
        return model


@asynccontextmanager
async def desk(kind: Kind, **unisono: Any) -> AsyncIterator[Desk]:
    """Run a gateway with one backend of a kind; `unisono` are settings of the model."""
    async with kind.fake() as fake:
        fake.patient.constrains = kind.guided
        config = config_of(f"{kind.name}@{fake.url}")
        config["model_list"][0]["unisono"] = unisono
        async with gateway(config) as running:
            yield Desk(kind, fake, running)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a request on any API surface; `whole` is the body, or the folded stream."""

    text: str
    refusal: str
    calls: list[tuple[str, str]]
    note: Mapping[str, Any]
    finish: str
    whole: Any

    @property
    def unmet(self) -> str:
        return str(self.note.get("unmet", ""))


async def chat(harness: Desk, *, stream: bool, **fields: Any) -> Outcome:
    answer = await harness.gateway.chat(stream=stream, **fields)
    assert answer.status == 200, answer.raw
    message = message_of(answer)
    return Outcome(
        message.content or "", _refusal(answer), message.calls, message.note, message.finish_reason, answer.body
    )


def _refusal(answer: Answer) -> str:
    if not answer.events:
        return answer.body["choices"][0]["message"]["refusal"] or ""
    return "".join(choice["delta"].get("refusal") or "" for event in answer.events for choice in event["choices"])


def flat(tool: Json) -> Json:
    """Return a Chat Completions tool in the format of the Responses API."""
    return {"type": "function", **tool["function"]} if "function" in tool else tool


def of_responses(fields: Mapping[str, Any]) -> Json:
    """Translate fields of a Chat request to a Responses request."""
    body = dict(fields)
    if "tools" in body:
        body["tools"] = [flat(tool) for tool in body["tools"]]
    if isinstance(choice := body.get("tool_choice"), dict):
        allowed = choice.get("allowed_tools")
        body["tool_choice"] = (
            {"type": "allowed_tools", **allowed, "tools": [flat(tool) for tool in allowed["tools"]]}
            if allowed
            else flat(choice)
        )
    if response_format := body.pop("response_format", None):
        body["text"] = {"format": {"type": response_format["type"], **response_format.get("json_schema", {})}}
    return body


async def responds(harness: Desk, *, stream: bool, **fields: Any) -> Outcome:
    body = {"model": "gpt-oss", "input": "Hi", "stream": stream, **of_responses(fields)}
    answer = await harness.gateway.post("/v1/responses", json.dumps(body).encode())
    assert answer.status == 200, answer.raw
    response = streamed(answer).last if stream else answer.body
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    called = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
    return Outcome(
        "".join(part["text"] for part in parts if part["type"] == "output_text"),
        "".join(part["refusal"] for part in parts if part["type"] == "refusal"),
        called,
        response["unisono"],
        response["status"],
        response,
    )


async def messages(harness: Desk, *, stream: bool, **fields: Any) -> Outcome:
    answer = await harness.gateway.messages(stream=stream, **of_chat(fields))
    whole = message_in(answer)
    message = in_messages(answer)
    refused = whole["stop_reason"] == "refusal"
    text = message.content or ""
    return Outcome(
        "" if refused else text,
        text if refused else "",
        message.calls,
        message.note,
        message.finish_reason,
        answer.body,
    )


SURFACES: Mapping[str, Callable[..., Any]] = {"chat": chat, "responses": responds, "messages": messages}
