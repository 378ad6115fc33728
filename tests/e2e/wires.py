"""The backend kinds with a wire, each with its fake, so that one test says what all of them owe a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fakes import FakeMlxServer, FakeVllm, MlxScript, Seen, Stall, Step, VllmScript, stall_at
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
STOPS = ("<|return|>", "<|call|>")

Fake = FakeVllm | FakeMlxServer
Script = VllmScript | MlxScript


@dataclass(frozen=True)
class Wire:
    """`name` is the backend kind as the configuration spells it."""

    name: str

    def fake(self, context: int = 131_072) -> Fake:
        """`context` is the window it claims, where the kind tells one."""
        return FakeVllm(context=context) if self.name == "vllm" else FakeMlxServer()

    def script(self, marked: str, **fields: Any) -> Script:
        """A completion, markers spelled, one token per event; text wires hide the stop token at its end."""
        tokens = ENCODING.encode_marked(marked)
        if self.name == "vllm":
            return VllmScript(tokens=tokens, **fields)
        stop = next((stop for stop in STOPS if marked.endswith(stop)), None)
        pieces = [ENCODING.decode([token]) for token in (tokens[:-1] if stop else tokens)]
        return MlxScript(pieces=pieces, keepalives=0, **fields)

    def silent(self) -> Script:
        """A backend that takes the request and never says a word, not even headers."""
        return _SilentVllm() if self.name == "vllm" else _SilentMlx()

    def hidden_stop(self, *rules: str) -> list[str]:
        """The rules of an answer that ended at its stop token."""
        return list(rules) if self.name == "vllm" else ["restored-stop", *rules]


class _SilentVllm(VllmScript):
    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return [Stall()]


class _SilentMlx(MlxScript):
    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return [Stall()]


WIRES = {name: Wire(name) for name in ("vllm", "mlx_server")}

THINKING = "<|channel|>analysis<|message|>" + "hm, " * 400
ANSWERING = "<|channel|>final<|message|>" + "la " * 400
CALLING = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"' + "sky " * 400
DONE = "<|channel|>final<|message|>Done.<|return|>"
PHASES: dict[str, Callable[[Wire], Script]] = {
    "before the backend answers": lambda wire: wire.silent(),
    "before the first token": lambda wire: wire.script(DONE, faults=(stall_at(0),)),
    "amid the reasoning": lambda wire: wire.script(THINKING, delay_s=0.01),
    "amid the answer": lambda wire: wire.script(ANSWERING, delay_s=0.01),
    "while the backend is silent": lambda wire: wire.script(ANSWERING, faults=(stall_at(9),)),
    "while a call is held": lambda wire: wire.script(CALLING, delay_s=0.01),
}
"""What a client can leave in the middle of. The tool that is called is `look`."""


def deployment(
    group: str, wire: Wire, fake: Fake | str, *, patience_s: float = 10.0, **params: Any
) -> Mapping[str, Any]:
    """A `model_list` entry: `fake`, or what is at an address, serves `group`. `patience_s` is for the first token and
    for silence."""
    url = fake if isinstance(fake, str) else fake.url
    return {
        "model_name": group,
        "litellm_params": {"model": f"{wire.name}/tiny", "api_base": url, "stream_timeout": patience_s, **params},
        "unisono": {"first_token_timeout_s": patience_s},
    }


def asked(fake: Fake) -> Sequence[Seen]:
    """The generations a fake was asked for."""
    return [request for request in fake.requests if request.path == "/v1/completions"]
