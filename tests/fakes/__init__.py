"""Scripted backends on real sockets that send exact bytes and inject exact faults.

    from tests.fakes import FakeMlxServer, FakeVllm, VllmScript, reset_at

    async with FakeVllm(tokens=[200005, 35644, 200008, 12194, 200002]) as fake:
        ...                                    # point a backend at fake.url
        fake.requests[0].json["max_tokens"]    # the request, including headers
        await fake.gone()                      # wait for the client disconnect; returns the loop time

    FakeMlxServer(text="<|channel|>final<|message|>Hi", per_chunk=4, finish="stop")
    FakeSglang(tokens=...)  FakeLlamaCpp(tokens=...)  FakeOllama(text=..., bare=True, version="0.33.2")

All accept the fields of their script as keywords: `per_chunk` (tokens or characters per event), `delay_s` (before every
event), `first_delay_s`, `finish`, `faults`, `prompt_tokens`, ... A stop id at the end of `tokens` makes finish "stop";
`max_tokens` of the request is respected and makes it "length".

For output that depends on the request, pass a callable from its JSON to a script or a Refusal:

    FakeVllm(script=lambda asked: VllmScript(tokens=ANSWERS[asked["prompt"][-1]]))
    FakeVllm(script=lambda asked: Refusal(429, b'{"error": "busy"}', headers={"Retry-After": "7"}))

With `fake.prefix_cache = PrefixCache()`, FakeVllm reports the cached tokens of the prompts that it has received.

`fake.script` may be assigned between requests. Faults are functions from steps to steps and combine in order:
`faults=(reset_at(3),)`, `close_at`, `stall_at`, `inject_at(2, b"data: garbage\\n\\n")`, `without_done`, `done_twice`,
`half_event_at(1)`, `flood_from(2, 10**8)` (never more than the client reads), `recut(7)` (7 bytes per
write), `in_one_write`, `line_ends(b"\\r\\n")`. Position k counts events from 0, the usage event and `[DONE]`
included; `Refusal` is a response without a stream. `WireServer` is the generic server: it takes a callable from a
request to steps (Write, Sleep, Stall, Hold, Flood, Reset, Close).
"""

from .dialects import FakeMlxServer, FakeVllm, MlxScript, Patient, Refusal, VllmScript, vllm_context_error
from .faults import (
    close_at,
    done_twice,
    flood_from,
    half_event_at,
    hold_at,
    in_one_write,
    inject_at,
    line_ends,
    recut,
    reset_at,
    stall_at,
    without_done,
)
from .llamacpp import FakeLlamaCpp, LlamaCppScript
from .ollama import FakeOllama, OllamaScript
from .prefix_cache import PrefixCache
from .sglang import FakeSglang, SglangScript
from .wire import Close, Flood, Hold, Reset, Seen, Sleep, Stall, Step, WireServer, Write

__all__ = [
    "Close",
    "FakeLlamaCpp",
    "FakeMlxServer",
    "FakeOllama",
    "FakeSglang",
    "FakeVllm",
    "Flood",
    "Hold",
    "LlamaCppScript",
    "MlxScript",
    "OllamaScript",
    "Patient",
    "PrefixCache",
    "Refusal",
    "Reset",
    "Seen",
    "SglangScript",
    "Sleep",
    "Stall",
    "Step",
    "VllmScript",
    "WireServer",
    "Write",
    "close_at",
    "done_twice",
    "flood_from",
    "half_event_at",
    "hold_at",
    "in_one_write",
    "inject_at",
    "line_ends",
    "recut",
    "reset_at",
    "stall_at",
    "vllm_context_error",
    "without_done",
]
