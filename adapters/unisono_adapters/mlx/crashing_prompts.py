"""Record of the prompts that would crash mlx_lm.server.

mlx_lm.server caches every prompt without its last token. It also caches a prompt together with its answer if the
answer ended at its token limit. If a new prompt equals a cached sequence exactly, no token is left to compute, the
generation thread fails, and the server stops working (version 0.32.2). This module therefore records the digests of
all such sequences. It does not know of prompts that other gateways sent to the same server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import blake2b

from unisono.core.generation import Chunk, FinishReason, Prompt
from unisono.harmony.encoding import load_encoding

# Maximum number of recorded prompts, after which the oldest is dropped. The server caches ten by default.
MAX_PROMPTS = 256


class PoisonPrompt:
    __slots__ = ("_digests",)

    def __init__(self) -> None:
        self._digests: dict[bytes, None] = {}

    def __contains__(self, text: str) -> bool:
        return bool(self._digests) and _digest_of(text).digest() in self._digests

    def add(self, text: str) -> None:
        self._remember(_digest_of(text).digest())

    def record(self, prompt: Prompt) -> None:
        """Record the sequence that the server will cache for a prompt that is about to be sent."""
        assert prompt.text is not None, "a text backend was given a prompt without text"
        last = load_encoding().decode(prompt.tokens[-1:])
        if prompt.text.endswith(last):
            self.add(prompt.text.removesuffix(last))

    async def observe(self, prompt: str, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
        """Yield the chunks of the answer to `prompt` unchanged.

        If the answer ends at its token limit, record the prompt followed by the answer, because the server has
        cached that sequence.
        """
        digest = _digest_of(prompt)
        async with aclosing(chunks):
            async for chunk in chunks:
                digest.update(_bytes_of(chunk.text))
                if chunk.finish is FinishReason.LENGTH:
                    self._remember(digest.digest())
                yield chunk

    def _remember(self, digest: bytes) -> None:
        self._digests.pop(digest, None)
        self._digests[digest] = None
        if len(self._digests) > MAX_PROMPTS:
            del self._digests[next(iter(self._digests))]


def _digest_of(text: str) -> blake2b:
    return blake2b(_bytes_of(text), digest_size=16)


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
