"""OpenAI API of a server, with a scripted response for any model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .dialects import Refusal, chunked
from .faults import Fault
from .wire import Seen, Sleep, Step, WireServer, Write


@dataclass(frozen=True)
class OpenAiScript:
    """Scripted response; a stream sends it word by word.

    `extra` is merged into every body. With `counts` False, no usage is sent.
    """

    words: Sequence[str] = ("Four", ".")
    finish: str = "stop"
    prompt_tokens: int = 7
    counts: bool = True
    delay_s: float = 0.0
    faults: Sequence[Fault] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, Any]:
        completion_tokens = len(self.words)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }


class FakeOpenAi(WireServer):
    """Server whose `script` can be a callable from the request JSON to a script or a Refusal."""

    def __init__(
        self,
        script: OpenAiScript | Refusal | Callable[[Any], OpenAiScript | Refusal] = OpenAiScript(),
        *,
        models: Sequence[str] = ("qwen",),
        listing: Refusal | None = None,
    ) -> None:
        super().__init__(self._respond)
        self.script = script
        self.models = models
        self.listing = listing

    def _respond(self, seen: Seen) -> list[Step]:
        if seen.method == "GET":
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
            return (self.listing or _json(listed)).steps()
        asked = seen.json
        script = self.script(asked) if callable(self.script) else self.script
        if isinstance(script, Refusal):
            return script.steps()
        responses = seen.path.endswith("/responses")
        if asked.get("stream"):
            events = response_events(asked, script) if responses else chunks(asked, script)
            return streamed(events, script)
        waits: list[Step] = [Sleep(script.delay_s)] if script.delay_s else []
        return [*waits, *_json(response(asked, script) if responses else completion(asked, script)).steps()]


def _json(body: Any) -> Refusal:
    return Refusal(200, json.dumps(body).encode())


def completion(asked: Any, script: OpenAiScript) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(script.words)}
    choice = {"index": 0, "message": message, "finish_reason": script.finish}
    usage = {"usage": script.usage} if script.counts else {}
    head = {"id": "chatcmpl-there", "object": "chat.completion", "created": 1, "model": asked["model"]}
    return head | {"choices": [choice]} | usage | script.extra


def chunks(asked: Any, script: OpenAiScript) -> list[bytes]:
    head = {"id": "chatcmpl-there", "object": "chat.completion.chunk", "created": 1, "model": asked["model"]}
    head |= script.extra

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    events = [chunk({"role": "assistant", "content": ""}), *(chunk({"content": word}) for word in script.words)]
    events.append(chunk({}, script.finish))
    if script.counts and (asked.get("stream_options") or {}).get("include_usage"):
        events.append(head | {"choices": [], "usage": script.usage})
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n"]


def response(asked: Any, script: OpenAiScript, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": "".join(script.words), "annotations": []}
    message = {"id": "msg_there", "type": "message", "role": "assistant", "status": status, "content": [part]}
    usage = {
        "input_tokens": script.prompt_tokens,
        "output_tokens": len(script.words),
        "total_tokens": script.prompt_tokens + len(script.words),
    }
    done = {"output": [message], "usage": usage} if status == "completed" else {"output": [], "usage": None}
    head = {"id": "resp_there", "object": "response", "created_at": 1, "model": asked["model"], "status": status}
    return head | done | script.extra


def response_events(asked: Any, script: OpenAiScript) -> list[bytes]:
    events: list[dict[str, Any]] = [{"type": "response.created", "response": response(asked, script, "in_progress")}]
    events += ({"type": "response.output_text.delta", "item_id": "msg_there", "delta": word} for word in script.words)
    events.append({"type": "response.completed", "response": response(asked, script)})
    return [
        f"data: {json.dumps(event | {'sequence_number': number})}\nevent: {event['type']}\n\n".encode()
        for number, event in enumerate(events)
    ]


def streamed(events: list[bytes], script: OpenAiScript) -> list[Step]:
    body: list[Step] = []
    for event in events:
        if script.delay_s:
            body.append(Sleep(script.delay_s))
        body.append(Write(event, framed=True))
    for fault in script.faults:
        body = fault(body)
    return chunked(b"text/event-stream", body)
