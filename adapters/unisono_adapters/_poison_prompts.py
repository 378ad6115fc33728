"""Record of prompts that would crash a server, by digest.

mlx_lm.server caches every prompt without its last token, and also a prompt with its answer if the answer
reached its token limit. A prompt that equals a cached sequence leaves nothing to read: the generating
thread ends, and with it the server (0.32.2). Prompts from other gateways are unknown.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import blake2b

from unisono.core.generation import Chunk, FinishReason, Prompt
from unisono.harmony.encoding import load_encoding

# Maximum number of recorded prompts; the server caches ten by default.
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
        """Record a prompt that is about to be sent."""
        assert prompt.text is not None, "a text backend was given a prompt without text"
        last = load_encoding().decode(prompt.tokens[-1:])
        if prompt.text.endswith(last):
            self.add(prompt.text.removesuffix(last))

    async def observe(self, prompt: str, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
        """Yield the chunks of an answer to `prompt`.

        If the answer reaches its token limit, record `prompt` followed by the answer: this text would crash the server
        as a prompt.
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
