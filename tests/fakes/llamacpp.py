"""llama.cpp server: `/completion` as recorded from the build in llama-cpp-python 0.3.36.

It sends one id per event. A character of several tokens is one event with the last id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.harmony.encoding import load_encoding

from . import constraints
from .constraints import GrammarError
from .dialects import STOP_IDS, Patient, Refusal, Script, chunked, logprob_of, sse_event
from .loads import Pages, llamacpp_pages
from .wire import TOKENIZERS, Seen, Sleep, Step, WireServer

# Pages that exist only with certain command line flags.
SWITCHED = ("/metrics", "/slots")
STOP_TYPES = {"stop": "eos", "length": "limit"}


@dataclass(frozen=True)
class LlamaCppScript(Script):
    """Script that sends `per_chunk` events in one write."""

    tokens: Sequence[object] = ()

    def events(self, asked: dict[str, Any]) -> list[bytes]:
        limit = asked["n_predict"]
        tokens = list(self.tokens)[:limit]
        stopped = bool(tokens) and tokens[-1] in STOP_IDS
        finish = self.finish or ("stop" if stopped or len(self.tokens) < limit else "length")
        prompt = len(asked["prompt"]) if self.prompt_tokens is None else self.prompt_tokens
        events = []
        unshown = b""
        for number, token in enumerate(tokens):
            content, unshown = _shown(token, unshown)
            if content is not None:
                events.append(sse_event(self._event(asked, token, content, number + 1, prompt)))
        last = {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": "tiny",
            "tokens_predicted": len(tokens),
            "tokens_evaluated": prompt,
            "generation_settings": {"n_predict": limit},
            "prompt": "?" * 100,
            "has_new_line": False,
            "truncated": False,
            "stop_type": STOP_TYPES.get(finish, finish),
            "stopping_word": "",
            "tokens_cached": len(asked["prompt"]) + len(tokens),
            "timings": {"cache_n": self.cached_tokens, "prompt_n": 1, "predicted_n": len(tokens)},
        }
        fields = asked.get("response_fields") or last
        grouped = [b"".join(events[i : i + self.per_chunk]) for i in range(0, len(events), self.per_chunk)]
        return [*grouped, sse_event({name: value for name, value in last.items() if name in fields})]

    @staticmethod
    def _event(asked: dict[str, Any], token: object, content: str, predicted: int, prompt: object) -> dict[str, object]:
        return {
            "index": 0,
            "content": content,
            **({"tokens": [token]} if asked.get("return_tokens") else {}),
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": predicted,
            "tokens_evaluated": prompt,
            **({"completion_probabilities": [_probabilities(token, top)]} if (top := asked.get("n_probs")) else {}),
        }

    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return chunked(b"text/event-stream", self.paced(self.events(asked)))


def _probabilities(token: object, top: int) -> dict[str, object]:
    """Return the probabilities of a token in llama.cpp's form."""
    assert isinstance(token, int)
    return {
        "id": token,
        "token": "?",
        "bytes": [],
        "logprob": logprob_of(token),
        "top_logprobs": [
            {"id": token + more, "token": "?", "logprob": logprob_of(token) - more} for more in range(top)
        ],
    }


def _forced_tokens(asked: dict[str, Any]) -> list[int]:
    """Return the only tokens that a request with log probabilities allows; empty for any other request."""
    if asked["stream"] or not asked.get("n_probs"):
        return []
    if bias := asked.get("logit_bias"):
        return [token for token, value in bias if value >= 1e6]
    return [int(token) for token in re.findall(r"<\[(\d+)\]>", asked.get("grammar", ""))]


def _shown(token: object, unshown: bytes) -> tuple[str | None, bytes]:
    """Return the event content of a token (None if withheld) and the bytes withheld after it."""
    if type(token) is not int or not 0 <= token < 201088:
        return "?", b""
    if token in STOP_IDS:
        return unshown.decode("utf-8", errors="replace"), b""
    spelled = unshown + load_encoding().decode_bytes([token])
    return (None, spelled) if _ends_within_a_character(spelled) else (spelled.decode("utf-8", errors="replace"), b"")


