"""Backend kinds with fake servers, so that one test covers token-id and text backends."""

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
    """A backend kind; `name` is the one used in the configuration."""

    name: str

    def fake(self, context: int = 131_072) -> Fake:
        """Create a fake server; `context` is its context window if the kind reports one."""
        return FakeVllm(context=context) if self.name == "vllm" else FakeMlxServer()

    def script(self, marked: str, **fields: Any) -> Script:
        """Build a completion from text with markers, with one token per event.

        Text backends hide the stop token at its end.
        """
        tokens = ENCODING.encode_marked(marked)
        if self.name == "vllm":
            return VllmScript(tokens=tokens, **fields)
        stop = next((stop for stop in STOPS if marked.endswith(stop)), None)
        pieces = [ENCODING.decode([token]) for token in (tokens[:-1] if stop else tokens)]
        return MlxScript(pieces=pieces, keepalives=0, **fields)

    def silent(self) -> Script:
        """Build a script that accepts the request and never sends anything, not even headers."""
        return _SilentVllm() if self.name == "vllm" else _SilentMlx()

    def hidden_stop(self, *rules: str) -> list[str]:
        """Return the rules plus `restored-stop` if the backend hides the stop token."""
        return list(rules) if self.name == "vllm" else ["restored-stop", *rules]


class _SilentVllm(VllmScript):
    def steps(self, request: dict[str, Any]) -> list[Step]:
        return [Stall()]


class _SilentMlx(MlxScript):
    def steps(self, request: dict[str, Any]) -> list[Step]:
        return [Stall()]


WIRES = {name: Wire(name) for name in ("vllm", "mlx_server")}

THINKING = "<|channel|>analysis<|message|>" + "hm, " * 400
ANSWERING = "<|channel|>final<|message|>" + "la " * 400
CALLING = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"' + "sky " * 400
DONE = "<|channel|>final<|message|>Done.<|return|>"
# Phases in which a client may disconnect. The called tool is `look`.
PHASES: dict[str, Callable[[Wire], Script]] = {
    "before the backend answers": lambda wire: wire.silent(),
    "before the first token": lambda wire: wire.script(DONE, faults=(stall_at(0),)),
    "during the reasoning": lambda wire: wire.script(THINKING, delay_s=0.01),
    "during the answer": lambda wire: wire.script(ANSWERING, delay_s=0.01),
    "while the backend is silent": lambda wire: wire.script(ANSWERING, faults=(stall_at(9),)),
    "while a call is buffered": lambda wire: wire.script(CALLING, delay_s=0.01),
}


def deployment(
    group: str, wire: Wire, fake: Fake | str, *, patience_s: float = 10.0, **params: Any
) -> Mapping[str, Any]:
    """Build a `model_list` entry with which `fake`, or a server at a URL, serves `group`.

    `patience_s` is the timeout for the first token and for silence.
    """
    url = fake if isinstance(fake, str) else fake.url
    return {
        "model_name": group,
        "litellm_params": {"model": f"{wire.name}/tiny", "api_base": url, "stream_timeout": patience_s, **params},
        "unisono": {"first_token_timeout_s": patience_s},
    }


def asked(fake: Fake) -> Sequence[Seen]:
    """Return the generation requests that a fake received."""
    return [request for request in fake.requests if request.path == "/v1/completions"]
