"""mlx_lm.server: text in, text out, over `/v1/completions`.

Its text spells out special tokens, except for the stop token, which it hides. It uses HTTP/1.0 and ends a body
by closing the connection, so an end without `[DONE]` is a crash. It returns 404 for any failure during
generation. It drops a space at the beginning of its output; inside a message, where that matters, the answer is
requested in another way (`_leading_space`). Measured on mlx-lm 0.32.2.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import orjson

from unisono.core.generation import Capabilities, Chunk, CompletionJob, Load, OutputForm
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Probe
from unisono.errors import BackendError, BackendProtocolError, BackendUnavailable
from unisono_adapters import _completions, _leading_space
from unisono_adapters._constraints import refused_kind
from unisono_adapters._http import BackendHttp
from unisono_adapters._poison_prompts import PoisonPrompt
from unisono_adapters._probe import Subject, examine

# Name of the model that the server has loaded; others would be looked up on the hub.
LOADED = "default_model"

REMEDIES = {
    Check.GENERATION: "Restart mlx_lm.server with the gpt-oss folder as its --model.",
    Check.MARKERS: "Use mlx_lm.server 0.32 or newer directly: its /v1/completions leaves markers in the text.",
    Check.CONTEXT: "Set model_info.max_input_tokens to a size that fits in memory: the server does not report one.",
}


class MlxServerBackend:
    """mlx_lm.server backend. The configured model name is ignored in favor of the loaded model."""

    def __init__(self, options: BackendOptions) -> None:
        """Raise ConfigError for invalid options."""
        # The server does not notice a client that disconnects before its response head, and generates to the
        # limit.
        self._wire = BackendHttp(options, {404: (BackendError, "the backend failed during generation")}, polite=True)
        self._written = PoisonPrompt()

    async def probe(self) -> Probe:
        """Check the health page, which reports the generating thread, then probe the backend.

        The server does not report the length of its context.
        """
        health = await self._wire.get_json("health")
        status = health.get("status") if isinstance(health, dict) else None
        if status is None:
            raise BackendProtocolError("the backend's health report has an unknown format")
        if status != "ok":
            raise BackendUnavailable("the backend reports that it is not healthy")
        claims = Capabilities(prompt=OutputForm.TEXT, output=OutputForm.TEXT, stop_visible=False, logit_bias=True)
        return await examine(Subject(self._stream, claims, remedies=REMEDIES))

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Generate an answer. Raises ConstraintRefused for a constraint, which would be ignored."""
        if job.constraint is not None:
            raise refused_kind(job.constraint)
        assert job.prompt.text is not None, "a text backend was given a prompt without text"
        if _leading_space.is_inside(job.prompt) or job.prompt.text in self._written:
            chunks = _leading_space.complete_text(self._wire, job, _body, self._written)
        else:
            self._written.record(job.prompt)
            chunks = self._stream(job)
        return self._written.observe(job.prompt.text, chunks)

    def _stream(self, job: CompletionJob) -> AsyncGenerator[Chunk]:
        return _completions.complete(self._wire, _body(job), job, OutputForm.TEXT)

    async def load(self) -> Load | None:
        """Return None: the server has no load page."""
        return None

    async def aclose(self) -> None:
        await self._wire.aclose()


def _body(job: CompletionJob, in_one_piece: bool = False) -> bytes:
    """Return the request body. Only a non-streamed answer contains token ids."""
    assert job.prompt.text is not None, "a text backend was given a prompt without text"
    as_a_stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = {
        "model": LOADED,
        "prompt": job.prompt.text,
        "max_tokens": job.max_tokens,
        **({"stream": False, "logprobs": True} if in_one_piece else as_a_stream),
        **_completions.sampling(job),
    }
    if job.sampling.repetition_penalty == 1.0:
        # 0.0 switches it off; 1.0 would run an ineffective penalty over every token.
        body["repetition_penalty"] = 0.0
    return orjson.dumps(body)
