"""Protocols between packages, through which the engine uses backends and the pool."""

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

# Function that returns the reason why a text does not match a JSON schema or a grammar, or None if the text matches. It
# raises no exception for any text, provided that the schema was accepted.
Violation: TypeAlias = Callable[[Schema | TextGrammar, str], str | None]


class Endpoint(Protocol):
    """Common interface of all backends, as routing uses it: probe, load, close.

    If the server or the network fails, methods raise `BackendError`, one of its subclasses, or `ContextTooLong`.
    """

    async def probe(self) -> Probe:
        """Test the server, and return its capabilities and its faults.

        A probe has a time limit, does no harm to a busy server, and can be cancelled. It is called again when the
        server is back after a failure. Raises an error if the server could not be tested. A fault that the test
        discovers is a finding; a fatal finding (`Probe.fatal`) excludes the backend from use.
        """
        ...

    async def load(self) -> Load | None:
        """Return the load that the server reports, or None if unknown.

        The load includes the requests of other clients. The call takes at most one second, and is cheap enough to be
        made every few seconds. It never starts a server or loads a model. If it raises an error, the load is unknown,
        but the server may work: a busy server may not have the time to report its load.
        """
        ...

    async def aclose(self) -> None: ...


class Backend(Endpoint, Protocol):
    """Server (or engine process) that continues raw Harmony prompts.

    A backend does not interpret the Harmony format or the OpenAI API.
    """

    def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Stream a generation.

        Closing the iterator or cancelling the task at any moment, even before the first chunk, ends the generation on
        the backend. Raises `BackendProtocolError` if the stream ends without a finish reason.
        """
        ...


class PassthroughBackend(Endpoint, Protocol):
    """Server or provider that answers OpenAI API requests.

    Its models need not be gpt-oss.
    """

    def answer(self, job: PassthroughJob) -> AsyncIterator[Sequence[AnswerPart]]:
        """Yield the JSON objects of the answer, or its bytes for an API of `BYTE_APIS`.

        For a streamed answer, each batch contains the events that arrived together, in order. For any other answer,
        there is one batch with the body. Closing the iterator or cancelling the task at any moment ends the request at
        the backend. Raises `BackendProtocolError` if the stream breaks off.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Arguments for building an adapter.

    `kind` is the adapter's entry-point name. `model` is the backend's own name for the model. `api_base` may end with
    `/v1` or not; adapters accept both. `extra` contains adapter-specific settings. `defaults` are fields of Chat
    Completions that a pass-through backend sends if a request does not set them.
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
        """Return the capabilities from the last successful probe.

        If no probe was successful yet, the backend is probed first.

        Raises `BackendError` or one of its subclasses if the probe fails.
        """
        ...


def __getattr__(name: str) -> object:
    return renamed(__name__, name, {"PassingBackend": PassthroughBackend, "PassingFactory": PassthroughFactory})
