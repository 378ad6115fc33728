"""Server of models that generate no text, with the routes of vLLM and OpenAI."""

from __future__ import annotations

import json
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .dialects import Refusal, chunked
from .faults import Fault
from .wire import Seen, Sleep, Step, WireServer, Write

REPORTED: Mapping[str, Any] = {"reported": True}


def vector_of(value: Any, *, base64: bool = False) -> Any:
    """Return the embedding of an input, which differs from those of other inputs."""
    text = json.dumps(value)
    vector = [float(len(text)), float(sum(text.encode())), 0.5]
    return packed(vector) if base64 else vector


def packed(vector: Sequence[float]) -> str:
    """Return a vector as base64, as OpenAI's API does."""
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def word_vector(value: Any, dimensions: int = 64) -> list[float]:
    """Return an embedding that is similar for texts with the same words."""
    vector = [0.0] * dimensions
    for word in words_of(value):
        vector[zlib.crc32(word.encode()) % dimensions] += 1.0
    return vector


def shared_words(query: str, text: str) -> float:
    """Return the share of the words of a query that a text contains."""
    return len(words_of(query) & words_of(text)) / max(1, len(words_of(query)))


def length_score(_: str, text: str) -> float:
    return len(text) / 100


# Types of the fields that servers validate.
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("encoding_format", "prompt", "query", "response_format", "size", "stream_format", "user"), (str,)),
    **dict.fromkeys(("dimensions", "n", "partial_images", "top_n"), (int,)),
    **dict.fromkeys(("return_documents", "stream"), (bool,)),
    "documents": (list,),
    "speed": (int, float),
    "voice": (str, dict),
}
SPEECH_TYPES = {**TYPES, "input": (str,)}
MAX_IMAGES = 10


