"""Backends whose model reads its prompt: behind a header it writes a body, behind half a recipient a tool's name, and
anything else it was told to say from the start. Kept to a constraint or not, as the server is."""

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
    """What a model says that thinks and answers."""
    return f"{THOUGHT}<|channel|>final<|message|>{text}<|return|>"


def calls(name: str, arguments: str = "{}") -> str:
    """What a model says that thinks and calls."""
    return f"{THOUGHT}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def _ids(script: type[Any]) -> Callable[..., Any]:
    return lambda said, **more: script(tokens=ENCODING.encode_marked(said), **more)


def _text(script: type[Any]) -> Callable[..., Any]:
    def written(said: str, **more: Any) -> Any:
        stop = next((stop for stop in STOPS if said.endswith(stop)), "")
        return script(text=said.removesuffix(stop), per_chunk=3, **more)

    return written


def _never(asked: dict[str, Any]) -> Held | None:
    return None


@dataclass(frozen=True)
class Kind:
    """`name` is the backend kind as the configuration spells it; `held` reads from a request what it is kept to."""

    name: str
    fake: Callable[[], Any]
    script: Callable[..., Any]
    held: Callable[[dict[str, Any]], Held | None]
    guided: bool = True
    chooses: bool = True
    """Whether it can be kept to one of some texts."""


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
    """One generation a model was asked for. `behind` is what its prompt has behind the last `<|start|>assistant`."""

    prompt: str
    behind: str
    held: Held | None


@dataclass
class Model:
    """`first` is what it says from the start of a message, each in turn and the last one for ever; `bodies` the same
    for what it writes behind a header, and `name` the tool it has in mind."""

    first: Sequence[str] = ()
    bodies: Sequence[str] = ()
    name: str = ""
    asked: list[Asked] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The same as the server got them."""
    _begun: int = 0
    _written: int = 0

    def says(self, prompt: str, held: Held | None) -> str:
        behind = prompt.rpartition(START)[2]
        self.asked.append(Asked(prompt, behind, held))
        if behind.endswith("<|message|>"):
            return self._body() + (STOPS[1] if " to=" in behind else STOPS[0])
        if held is not None and held.texts:
            [named] = [text for text in held.texts if text.endswith(self.name)]
            return named + STOPS[1]
        if behind.endswith(" to=functions"):
            return f".{self.name} <|constrain|>json<|message|>{self._body()}{STOPS[1]}"
        self._begun += 1
        return self.first[min(self._begun, len(self.first)) - 1]

    def _body(self) -> str:
        self._written += 1
        return self.bodies[min(self._written, len(self.bodies)) - 1]


@dataclass
class Desk:
    """A gateway with one such backend behind it."""

    kind: Kind
    fake: Any
    gateway: Gateway
    model: Model = field(default_factory=Model)

    def think(self, *first: str, bodies: Sequence[str] = (), name: str = "", **script: Any) -> Model:
        """The model from here on; `script` are fields of what the server sends."""
        self.model = model = Model(first, bodies, name)

        def said(asked: dict[str, Any]) -> Any:
            model.requests.append(asked)
            prompt = asked["prompt"]
            marked = prompt if isinstance(prompt, str) else ENCODING.decode(prompt)
            return self.kind.script(model.says(marked, self.kind.held(asked)), **script)

        self.fake.script = said
        return model


@asynccontextmanager
async def desk(kind: Kind, **unisono: Any) -> AsyncIterator[Desk]:
    """`unisono` are settings of the model."""
    async with kind.fake() as fake:
        fake.patient.constrains = kind.guided
        config = config_of(f"{kind.name}@{fake.url}")
        config["model_list"][0]["unisono"] = unisono
        async with gateway(config) as running:
            yield Desk(kind, fake, running)


@dataclass(frozen=True)
class Outcome:
    """What a client is left with, on whichever surface. `whole` is the body, or what the stream came to."""

    text: str
    refusal: str
    calls: list[tuple[str, str]]
    note: Mapping[str, Any]
    finish: str
    whole: Any

    @property
    def unmet(self) -> str:
        return str(self.note.get("unmet", ""))


async def chat(here: Desk, *, stream: bool, **fields: Any) -> Outcome:
    answer = await here.gateway.chat(stream=stream, **fields)
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
    """A tool of Chat Completions as the Responses API has it."""
    return {"type": "function", **tool["function"]} if "function" in tool else tool


def of_responses(fields: Mapping[str, Any]) -> Json:
    """Fields of a Chat request as a Responses request has them."""
    told = dict(fields)
    if "tools" in told:
        told["tools"] = [flat(tool) for tool in told["tools"]]
    if isinstance(choice := told.get("tool_choice"), dict):
        listed = choice.get("allowed_tools")
        told["tool_choice"] = (
            {"type": "allowed_tools", **listed, "tools": [flat(tool) for tool in listed["tools"]]}
            if listed
            else flat(choice)
        )
    if asked := told.pop("response_format", None):
        told["text"] = {"format": {"type": asked["type"], **asked.get("json_schema", {})}}
    return told


async def responds(here: Desk, *, stream: bool, **fields: Any) -> Outcome:
    body = {"model": "gpt-oss", "input": "Hi", "stream": stream, **of_responses(fields)}
    answer = await here.gateway.post("/v1/responses", json.dumps(body).encode())
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


async def messages(here: Desk, *, stream: bool, **fields: Any) -> Outcome:
    answer = await here.gateway.messages(stream=stream, **of_chat(fields))
    whole = message_in(answer)
    said = in_messages(answer)
    refused = whole["stop_reason"] == "refusal"
    text = said.content or ""
    return Outcome(
        "" if refused else text, text if refused else "", said.calls, said.note, said.finish_reason, answer.body
    )


SURFACES: Mapping[str, Callable[..., Any]] = {"chat": chat, "responses": responds, "messages": messages}
