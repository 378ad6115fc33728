"""mlx_lm.server: text in, text out, over `/v1/completions`.

The text spells out all special tokens except the stop token, which the server omits. The server uses HTTP/1.0, which
ends a response by closing the connection. So a stream that ends without `[DONE]` means that the server crashed. The
server returns 404 for any failure during generation. It drops a space at the beginning of its output. That matters
only if the prompt ends inside a message; such an answer is requested in a different way (`leading_space`). Measured
on mlx-lm 0.32.2.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import orjson

from unisono.core.generation import Capabilities, Chunk, CompletionJob, Load, OutputForm
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Probe
from unisono.errors import BackendError, BackendProtocolError, BackendUnavailable
from unisono_adapters import _completions
from unisono_adapters._constraints import refused_kind
from unisono_adapters._http import BackendHttp
from unisono_adapters._probe import Subject, examine
from unisono_adapters.mlx import leading_space
from unisono_adapters.mlx.crashing_prompts import PoisonPrompt

# Model name that means the loaded model. The server would look up any other name on the Hugging Face hub.
LOADED = "default_model"

REMEDIES = {
    Check.GENERATION: "Restart mlx_lm.server with the gpt-oss folder as its --model.",
    Check.MARKERS: "Use mlx_lm.server 0.32 or newer directly: its /v1/completions leaves markers in the text.",
    Check.CONTEXT: (
        "Set model_info.max_input_tokens to a size that fits in memory: the server does not report a context size."
    ),
}


class MlxServerBackend:
    """mlx_lm.server backend, which ignores the configured model name.

    The server has only one loaded model.
    """

    def __init__(self, options: BackendOptions) -> None:
        """Raise ConfigError for invalid options."""
        # `polite`: the server does not notice that a client disconnects before the response head, and would generate
        # until the token limit.
        self._wire = BackendHttp(options, {404: (BackendError, "the backend failed during generation")}, polite=True)
        self._written = PoisonPrompt()

    async def probe(self) -> Probe:
        """Check the health page, then probe the backend.

        The health page shows whether the generation thread runs. The server does not report its context size.
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
        """Generate an answer.

        Raises ConstraintRefused for any constraint, since the server would ignore it.
        """
        if job.constraint is not None:
            raise refused_kind(job.constraint)
        assert job.prompt.text is not None, "a text backend was given a prompt without text"
        if leading_space.is_inside(job.prompt) or job.prompt.text in self._written:
            chunks = leading_space.complete_text(self._wire, job, _body, self._written)
        else:
            self._written.record(job.prompt)
            chunks = self._stream(job)
        return self._written.observe(job.prompt.text, chunks)

    def _stream(self, job: CompletionJob) -> AsyncGenerator[Chunk]:
        return _completions.complete(self._wire, _body(job), job, OutputForm.TEXT)

    async def load(self) -> Load | None:
        """Return None, because the server has no page that reports its load."""
        return None

    async def aclose(self) -> None:
        await self._wire.aclose()


def _body(job: CompletionJob, in_one_piece: bool = False) -> bytes:
    """Return the request body for a streamed answer, or for one JSON document if `in_one_piece`.

    Only a document contains token ids.
    """
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
        # 0.0 turns the penalty off. With 1.0 the server would compute a penalty without effect for every token.
        body["repetition_penalty"] = 0.0
    return orjson.dumps(body)
