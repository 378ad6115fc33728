"""SGLang: `/v1/completions`, according to the source code of version 0.5.23. Strict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.harmony.encoding import load_encoding

from . import constraints
from .constraints import GrammarError
from .dialects import STOP_IDS, Patient, Refusal, Script, chunked, echoed, logprobs_of, sse_event
from .loads import Pages, sglang_pages
from .wire import ABOUT_ITSELF, Seen, Sleep, Step, WireServer


@dataclass(frozen=True)
class SglangScript(Script):
    """Script of SGLang. With `trims`, the stop token is always removed from the ids."""

    tokens: Sequence[object] = ()
    trims: bool = False

    def events(self, asked: dict[str, Any]) -> list[bytes]:
        limit = asked.get("max_tokens") or 16
        tokens = list(self.tokens)[:limit]
        stop = tokens[-1] if tokens and tokens[-1] in STOP_IDS else None
        finish = self.finish or ("length" if len(tokens) < len(self.tokens) or (tokens and stop is None) else "stop")
        if stop is not None and (self.trims or not asked.get("no_stop_trim")):
            tokens = tokens[:-1]
        pieces = [tokens[i : i + self.per_chunk] for i in range(0, len(tokens), self.per_chunk)] or [[]]
        events = []
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            choice: dict[str, object] = {
                "index": 0,
                # Wrong on purpose, because only the ids matter.
                "text": "?" * len(piece),
                "logprobs": _by_text(logprobs_of(piece, asked.get("logprobs"), echoed(asked) if number == 0 else ())),
                "finish_reason": finish if last else None,
                "matched_stop": stop if last and finish == "stop" else None,
                "hidden_states": None,
                "token_ids": piece if asked.get("return_token_ids") else None,
                "prompt_token_ids": asked["prompt"] if number == 0 else None,
            }
            events.append(sse_event({**self._frame(asked), "choices": [choice], "usage": None}))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = self.usage(len(asked["prompt"]), len(tokens))
            events.append(sse_event({**self._frame(asked), "choices": [], "usage": usage}))
        return [*events, b"data: [DONE]\n\n"]

    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return chunked(b"text/event-stream; charset=utf-8", self.paced(self.events(asked)))

    @staticmethod
    def _frame(asked: dict[str, Any]) -> dict[str, object]:
        return {"id": "5e8b", "object": "text_completion", "created": 1795198875, "model": asked.get("model")}


def _by_text(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return log probabilities whose tokens are named by their text, as in SGLang."""
    if logprobs is None:
        return None

    def named(token: str) -> str:
        return load_encoding().decode([int(token.removeprefix("token_id:"))])

    return {
        **logprobs,
        "tokens": [named(token) for token in logprobs["tokens"]],
        "top_logprobs": [
            None if top is None else {named(token): value for token, value in top.items()}
            for top in logprobs["top_logprobs"]
        ],
    }


def sglang_error(message: str, code: int = 400) -> Refusal:
    error = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": code}
    return Refusal(code, json.dumps(error).encode())


class SglangPatient(Patient):
    """The model behind SGLang, for probes."""

    def sglang(self, seen: Seen) -> list[Step]:
        asked = seen.json
        if seen.path == "/v1/tokenize":
            ids = list(self.encode(asked["prompt"]))
            return Refusal(
                200, json.dumps({"tokens": ids, "count": len(ids), "max_model_len": 131072}).encode()
            ).steps()
        if seen.path == "/v1/detokenize":
            return Refusal(200, json.dumps({"text": load_encoding().decode(asked["tokens"])}).encode()).steps()
        tokens, finish = self._generated(asked, constraints.sglang(asked))
        script = SglangScript(tokens=tokens, finish=finish, prompt_tokens=self._read(asked["prompt"]))
        return self._script_steps(script, asked if self.returns_ids else {**asked, "return_token_ids": False})


class FakeSglang(WireServer):
    """SGLang server.

    `context` is the context window; a request has to leave one token of it free. `pages` report its load.
    """

    def __init__(
        self,
        tokens: Sequence[object] = (),
        *,
        script: Callable[[dict[str, Any]], SglangScript | Refusal] | None = None,
        model: str = "tiny",
        context: Any = 131072,
        reads_body: bool = True,
        **fields: Any,
    ) -> None:
        super().__init__(self._answer, reads_body=reads_body)
        constant = SglangScript(tokens=tokens, **fields)
        self.script = script or (lambda asked: constant)
        self.patient = SglangPatient()
        self.context = context
        self.pages: Pages = sglang_pages(self)
        self.models: object = {
            "object": "list",
            "data": [{"id": model, "object": "model", "owned_by": "sglang", "root": model, "max_model_len": context}],
        }

    def _answer(self, seen: Seen) -> list[Step]:
        if seen.path == "/v1/models":
            return Refusal(200, json.dumps(self.models).encode()).steps()
        if seen.path in self.pages:
            return Refusal(200, self.pages[seen.path]()).steps()
        if not self.reads_body:
            return [Sleep(3600)]
        if seen.path not in ("/v1/completions", *ABOUT_ITSELF):
            return Refusal(404, b'{"detail":"Not Found"}').steps()
        asked = seen.json
        if seen.path == "/v1/completions" and (refusal := self._refused(asked)):
            return refusal.steps()
        if seen.is_probe:
            return self.patient.sglang(seen)
        script = self.script(asked)
        return script.steps() if isinstance(script, Refusal) else script.steps(asked)

    def _refused(self, asked: dict[str, Any]) -> Refusal | None:
        if asked["top_k"] < 1 and asked["top_k"] != -1:
            return sglang_error(f"top_k must be -1 (disable) or at least 1, got {asked['top_k']}.")
        if type(self.context) is int and len(asked["prompt"]) + asked["max_tokens"] >= self.context:
            return sglang_error(
                f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
            )
        try:
            constraints.sglang(asked)
        except GrammarError as error:
            return sglang_error(f"Failed to compile the grammar: {error}")
        return None