def _ends_within_a_character(spelled: bytes) -> bool:
    for back in range(1, min(4, len(spelled)) + 1):
        byte = spelled[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def llamacpp_error(code: int, kind: str, message: str, **more: object) -> Refusal:
    return Refusal(code, json.dumps({"error": {"code": code, "message": message, "type": kind, **more}}).encode())


LOADING = llamacpp_error(503, "unavailable_error", "Loading model")
TOO_LONG = llamacpp_error(
    400,
    "exceed_context_size_error",
    "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
    n_prompt_tokens=9000,
    n_ctx=8192,
)


class LlamaCppPatient(Patient):
    """The model behind llama-server, for probes."""

    def llamacpp(self, seen: Seen) -> list[Step]:
        asked = seen.json
        if seen.path == "/tokenize":
            return Refusal(200, json.dumps({"tokens": list(self.encode(asked["content"]))}).encode()).steps()
        if seen.path == "/detokenize":
            return Refusal(200, json.dumps({"content": load_encoding().decode(asked["tokens"])}).encode()).steps()
        bias = {str(token): value for token, value in asked.get("logit_bias") or ()}
        held = constraints.llamacpp(asked)
        tokens, finish = self._generated({"max_tokens": asked["n_predict"], "logit_bias": bias}, held)
        script = LlamaCppScript(tokens=tokens, finish=finish, prompt_tokens=self._read(asked["prompt"]))
        return self._script_steps(script, asked if self.returns_ids else {**asked, "return_tokens": False})


class FakeLlamaCpp(WireServer):
    """llama-server. `context` is the context of one slot; `pages` report its load."""

    def __init__(
        self,
        tokens: Sequence[object] = (),
        *,
        script: Callable[[dict[str, Any]], LlamaCppScript | Refusal] | None = None,
        context: object = 8192,
        reads_body: bool = True,
        **fields: Any,
    ) -> None:
        super().__init__(self._answer, reads_body=reads_body)
        constant = LlamaCppScript(tokens=tokens, **fields)
        self.script = script or (lambda asked: constant)
        self.patient = LlamaCppPatient()
        self.loading = False
        # Whether grammars of token ids are known.
        self.forces_by_grammar = True
        self.pages: Pages = llamacpp_pages(self)
        self.properties: object = {
            "default_generation_settings": {"id": 0, "n_ctx": context, "is_processing": False, "params": {}},
            "total_slots": 2,
            "model_alias": "tiny",
            "build_info": "b1-abc",
        }

    def _answer(self, seen: Seen) -> list[Step]:
        if self.loading:
            return LOADING.steps()
        if seen.path == "/props":
            return Refusal(200, json.dumps(self.properties).encode()).steps()
        if seen.path in self.pages:
            return Refusal(200, self.pages[seen.path]()).steps()
        if seen.path in SWITCHED:
            words = f"This server does not support {seen.path[1:]} endpoint. Start it with `--{seen.path[1:]}`"
            return llamacpp_error(501, "not_supported_error", words).steps()
        if not self.reads_body:
            return [Sleep(3600)]
        if seen.path not in ("/completion", *TOKENIZERS):
            return llamacpp_error(404, "not_found_error", "File Not Found").steps()
        if seen.path == "/completion" and (forced := _forced_tokens(seen.json)):
            if not self.forces_by_grammar and "grammar" in seen.json:
                return llamacpp_error(400, "invalid_request_error", "failed to parse grammar").steps()
            entries = [_probabilities(token, seen.json["n_probs"]) for token in forced]
            return Refusal(200, json.dumps({"completion_probabilities": entries}).encode()).steps()
        if seen.is_probe:
            return self.patient.llamacpp(seen)
        try:
            constraints.llamacpp(seen.json)
        except GrammarError as error:
            return llamacpp_error(400, "invalid_request_error", str(error)).steps()
        script = self.script(seen.json)
        return script.steps() if isinstance(script, Refusal) else script.steps(seen.json)
