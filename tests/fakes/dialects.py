"""Two dialects as recorded from the real servers: vLLM 0.32 and mlx_lm.server 0.32.2."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.harmony.encoding import load_encoding

from . import constraints
from .constraints import GrammarError, Held
from .faults import Fault
from .loads import Pages, vllm_pages
from .prefix_cache import PrefixCache
from .wire import TOKENIZERS, Close, Flood, Seen, Sleep, Stall, Step, WireServer, Write

STOP_IDS = (200002, 200012, 199999)


@dataclass(frozen=True)
class Refusal:
    """Response that is not a stream. `version` is the last digit of the HTTP version."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    version: int = 1

    def steps(self) -> list[Step]:
        extra = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = (
            f"HTTP/1.{self.version} {self.status} Some Reason\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n{extra}\r\n"
        )
        return [Write(head.encode() + self.body), *([Close()] if self.version == 0 else [])]


def vllm_context_error(limit: int = 4096, asked: int = 5000) -> Refusal:
    """Return the error of vLLM for a prompt and max_tokens that exceed the context."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested 100 output tokens and your "
        f"prompt contains at least {asked} input tokens, for a total of at least {asked + 100} tokens."
    )
    error = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
    return Refusal(400, json.dumps({"error": error}).encode())


def vllm_error(message: str) -> Refusal:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return Refusal(400, json.dumps({"error": error}).encode())


@dataclass(frozen=True)
class Script:
    per_chunk: int = 1
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    # None: "stop", or "length" if max_tokens cut the answer.
    finish: str | None = None
    faults: Sequence[Fault] = ()
    # Prompt tokens in the reported usage; None for the correct number.
    prompt_tokens: object = None
    cached_tokens: int = 0

    def paced(self, events: Iterable[bytes]) -> list[Step]:
        steps: list[Step] = [Sleep(self.first_delay_s)] if self.first_delay_s else []
        for event in events:
            if self.delay_s:
                steps.append(Sleep(self.delay_s))
            steps.append(Write(event, framed=True))
        for fault in self.faults:
            steps = fault(steps)
        return steps

    def usage(self, prompt: int, completion: int) -> dict[str, object]:
        claimed = prompt if self.prompt_tokens is None else self.prompt_tokens
        return {
            "prompt_tokens": claimed,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def logprob_of(token: object) -> float:
    """Return the log probability that fakes report for a token."""
    return -(token % 97 + 1) / 100 if isinstance(token, int) else 0.0


def logprobs_of(tokens: Sequence[object], top: object, prompt: Sequence[int] = ()) -> dict[str, Any] | None:
    """Return the log probabilities in vLLM's form; the alternatives are the token and its successors.

    Those of an echoed prompt come first, and its first token has none.
    """
    if not isinstance(top, int) or isinstance(top, bool):
        return None
    ids = [*prompt, *(token for token in tokens if isinstance(token, int))]
    begin = min(len(prompt), 1)
    return {
        "tokens": [f"token_id:{token}" for token in ids],
        "token_logprobs": [*[None] * begin, *(logprob_of(token) for token in ids[begin:])],
        "top_logprobs": [
            *[None] * begin,
            *(
                {f"token_id:{token + more}": logprob_of(token) - more for more in range(max(top, 1))}
                for token in ids[begin:]
            ),
        ],
        "text_offset": [0] * len(ids),
    }


def echoed(asked: dict[str, Any]) -> Sequence[int]:
    """Return the tokens of a prompt that the answer repeats."""
    return list(asked["prompt"]) if asked.get("echo") else []


@dataclass(frozen=True)
class VllmScript(Script):
    """Script of vLLM.

    A `stop_reason` of None means the behaviour of vLLM: null for `<|return|>` and the id of any other stop token.
    """

    # Token ids; other values are sent unchanged.
    tokens: Sequence[object] = ()
    stop_reason: object = None
    # Log probabilities of an echoed prompt, in vLLM's form.
    echo: dict[str, Any] | None = None

    def events(self, asked: dict[str, Any]) -> list[bytes]:
        limit = asked.get("max_tokens") or 16
        tokens = list(self.tokens)[:limit]
        cut = len(tokens) < len(self.tokens) or (tokens and len(tokens) == limit and tokens[-1] not in STOP_IDS)
        finish = self.finish or ("length" if cut else "stop")
        pieces = [tokens[i : i + self.per_chunk] for i in range(0, len(tokens), self.per_chunk)] or [[]]
        events = []
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            choice: dict[str, object] = {
                "index": 0,
                # Wrong on purpose, because only the ids matter.
                "text": "?" * len(piece),
                "logprobs": self.echo
                or logprobs_of(piece, asked.get("logprobs"), echoed(asked) if number == 0 else ()),
                "finish_reason": finish if last else None,
                "stop_reason": self._reason(tokens, finish) if last else None,
                "prompt_token_ids": asked["prompt"] if number == 0 else None,
                "token_ids": piece if asked.get("return_token_ids") else None,
            }
            events.append(sse_event({**self._frame(asked), "choices": [choice], "usage": None}))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = self.usage(len(asked["prompt"]), len(tokens))
            events.append(sse_event({**self._frame(asked), "choices": [], "usage": usage}))
        return [*events, b"data: [DONE]\n\n"]

    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return chunked(b"text/event-stream; charset=utf-8", self.paced(self.events(asked)))

    def _reason(self, tokens: list[object], finish: str) -> object:
        if self.stop_reason is not None:
            return self.stop_reason
        return tokens[-1] if finish == "stop" and tokens and tokens[-1] in STOP_IDS[1:] else None

    @staticmethod
    def _frame(asked: dict[str, Any]) -> dict[str, object]:
        return {"id": "cmpl-1", "object": "text_completion", "created": 1795198875, "model": asked.get("model")}


@dataclass(frozen=True)
class MlxScript(Script):
    """Text in pieces of `per_chunk` characters, or in `pieces`.

    Each piece counts as one token for `max_tokens`. Special tokens are spelled as text. The stop token and a leading
    space are not part of the text. A response without streaming is split into its tokens, and their ids are sent.
    """

    text: str = ""
    pieces: Sequence[object] | None = None
    keepalives: int = 2
    stop: int = STOP_IDS[0]

    def events(self, asked: dict[str, Any]) -> list[bytes]:
        whole: list[object] = (
            list(self.pieces)
            if self.pieces is not None
            else [self.text[i : i + self.per_chunk] for i in range(0, len(self.text), self.per_chunk)]
        )
        limit = asked.get("max_tokens") or 512
        pieces = whole[:limit]
        finish = self.finish or ("length" if len(pieces) < len(whole) else "stop")
        if pieces and isinstance(pieces[0], str):
            pieces[0] = pieces[0].removeprefix(" ")
        events = [f": keepalive {n + 1}/{self.keepalives}\n\n".encode() for n in range(self.keepalives)]
        events += [self._choice(asked, piece, None) for piece in pieces]
        events.append(self._choice(asked, "", finish))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {**self._frame(asked), "object": "chat.completion", "choices": []}
            events.append(sse_event({**usage, "usage": self.usage(11, len(pieces) + 1)}))
        return [*events, b"data: [DONE]\n\n"]

    def in_one_piece(self, asked: dict[str, Any]) -> bytes:
        spelled = self.text if self.pieces is None else "".join(map(str, self.pieces))
        whole = [*load_encoding().encode_marked(spelled), self.stop]
        tokens = whole[: asked.get("max_tokens") or 512]
        finish = self.finish or ("length" if len(tokens) < len(whole) else "stop")
        shown = tokens[:-1] if finish == "stop" else tokens
        ids = {"content": [{"id": token, "logprob": 0.0} for token in tokens]} if asked.get("logprobs") else None
        text = load_encoding().decode(shown).removeprefix(" ")
        choice = {"index": 0, "finish_reason": finish, "logprobs": ids, "text": text}
        answer = {**self._frame(asked), "choices": [choice], "usage": self.usage(11, len(tokens))}
        return json.dumps(answer).encode()

    def steps(self, asked: dict[str, Any]) -> list[Step]:
        if not asked.get("stream"):
            document = self.in_one_piece(asked)
            about = f"Content-type: application/json\r\nContent-Length: {len(document)}\r\n\r\n"
            return [Write(b"HTTP/1.0 200 OK\r\n" + about.encode()), *self.paced([document]), Close()]
        head = (
            b"HTTP/1.0 200 OK\r\nServer: BaseHTTP/0.6 Python/3.11.7\r\nDate: Fri, 20 Nov 2026 18:00:00 GMT\r\n"
            b"Content-type: text/event-stream\r\nCache-Control: no-cache\r\nAccess-Control-Allow-Origin: *\r\n\r\n"
        )
        return [Write(head), *self.paced(self.events(asked)), Close()]

    def _choice(self, asked: dict[str, Any], text: object, finish: str | None) -> bytes:
        choice = {"index": 0, "finish_reason": finish, "text": text}
        return sse_event({**self._frame(asked), "choices": [choice]})

    @staticmethod
    def _frame(asked: dict[str, Any]) -> dict[str, object]:
        return {
            "id": "cmpl-7d50d058",
            "system_fingerprint": "0.32.2-0.32.4-Linux",
            "object": "text_completion",
            "model": asked.get("model", "default_model"),
            "created": 1795198875,
        }


def chunked(content_type: bytes, body: Iterable[Step]) -> list[Step]:
    """Return the steps of an HTTP/1.1 response with chunked transfer coding."""
    head = (
        b"HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 18:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-type: " + content_type + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    framed = [_in_a_chunk(step) for step in body]
    return [Write(head), *framed, Write(b"0\r\n\r\n")]


def _in_a_chunk(step: Step) -> Step:
    match step:
        case Write(data, framed=True):
            return Write(_chunk(data))
        case Flood(pieces, total):
            return Flood(tuple(map(_chunk, pieces)), total)
        case _:
            return step


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sse_event(data: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@dataclass
class Patient:
    """The model behind a fake server, for probes of the gateway.

    By default it is a correct gpt-oss with its own tokenizer. Requests of clients are answered by the script of the
    fake server instead.
    """

    encode: Callable[[str], Sequence[int]] = field(default_factory=lambda: load_encoding().encode_as_server)
    answer: str = "<|channel|>analysis<|message|>They want OK.<|end|><|start|>assistant<|channel|>final<|message|>OK"
    # Whether it has tokenizer endpoints.
    tokenizes: bool = True
    hangs: bool = False
    strips_markers: bool = False
    # Number of prompt tokens that it keeps.
    reads_at_most: int | None = None
    # Number of prompt tokens that it reports; None for the correct number.
    claims: object = None
    # Whether prompt ids are converted to text and tokenized again.
    rewrites_ids: bool = False
    returns_ids: bool = True
    hides_stops: bool = False
    stops_at: Sequence[int] = STOP_IDS
    takes_bias: bool = True
    # Whether it supports output constraints.
    constrains: bool = True
    refusal: Refusal | None = None
    generations: int = 0

    def vllm(self, seen: Seen) -> list[Step]:
        if seen.path in TOKENIZERS:
            return self._tokenizer(seen).steps()
        asked = seen.json
        prompt = list(self._spelled(asked)) if self.rewrites_ids else asked["prompt"]
        tokens, finish = self._generated(asked, constraints.vllm(asked))
        if self.hides_stops and tokens[-1:] and tokens[-1] in STOP_IDS:
            tokens = tokens[:-1]
        script = VllmScript(
            tokens=tokens,
            finish=finish,
            stop_reason=0 if self.hides_stops else None,
            prompt_tokens=self._claimed(prompt),
        )
        return self._script_steps(script, asked if self.returns_ids else {**asked, "return_token_ids": False})

    def mlx_server(self, seen: Seen) -> list[Step]:
        tokens, finish = self._generated(seen.json)
        spelled = [load_encoding().decode([token]) for token in tokens]
        if finish == "stop":
            spelled = spelled[:-1]
        if self.strips_markers:
            spelled = [text for text, token in zip(spelled, tokens, strict=False) if token < 199998]
        read = self._read(self.encode(seen.json["prompt"]))
        return self._script_steps(MlxScript(pieces=spelled, finish=finish, prompt_tokens=read), seen.json)

    def _script_steps(self, script: VllmScript | MlxScript, asked: dict[str, Any]) -> list[Step]:
        self.generations += 1
        if self.refusal is not None:
            return [*self.refusal.steps(), Close()]
        return [Stall()] if self.hangs else script.steps(asked)

    def _tokenizer(self, seen: Seen) -> Refusal:
        asked = seen.json
        if not self.tokenizes:
            return Refusal(404, b'{"detail":"Not Found"}')
        if seen.path == "/detokenize":
            return Refusal(200, json.dumps({"prompt": load_encoding().decode(asked["tokens"])}).encode())
        ids = list(self.encode(asked["prompt"]))
        return Refusal(200, json.dumps({"count": len(ids), "max_model_len": 131072, "tokens": ids}).encode())

    def _spelled(self, asked: dict[str, Any]) -> Sequence[int]:
        return self.encode(load_encoding().decode(asked["prompt"]))

    def _claimed(self, prompt: Sequence[object]) -> object:
        return self._read(prompt) if self.claims is None else self.claims

    def _read(self, prompt: Sequence[object]) -> int:
        return min(len(prompt), self.reads_at_most or len(prompt))

    def _generated(self, asked: dict[str, Any], held: Held | None = None) -> tuple[list[int], str]:
        """Return ids and finish reason of the answer, or of output under a constraint or bias."""
        bias = asked.get("logit_bias") or {}
        answer = [*load_encoding().encode_marked(self.answer), STOP_IDS[0]]
        if held is not None and self.constrains:
            answer = [*load_encoding().encode_text(held.example()), STOP_IDS[0]]
        elif bias and self.takes_bias and max(bias.values()) > 0:
            answer = [int(max(bias, key=bias.__getitem__))] * asked["max_tokens"]
        tokens: list[int] = []
        for token in answer[: asked["max_tokens"]]:
            tokens.append(token)
            if token in self.stops_at:
                return tokens, "stop"
        return tokens, "length"


class FakeVllm(WireServer):
    """vLLM server.

    If `api_key` is set, requests need that key. `models` is its model list; `pages` report its load. With a
    `prefix_cache`, the usage has the cached tokens of each prompt instead of those in the script.
    """

    def __init__(
        self,
        tokens: Sequence[object] = (),
        *,
        script: Callable[[dict[str, Any]], VllmScript | Refusal] | None = None,
        model: str = "tiny",
        context: object = 131072,
        api_key: str | None = None,
        reads_body: bool = True,
        **fields: Any,
    ) -> None:
        super().__init__(self._answer, reads_body=reads_body)
        constant = VllmScript(tokens=tokens, **fields)
        self.script = script or (lambda asked: constant)
        self.patient = Patient()
        self.api_key = api_key
        self.knows_tags = True
        self.prefix_cache: PrefixCache | None = None
        self.pages: Pages = vllm_pages(self)
        self.models: object = {
            "object": "list",
            "data": [{"id": model, "object": "model", "owned_by": "vllm", "root": model, "max_model_len": context}],
        }

    def _answer(self, seen: Seen) -> list[Step]:
        if self.api_key is not None and seen.headers.get("authorization") != f"Bearer {self.api_key}":
            return Refusal(401, b'{"error":"Unauthorized"}').steps()
        if seen.path == "/v1/models":
            return Refusal(200, json.dumps(self.models).encode()).steps()
        if seen.path in self.pages:
            return Refusal(200, self.pages[seen.path]()).steps()
        if not self.reads_body and seen.method == "POST":
            return [Sleep(3600)]
        if seen.path not in ("/v1/completions", *TOKENIZERS):
            return Refusal(404, b'{"detail":"Not Found"}').steps()
        if seen.is_probe:
            return self.patient.vllm(seen)
        try:
            constraints.vllm(seen.json, knows_tags=self.knows_tags)
        except GrammarError as error:
            return vllm_error(str(error)).steps()
        script = self.script(seen.json)
        if isinstance(script, Refusal):
            return script.steps()
        if self.prefix_cache is not None:
            cached = self.prefix_cache.record(seen.json.get("cache_salt"), seen.json["prompt"], script.tokens)
            script = replace(script, cached_tokens=cached)
        return script.steps(seen.json)


class FakeMlxServer(WireServer):
    """mlx_lm.server. `healthy` determines the response of /health."""

    def __init__(
        self,
        text: str = "",
        *,
        script: Callable[[dict[str, Any]], MlxScript | Refusal] | None = None,
        reads_body: bool = True,
        per_chunk: int = 4,
        **fields: Any,
    ) -> None:
        super().__init__(self._answer, reads_body=reads_body)
        constant = MlxScript(text=text, per_chunk=per_chunk, **fields)
        self.script = script or (lambda asked: constant)
        self.patient = Patient()
        self.healthy = True

    def _answer(self, seen: Seen) -> list[Step]:
        if seen.path == "/health":
            state = (200, b'{"status": "ok"}') if self.healthy else (503, b'{"status": "unavailable"}')
            return Refusal(*state, version=0).steps()
        if not self.reads_body:
            return [Sleep(3600)]
        if seen.is_probe and seen.path == "/v1/completions" and isinstance(seen.json.get("prompt"), str):
            return self.patient.mlx_server(seen)
        if seen.path != "/v1/completions" or not isinstance(seen.json.get("prompt"), str):
            # Token ids make its tokenizer raise, and every exception becomes a 404.
            return Refusal(404, b'{"error": "text input must be of type `str`"}', version=0).steps()
        script = self.script(seen.json)
        if isinstance(script, Refusal):
            return [*script.steps(), Close()]
        return script.steps(seen.json)
