"""mlx_lm.server: text in, text out, over `/v1/completions`.

Special tokens are spelled out in its text, all but the one that stopped it, which it hides. It answers HTTP/1.0 and
ends a body by closing the connection, so an end without `[DONE]` is a crash; and it answers 404 for whatever goes
wrong while it generates. From the first text it generates it drops a space; where that matters, inside a message, the
answer is asked for in another way (`_seam`). Measured on mlx-lm 0.32.2.
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

LOADED = "default_model"
"""The model the server was started with. By any other name it would look for one on the hub."""

REMEDIES = {
    Check.GENERATION: "Restart mlx_lm.server, with the gpt-oss folder as its --model.",
    Check.MARKERS: "Use mlx_lm.server 0.32 or newer and its own /v1/completions: it leaves markers in the text.",
    Check.CONTEXT: "Set model_info.max_input_tokens to what the machine's memory allows: the server tells no size.",
}


class MlxServerBackend:
    """The model's name in the options is for people: the server is always asked for the model it has loaded."""

    def __init__(self, options: BackendOptions) -> None:
        """Raises ConfigError."""
        # A client that it loses before it has sent its head is noticed nowhere: it generates to the limit for nobody.
        self._wire = BackendHttp(options, {404: (BackendError, "the backend failed while it generated")}, polite=True)
        self._written = PoisonPrompt()

    async def probe(self) -> Probe:
        """Asks for its health, which knows whether the generating thread lives, then examines it. The server does not
        tell the length of its context."""
        health = await self._wire.get_json("health")
        status = health.get("status") if isinstance(health, dict) else None
        if status is None:
            raise BackendProtocolError("the backend's report of its health is not one")
        if status != "ok":
            raise BackendUnavailable("the backend says it is not well")
        claims = Capabilities(prompt=OutputForm.TEXT, output=OutputForm.TEXT, stop_visible=False, logit_bias=True)
        return await examine(Subject(self._streamed, claims, remedies=REMEDIES))

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Raises ConstraintRefused for a constraint: it would be ignored without a word."""
        if job.constraint is not None:
            raise refused_kind(job.constraint)
        assert job.prompt.text is not None, "a text backend was given a prompt without text"
        if _leading_space.is_inside(job.prompt) or job.prompt.text in self._written:
            chunks = _leading_space.go_on(self._wire, job, _body, self._written)
        else:
            self._written.asked(job.prompt)
            chunks = self._streamed(job)
        return self._written.noting(job.prompt.text, chunks)

    def _streamed(self, job: CompletionJob) -> AsyncGenerator[Chunk]:
        return _completions.complete(self._wire, _body(job), job, OutputForm.TEXT)

    async def load(self) -> Load | None:
        """Nothing: the server has no page for it."""
        return None

    async def aclose(self) -> None:
        await self._wire.aclose()


def _body(job: CompletionJob, in_one_piece: bool = False) -> bytes:
    """Only an answer in one piece tells the ids of its tokens."""
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
        # Its word for off: 1.0 would run a penalty that changes nothing over every token.
        body["repetition_penalty"] = 0.0
    return orjson.dumps(body)
