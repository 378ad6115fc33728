"""Ollama: `/api/generate`, according to its source code.

Below 0.30, raw text keeps its markers. From 0.30 on, the markers are stripped unless the built-in parser is on. The
parsed text then comes first, and all ids come in the last line.
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
from .dialects import Patient, Refusal, Script, chunked
from .wire import Seen, Sleep, Step, WireServer

MARKERS = re.compile(r"<\|[a-z]+\|>")
OWN_TEMPLATE = "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>{}<|end|><|start|>assistant"


@dataclass(frozen=True)
class OllamaScript(Script):
    """Text in pieces of `per_chunk` characters, or in `pieces`.

    Each piece counts as one token for `num_predict`. With `bare`, raw text has no markers. `context` None means the
    ids of prompt and output.
    """

    text: str = ""
    pieces: Sequence[object] | None = None
    bare: bool = False
    context: object = None
    tells_context: bool = True
    # Whether the parser emits text before the last line.
    thinks: bool = True

    def lines(self, asked: dict[str, Any]) -> list[bytes]:
        whole: list[object] = (
            list(self.pieces)
            if self.pieces is not None
            else [self.text[i : i + self.per_chunk] for i in range(0, len(self.text), self.per_chunk)]
        )
        pieces = whole[: asked["options"]["num_predict"]]
        finish = self.finish or ("length" if len(pieces) < len(whole) else "stop")
        prompt = _prompt_seen(asked)
        ids = load_encoding().encode_as_server(prompt)
        last: dict[str, object] = {
            "response": "",
            "done": True,
            "done_reason": finish,
            "total_duration": 1,
            "prompt_eval_count": len(ids) if self.prompt_tokens is None else self.prompt_tokens,
            "eval_count": len(pieces),
        }
        if self.cached_tokens:
            last["prompt_eval_cached_count"] = self.cached_tokens
        if asked.get("raw"):
            shown = [MARKERS.sub("", str(piece)) if self.bare else piece for piece in pieces]
            return [*(_line(asked, response=piece, done=False) for piece in shown), _line(asked, **last)]
        text = prompt + "".join(map(str, pieces))
        if self.tells_context:
            last["context"] = load_encoding().encode_as_server(text) if self.context is None else self.context
        thoughts = [MARKERS.sub("", str(piece)) for piece in pieces] if self.thinks else []
        live = [_line(asked, response="", thinking=piece, done=False) for piece in thoughts]
        return [*live, _line(asked, **last)]

    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return chunked(b"application/x-ndjson", self.paced(self.lines(asked)))


def _line(asked: dict[str, Any], **fields: object) -> bytes:
    line = {"model": asked["model"], "created_at": "2026-11-20T18:00:00.000000001Z", **fields}
    return json.dumps(line).encode() + b"\n"


def _prompt_seen(asked: dict[str, Any]) -> str:
    if asked.get("raw"):
        return str(asked["prompt"])
    template = asked.get("template")
    return template.replace("{{ .Prompt }}", asked["prompt"]) if template else OWN_TEMPLATE.format(asked["prompt"])


@dataclass
class OllamaPatient(Patient):
    """The model behind Ollama, for probes.

    With `bare`, raw text has no markers. With `parsed`, the built-in parser knows the model, so that markers are kept
    where it is on.
    """

    bare: bool = False
    parsed: bool = True
    tells_context: bool = True
    # Number of prompt tokens that it keeps; the rest is dropped silently.
    cuts_at: int | None = None

    def ollama(self, seen: Seen) -> list[Step]:
        asked = seen.json
        tokens, finish = self._generated({"max_tokens": asked["options"]["num_predict"]}, constraints.ollama(asked))
        spelled = [load_encoding().decode([token]) for token in (tokens[:-1] if finish == "stop" else tokens)]
        if not self.parsed:
            spelled = [MARKERS.sub("", text) for text in spelled]
        read = len(self.encode(_prompt_seen(asked)))
        script = OllamaScript(
            pieces=spelled,
            finish=finish,
            bare=self.bare,
            prompt_tokens=min(read, self.cuts_at or read),
            tells_context=self.tells_context,
        )
        return self._script_steps(script, asked)


class FakeOllama(WireServer):
    """Ollama of a version that keeps markers in raw text, or strips them (`bare`)."""

    def __init__(
        self,
        text: str = "",
        *,
        script: Callable[[dict[str, Any]], OllamaScript | Refusal] | None = None,
        reads_body: bool = True,
        version: str = "0.24.1",
        **fields: Any,
    ) -> None:
        super().__init__(self._answer, reads_body=reads_body)
        constant = OllamaScript(text=text, **{"per_chunk": 4, **fields})
        self.script = script or (lambda asked: constant)
        self.patient = OllamaPatient(bare=constant.bare)
        self.version: object = {"version": version}
        self.shown: Any = {
            "modified_at": "2026-11-01T00:00:00Z",
            "parameters": "temperature                    1",
            "model_info": {"general.architecture": "gptoss", "gptoss.context_length": 131072},
        }

    def _answer(self, seen: Seen) -> list[Step]:
        if seen.path == "/api/version":
            return Refusal(200, json.dumps(self.version).encode()).steps()
        if seen.path == "/api/show":
            return Refusal(200, json.dumps(self.shown).encode()).steps()
        if not self.reads_body:
            return [Sleep(3600)]
        asked = seen.json
        if seen.path != "/api/generate":
            return Refusal(404, b"404 page not found", "text/plain").steps()
        if asked.get("raw") and asked.get("template"):
            return Refusal(400, b'{"error":"raw mode does not support template, system, or context"}').steps()
        if seen.is_probe:
            return self.patient.ollama(seen)
        try:
            constraints.ollama(asked)
        except GrammarError as error:
            # It fails with status 500 where other servers refuse with 400.
            return Refusal(500, json.dumps({"error": f"failed to load grammar: {error}"}).encode()).steps()
        script = self.script(asked)
        return script.steps() if isinstance(script, Refusal) else script.steps(asked)
