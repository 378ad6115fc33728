"""Protocols between packages: the engine sees backends and the pool only as these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unisono.core.conversation import Json
from unisono.core.generation import Capabilities, Chunk, CompletionJob, Load, Timeouts
from unisono.core.passthrough_request import PassthroughJob
from unisono.core.probe import Probe
from unisono.core.renamed import renamed


class Endpoint(Protocol):
    """What routing knows of a backend of either kind: whether it is well, how busy it is, and its end.

    Every method raises only the `BackendError` family (or `ContextTooLong`) for what goes wrong out there.
    """

    async def probe(self) -> Probe:
        """Examine the server: what it can do, and what is wrong with it. Bounded in time, safe while it is busy, and
        cancelled cleanly. Called again when it comes back after a failure. Raises what keeps it from being examined;
        what was examined and found wrong is a finding, and a fatal one (`Probe.fatal`) keeps the backend from being
        used."""
        ...

    async def load(self) -> Load | None:
        """What the server says of its own load, requests of others included; None when it does not say. Bounded to a
        second, cheap enough to be asked every few of them, and never a reason to start or to load anything. A failure
        says only that the question found no answer: a server that is busy enough may have no time for it."""
        ...

    async def aclose(self) -> None: ...


class Backend(Endpoint, Protocol):
    """One server (or engine process) that continues raw Harmony prompts. It knows nothing of Harmony or OpenAI."""

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Stream a generation. Closing the iterator (or cancelling the task) at any moment, before the first chunk
        too, frees the backend. A stream that ends without a finish raises `BackendProtocolError`."""
        ...


class PassthroughBackend(Endpoint, Protocol):
    """One server, or one provider, that answers requests in OpenAI's own API. What it serves need not be gpt-oss."""

    def answer(self, job: PassthroughJob) -> AsyncIterator[Sequence[Mapping[str, Json]]]:
        """The JSON objects of the answer: of a stream its events in order, those that came together at once, and else
        the one body. Closing the iterator (or cancelling the task) at any moment ends the request there. A stream that
        breaks off raises `BackendProtocolError`."""
        ...


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What an adapter is built from: `kind` is its entry-point name, `model` the backend's own name for the model.

    `api_base` comes with or without a trailing `/v1`; adapters accept both. `extra` holds adapter-specific settings.
    """

    kind: str
    model: str
    api_base: str | None = None
    api_key: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


class PassthroughFactory(Protocol):
    """What the entry-point group `unisono.passing` holds, by backend kind. Building one touches neither network nor
    disk."""

    def __call__(self, options: BackendOptions) -> PassthroughBackend: ...


class BackendFactory(Protocol):
    """What the entry-point group `unisono.backends` holds, usually the adapter class itself. Building one touches
    neither network nor disk."""

    def __call__(self, options: BackendOptions) -> Backend: ...


class Deployment(Protocol):
    """One backend that serves a model name, with how it is to be used."""

    @property
    def name(self) -> str:
        """Shown to clients and operators; holds no address and no path."""
        ...

    @property
    def backend(self) -> Backend:
        """For places on deployments that speak Harmony."""
        ...

    @property
    def passing(self) -> PassthroughBackend:
        """For places on those that answer in OpenAI's own API."""
        ...

    @property
    def timeouts(self) -> Timeouts: ...

    async def capabilities(self) -> Capabilities:
        """By the last good probe, probing first when there is none. Raises the `BackendError` family."""
        ...


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {"PassingBackend": PassthroughBackend, "PassingFactory": PassthroughFactory})