class FakeModes(WireServer):
    """Server that answers by path. `script` replaces answers: a refusal, or a function that may return one.

    `usage` is that of every answer; by default one token for each input, None for none.
    """

    def __init__(
        self,
        script: Refusal | Callable[[Any], Refusal | None] | None = None,
        *,
        vector: Callable[[Any], Any] | None = None,
        relevance: Callable[[str, str], float] = length_score,
        usage: Mapping[str, Any] | None = REPORTED,
        extra: Mapping[str, Any] | None = None,
        context: int | None = None,
        delay_s: float = 0.0,
        audio: Sequence[bytes] = (b"RIFF", b"\x00\xff" * 20_000, b"end"),
        media_type: str = "audio/mpeg",
        faults: Sequence[Fault] = (),
    ) -> None:
        super().__init__(self._respond)
        self.script = script
        self.vector, self.relevance = vector, relevance
        self.usage = usage
        self.extra = dict(extra or {})
        self.context = context
        self.delay_s = delay_s
        self.audio, self.media_type, self.faults = audio, media_type, faults

    def _respond(self, seen: Seen) -> list[Step]:
        if seen.method == "GET":
            window = {} if self.context is None else {"max_model_len": self.context}
            listed = [{"id": name, "object": "model", **window} for name in ("bge", "bge:large", "qwen")]
            return _json({"object": "list", "data": listed}).steps()
        if seen.path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            return self._transcript(seen)
        asked = seen.json
        refusal = self.script(asked) if callable(self.script) else self.script
        refusal = refusal or wrong_field(asked, SPEECH_TYPES if seen.path == "/v1/audio/speech" else TYPES)
        waits: list[Step] = [Sleep(self.delay_s)] if self.delay_s else []
        if refusal is None and seen.path == "/v1/audio/speech":
            return [*waits, *self._speech()]
        try:
            if refusal is None and seen.path == "/v1/images/generations" and asked.get("stream") is True:
                return [*waits, *self._image_events(asked)]
            return [*waits, *(refusal or _json({**self._answer(seen.path, asked), **self.extra})).steps()]
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            # Bodies are passed through, so a field may have any type.
            return [*waits, *Refusal(422, json.dumps({"detail": str(error)}).encode()).steps()]

    def _transcript(self, seen: Seen) -> list[Step]:
        refusal = self.script(seen) if callable(self.script) else self.script
        waits: list[Step] = [Sleep(self.delay_s)] if self.delay_s else []
        return [*waits, *(refusal or _json({"text": "Said.", **self._usage(3)})).steps()]

    def _speech(self) -> list[Step]:
        pieces: list[Step] = [Write(piece, framed=True) for piece in self.audio]
        for fault in self.faults:
            pieces = fault(pieces)
        return chunked(self.media_type.encode(), pieces)

    def _answer(self, path: str, asked: Any) -> dict[str, Any]:
        """Return the answer of a path. A path without an answer is a failure of the test."""
        answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "/v1/embeddings": self._embeddings,
            "/v1/rerank": self._rerank,
            "/v1/score": self._score,
            "/v1/moderations": self._moderations,
            "/v1/images/generations": self._images,
        }
        assert path in answers, path
        return answers[path](asked)

    def _rerank(self, asked: Any) -> dict[str, Any]:
        texts = [one if isinstance(one, str) else one["text"] for one in asked["documents"]]
        scores = sorted(((self.relevance(asked["query"], text), at) for at, text in enumerate(texts)), reverse=True)
        results = [
            {"index": at, "relevance_score": score, "document": {"text": texts[at]}}
            for score, at in scores[: asked.get("top_n")]
        ]
        return {"id": "rerank-1", "model": asked["model"], "results": results, **self._usage(len(texts))}

    def _score(self, asked: Any) -> dict[str, Any]:
        data = [{"index": 0, "object": "score", "score": 0.25}]
        return {"id": "score-1", "object": "list", "model": asked["model"], "data": data, **self._usage(2)}

    def _moderations(self, asked: Any) -> dict[str, Any]:
        scores = {"violence": 0.9}
        result = {"flagged": True, "categories": {"violence": True}, "category_scores": scores}
        return {"id": "modr-1", "model": asked["model"], "results": [result] * len(inputs_of(asked["input"]))}

    def _images(self, asked: Any) -> dict[str, Any]:
        details = {"image_tokens": 0, "text_tokens": 3}
        usage = {"input_tokens": 3, "output_tokens": 40, "total_tokens": 43, "input_tokens_details": details}
        return {"created": 1, "data": [{"b64_json": "QUJD"}] * (asked.get("n") or 1), "usage": usage}

    def _image_events(self, asked: Any) -> list[Step]:
        usage = self._images(asked)["usage"]
        image = {"b64_json": "QUJD" * 5_000, "background": "opaque", "created_at": 1, "output_format": "png"}
        image |= {"quality": "low", "size": "1024x1024"}
        events = [
            {"type": "image_generation.partial_image", "partial_image_index": number, **image}
            for number in range(asked.get("partial_images", 0))
        ]
        events.append({"type": "image_generation.completed", **image, "usage": usage})
        pieces: list[Step] = [
            Write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode(), framed=True) for event in events
        ]
        for fault in self.faults:
            pieces = fault(pieces)
        return chunked(b"text/event-stream", pieces)

    def _embeddings(self, asked: Any) -> dict[str, Any]:
        inputs = inputs_of(asked["input"])
        is_base64 = asked.get("encoding_format") == "base64"
        vectors = [(self.vector or vector_of)(one) for one in inputs]
        vectors = [packed(vector) for vector in vectors] if is_base64 else vectors
        data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        return {"object": "list", "data": data, "model": asked["model"], **self._usage(len(inputs))}

    def _usage(self, tokens: int) -> dict[str, Any]:
        if self.usage is REPORTED:
            return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        return {} if self.usage is None else {"usage": dict(self.usage)}


def wrong_field(asked: Any, types_of: Mapping[str, tuple[type, ...]]) -> Refusal | None:
    """Refuse a field with a type or size that real servers refuse."""
    if not isinstance(asked, dict):
        return None
    for name, types in types_of.items():
        value = asked.get(name)
        is_wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if value is not None and (is_wrong or (name == "n" and not 0 < value <= MAX_IMAGES)):
            return Refusal(422, json.dumps({"detail": f"{name} is invalid"}).encode())
    return None


def inputs_of(value: Any) -> Sequence[Any]:
    """Return the inputs of a request; a list of token ids is one input."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


def _json(body: Any) -> Refusal:
    return Refusal(200, json.dumps(body).encode())
