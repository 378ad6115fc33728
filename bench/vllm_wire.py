"""Response bytes of vLLM's completions endpoint, rendered once per answer to save CPU.

Field order, explicit nulls and one event per HTTP chunk are those of the server. Only the request ids differ between
two requests for the same answer, and they have a fixed length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from bench.prose import Answer
from unisono.core.generation import VOCABULARY

MODEL = "gpt-oss-bench"
CONTEXT = 131_072
CREATED = 1_763_640_000
# Placeholder with the length of a request id.
ID_MARK = "f0" * 16

QUESTION_KEY_WORDS = 12
# `<|end|><|start|>assistant` follows each question.
ANSWER_START_TOKENS = 3

DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def framed(payload: bytes) -> bytes:
    """Encode `payload` as one chunk of HTTP/1.1 chunked coding."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def json_response(status: int, body: object) -> bytes:
    content = orjson.dumps(body)
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\nserver: uvicorn\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def failure(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    return json_response(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }


def event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def end(totals: bytes) -> bytes:
    """Return the bytes after the last token: optional usage event, `[DONE]`, last HTTP chunk."""
    return (framed(totals) if totals else b"") + framed(DONE) + LAST_CHUNK


def _event(request_id: str, choices: Sequence[object], counted: object = None) -> bytes:
    return event(
        {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": CREATED,
            "model": MODEL,
            "choices": choices,
            "usage": counted,
        }
    )


def _choice(text: str, tokens: Sequence[int], finish: str | None, prompt: Sequence[int] | None) -> dict[str, object]:
    return {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "prompt_token_ids": prompt,
        "token_ids": tokens,
    }


@dataclass(frozen=True, slots=True)
class Template:
    """Framed chunks, split at the request id; empty for a token without visible text."""

    parts: tuple[bytes, ...]

    def fill(self, request_id: bytes) -> bytes:
        return request_id.join(self.parts)


def template(*events: bytes) -> Template:
    """Frame `events`, in which `ID_MARK` stands for the request id."""
    chunks = b"".join(framed(event) for event in events)
    return Template(tuple(chunks.split(ID_MARK.encode())) if chunks else ())


@dataclass(frozen=True, slots=True)
class RenderedCompletion:
    """Chunks of a streamed answer.

    The first chunk is rendered for each request, because it repeats the token ids of the prompt.
    """

    answer: Answer
    first_tokens: int
    rest: tuple[Template, ...]

    def first(self, request_id: str, prompt: Sequence[int]) -> bytes:
        text, tokens = "".join(self.answer.texts[: self.first_tokens]), self.answer.tokens[: self.first_tokens]
        finish = None if self.rest else self.answer.finish
        return framed(_event(request_id, [_choice(text, tokens, finish, prompt)]))

    def tail(self, request_id: str, prompt_tokens: int, counted: bool) -> bytes:
        totals = _event(request_id, [], usage(prompt_tokens, len(self.answer.tokens)))
        return end(totals if counted else b"")


def render(answer: Answer, tokens_per_chunk: int) -> RenderedCompletion:
    rest = []
    count = len(answer.tokens)
    for start in range(tokens_per_chunk, count, tokens_per_chunk):
        stop = min(start + tokens_per_chunk, count)
        text, tokens = "".join(answer.texts[start:stop]), answer.tokens[start:stop]
        finish = answer.finish if stop == count else None
        rest.append(template(_event(ID_MARK, [_choice(text, tokens, finish, None)])))
    return RenderedCompletion(answer, min(tokens_per_chunk, count), tuple(rest))


def scored(answer: Answer, request_id: str, prompt: Sequence[int], alternatives: int) -> bytes:
    """Render a streamed answer of one token, with log probabilities of the prompt."""
    ids = [*prompt, answer.tokens[0]]
    choice = _choice(answer.texts[0], answer.tokens[:1], "length", prompt)
    choice["logprobs"] = {
        "tokens": [f"token_id:{token}" for token in ids],
        "token_logprobs": [None, *[-0.1] * (len(ids) - 1)],
        "top_logprobs": [
            None,
            *({f"token_id:{token + more}": -0.1 - 3 * more for more in range(alternatives)} for token in ids[1:]),
        ],
        "text_offset": [0] * len(ids),
    }
    return framed(_event(request_id, [choice])) + end(_event(request_id, [], usage(len(prompt), 1)))


def whole(answer: Answer, request_id: str, prompt: Sequence[int]) -> bytes:
    """Render the answer to a request without streaming."""
    choice = _choice("".join(answer.texts), answer.tokens, answer.finish, prompt)
    return json_response(
        200,
        {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": CREATED,
            "model": MODEL,
            "choices": [choice],
            "usage": usage(len(prompt), len(answer.tokens)),
        },
    )


def prompt(body: dict[str, object]) -> Sequence[int]:
    ids = body["prompt"]
    if not isinstance(ids, list):
        raise TypeError("`prompt` is not a list; check the request with `refusal` first")
    return ids


def question_key(prompt: Sequence[int]) -> str:
    """Return the key of a question: the last words before the start of the answer."""
    return " ".join(map(str, prompt[-ANSWER_START_TOKENS - QUESTION_KEY_WORDS : -ANSWER_START_TOKENS]))


def refusal(body: object) -> bytes | None:
    """Return the error response for an invalid request, worded as by the server, or None."""
    if not isinstance(body, dict):
        return failure(400, "BadRequestError", "body is not an object")
    if body.get("model") != MODEL:
        return failure(404, "NotFoundError", f"The model `{body.get('model')}` does not exist.", "model")
    prompt = body.get("prompt")
    try:
        # An array checks a long prompt much faster than a loop.
        ids = array("I", prompt if isinstance(prompt, list) else [])
    except (TypeError, OverflowError):
        ids = array("I")
    if not ids:
        return failure(400, "BadRequestError", "prompt is not a list of token ids", "prompt")
    if max(ids) >= VOCABULARY:
        return failure(400, "BadRequestError", "token id out of vocabulary", "prompt")
    limit = body.get("max_tokens") or 16
    if not isinstance(limit, int) or limit < 1:
        return failure(400, "BadRequestError", "max_tokens must be at least 1", "max_tokens")
    if len(ids) + limit > CONTEXT:
        return failure(400, "BadRequestError", f"maximum context length is {CONTEXT} tokens", "input_tokens")
    return None
