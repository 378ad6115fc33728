"""SGLang: token ids in, token ids out, over `/v1/completions`.

Of its two endpoints that take ids this is the exact one: the server itself makes deltas of the ids, whether it runs
with incremental streaming output or not, while a stream of `/generate` is cumulative or not by a server-wide option
and says nothing about which. The stop token stays among the ids with `no_stop_trim`; a server that trims it all the
same still names it in `matched_stop`. Read in the source of version 0.5.23, not tried live.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson

from unisono.core.generation import STOP_TOKENS, Capabilities, Chunk, Form, Generation
from unisono.core.ports import BackendOptions
from unisono.core.probe import Probe
from unisono.errors import BackendError, BackendProtocolError
from unisono_adapters import _completions
from unisono_adapters._http import Wire


class SglangBackend:
    """The model's name has to be the server's (`--served-model-name`, else its model path)."""

    def __init__(self, options: BackendOptions) -> None:
        """Raises ConfigError."""
        self._model = options.model
        self._wire = Wire(options)

    async def probe(self) -> Probe:
        """Asks for the model list: that the model is there, and how long its context is."""
        listed = await self._wire.get_json("v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list):
            raise BackendProtocolError("the backend's model list is not one")
        for model in models:
            if isinstance(model, dict) and model.get("id") == self._model:
                length = model.get("max_model_len")
                return Probe(
                    Capabilities(
                        prompt=Form.IDS,
                        output=Form.IDS,
                        stop_visible=True,
                        # It refuses a prompt and max_tokens that fill its window to the last token.
                        context=length - 1 if type(length) is int and length > 1 else None,
                        logit_bias=True,
                    )
                )
        raise BackendError("the backend does not serve the model it is configured with")

    def complete(self, job: Generation) -> AsyncIterator[Chunk]:
        return _completions.complete(self._wire, self._body(job), job, Form.IDS, stop_field="matched_stop")

    async def aclose(self) -> None:
        await self._wire.aclose()

    def _body(self, job: Generation) -> bytes:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": list(job.prompt.tokens),
            "max_tokens": job.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_completions.sampling(job),
            "stop_token_ids": STOP_TOKENS,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if job.sampling.top_k == 0:
            # Its word for off; 0 is an error.
            body["top_k"] = -1
        if job.cache_salt:
            body["cache_salt"] = job.cache_salt
        return orjson.dumps(body)
