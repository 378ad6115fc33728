"""Protocols between packages: the engine depends on backends and the pool only through them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import field
from typing import Protocol, TypeAlias

from unisono.core.conversation import Json, TextGrammar
from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities, Chunk, CompletionJob, Load, Timeouts
from unisono.core.passthrough_request import AnswerPart, PassthroughJob
from unisono.core.probe import Probe
from unisono.core.renamed import renamed

Schema: TypeAlias = Mapping[str, Json]

# Function that explains why a text does not match a JSON schema or a grammar; None if it matches. It raises no
# exception for any text or any accepted schema.
Violation: TypeAlias = Callable[[Schema | TextGrammar, str], str | None]


class Endpoint(Protocol):
    """Common interface of all backends, as routing uses it: probe, load, close.

    Methods raise only the `BackendError` family (or `ContextTooLong`) for failures of the server or the network.
    """

    async def probe(self) -> Probe:
        """Examine the server: its capabilities and its faults.

        Bounded in time, safe while the server is busy, and cancelled cleanly. Called again when the server returns
        after a failure. Raises an error if the examination is impossible. A fault that the examination discovers is a
        finding; a fatal one (`Probe.fatal`) excludes the backend from use.
        """
        ...

    async def load(self) -> Load | None:
        """Return the load that the server reports, other clients' requests included.

        None if unknown. Takes at most a second and is cheap enough to be called every few seconds. It never starts or
        loads anything. A failure only means that the load is unknown: a busy server may not have the time to answer.
        """
        ...

    async def aclose(self) -> None: ...


class Backend(Endpoint, Protocol):
    """Server (or engine process) that continues raw Harmony prompts.

    It knows nothing of the Harmony format or of the OpenAI API.
    """

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Stream a generation.

        Closing the iterator (or cancelling the task) at any moment, even before the first chunk, frees the backend. A
        stream that ends without a finish reason raises `BackendProtocolError`.
        """
        ...


class PassthroughBackend(Endpoint, Protocol):
    """Server or provider that answers requests in the OpenAI API.

    Its models need not be gpt-oss.
    """

    def answer(self, job: PassthroughJob) -> AsyncIterator[Sequence[AnswerPart]]:
        """Yield the JSON objects of the answer, or its bytes for an API of `BYTE_APIS`.

        A streamed answer yields its events in order, in batches that arrived together. Any other answer yields its one
        body. Closing the iterator (or cancelling the task) at any moment ends the request at the backend. A stream
        that breaks off raises `BackendProtocolError`.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Arguments for building an adapter.

    `kind` is the adapter's entry-point name, `model` the backend's own name for the model. `api_base` may end in `/v1`
    or not; adapters accept both. `extra` holds adapter-specific settings. A pass-through backend sends the `defaults`
    for fields of Chat Completions that a request does not give.
    """

    kind: str
    model: str
    api_base: str | None = None
    api_key: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, Json] = field(default_factory=dict)


class PassthroughFactory(Protocol):
    """Factory of pass-through backends, an entry point in the group `unisono.passing`.

    The name of the entry point is the backend kind. The call must access neither network nor disk.
    """

    def __call__(self, options: BackendOptions) -> PassthroughBackend: ...


class BackendFactory(Protocol):
    """Factory of backends, an entry point in the group `unisono.backends`.

    The name of the entry point is the backend kind. The factory is usually the adapter class. The call must access
    neither network nor disk.
    """

    def __call__(self, options: BackendOptions) -> Backend: ...


class Deployment(Protocol):
    """One backend that serves a model name, with its settings."""

    @property
    def name(self) -> str:
        """Name for clients and operators; contains no address and no path."""
        ...

    @property
    def backend(self) -> Backend:
        """The backend of a Harmony deployment."""
        ...

    @property
    def passing(self) -> PassthroughBackend:
        """The backend of a pass-through deployment."""
        ...

    @property
    def timeouts(self) -> Timeouts: ...

    async def capabilities(self) -> Capabilities:
        """Return the capabilities from the last successful probe; probe first if there is none.

        Raises the `BackendError` family.
        """
        ...


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {"PassingBackend": PassthroughBackend, "PassingFactory": PassthroughFactory})
