"""Response bytes of a chat completions server, for gateways without Harmony.

The answers are those of the completions wire, already separated into reasoning and content. Each token with visible
text is one chunk. Header tokens and parts of characters take their time and send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import vllm_wire
from bench.prose import Answer
from bench.vllm_wire import CREATED, MODEL, Template, framed, json_response, template
from unisono.core.generation import FIRST_SPECIAL, MESSAGE

# The fields of the two message bodies of an answer, in order.
FIELDS = ("reasoning_content", "content")


def _event(request_id: str, choices: Sequence[object], counted: object = None) -> bytes:
    body = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion.chunk",
        "created": CREATED,
        "model": MODEL,
        "choices": choices,
    }
    return vllm_wire.event(body if counted is None else body | {"usage": counted})


def _choice(delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Chunks of a streamed answer; an entry of `rest` has `tokens_per_chunk` tokens."""

    answer: Answer
    rest: tuple[Template, ...]

    def first(self, request_id: str, prompt: Sequence[int]) -> bytes:
        return framed(_event(request_id, [_choice({"role": "assistant", "content": ""})]))

    def tail(self, request_id: str, prompt_tokens: int, counted: bool) -> bytes:
        totals = _event(request_id, [], vllm_wire.usage(prompt_tokens, len(self.answer.tokens)))
        return vllm_wire.end(totals if counted else b"")


def render(answer: Answer, tokens_per_chunk: int) -> RenderedChat:
    fields = _fields(answer)
    rest = []
    count = len(answer.tokens)
    for start in range(1, count, tokens_per_chunk):
        end = min(start + tokens_per_chunk, count)
        events = []
        for field in FIELDS:
            text = "".join(answer.texts[i] for i in range(start, end) if fields[i] == field)
            if text:
                events.append(_event(vllm_wire.ID_MARK, [_choice({field: text})]))
        if end == count:
            events.append(_event(vllm_wire.ID_MARK, [_choice({}, answer.finish)]))
        rest.append(template(*events))
    return RenderedChat(answer, tuple(rest))


def _fields(answer: Answer) -> list[str]:
    """Return the field of each token's text; empty for a token without visible text."""
    fields: list[str] = []
    bodies = iter(FIELDS)
    field = ""
    for token in answer.tokens:
        if token >= FIRST_SPECIAL:
            field = ""
        fields.append(field)
        if token == MESSAGE:
            field = next(bodies)
    return fields


def whole(answer: Answer, request_id: str, prompt: Sequence[int]) -> bytes:
    """Render the answer to a request without streaming."""
    message = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
    return json_response(
        200,
        {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": CREATED,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}],
            "usage": vllm_wire.usage(len(prompt), len(answer.tokens)),
        },
    )


def prompt(body: dict[str, object]) -> Sequence[int]:
    """Return a sequence as long as the prompt. Callers use only its length and its last items."""
    messages = body["messages"]
    if not isinstance(messages, list):
        raise TypeError("`messages` is not a list; check the request with `refusal` first")
    return range(sum(len(message["content"].split()) for message in messages))


def refusal(body: object) -> bytes | None:
    """Return the error response for an invalid request, worded as by the server, or None."""
    if not isinstance(body, dict):
        return vllm_wire.failure(400, "BadRequestError", "body is not an object")
    if body.get("model") != MODEL:
        return vllm_wire.failure(404, "NotFoundError", f"The model `{body.get('model')}` does not exist.", "model")
    messages = body.get("messages")
    plain = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages
    )
    if not messages or not plain:
        return vllm_wire.failure(400, "BadRequestError", "messages are not a list of texts", "messages")
    limit = body.get("max_tokens") or 16
    if not isinstance(limit, int) or limit < 1:
        return vllm_wire.failure(400, "BadRequestError", "max_tokens must be at least 1", "max_tokens")
    return None
