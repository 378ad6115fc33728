"""Dependencies of the Responses API, supplied by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Protocol

from unisono.api.automatic_compaction import Window, unknown_window
from unisono.api.compaction_summary import ItemSealing
from unisono.api.image_descriptions import ImageDescriber
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.passthrough_requests import FindWay
from unisono.api.responses.items import NewId
from unisono.api.tool_server_rules import ServerRules
from unisono.core.access import Caller
from unisono.core.conversation import Tokens
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.core.quotas import NO_TOKEN_USAGE, TokenUsage
from unisono.core.request_record import RecordSink, RequestRecord
from unisono.core.state_store import Retention, Store
from unisono.engine.request import GenerationService


@dataclass(frozen=True, slots=True)
class ResponsesModel:
    """Settings of a model for the Responses API.

    `group` is the deployment group that serves the model. Without `stream_tool_arguments`, a tool call is emitted only
    when it is complete. `tool_servers` names the operator's tool servers that the model may use; None allows all of
    them. `window` looks up the context window of the model.
    """

    group: str
    show_reasoning: bool = True
    stream_tool_arguments: bool = False
    tool_servers: frozenset[str] | None = None
    rules: ModelRules = NO_RULES
    window: Window = unknown_window


async def unlimited(tenant: str, key: str) -> Caller:
    """Return a caller without restrictions. Default of `caller_of`."""
    return Caller(tenant, key)


class ChargeJournal(Protocol):
    """Charge the logged tokens of a response that fails during its takeover; return the charge."""

    def __call__(self, caller: Caller, model: str, response_id: str, journal: Tokens) -> TokenUsage: ...


def charge_nothing(caller: Caller, model: str, response_id: str, journal: Tokens) -> TokenUsage:
    """Charge nothing. Default of `charge_journal`, used without quotas."""
    return NO_TOKEN_USAGE


class CallerSource(Protocol):
    """Look up the caller by tenant and key id, with the key's current state.

    Raises StoreUnavailable if the store does not answer.
    """

    async def __call__(self, tenant: str, key: str) -> Caller: ...


@dataclass(frozen=True, slots=True)
class ResponsesDeps:
    """Dependencies of the Responses API.

    - `resolve` finds a model by name. It raises UnknownModel, or ModelNotAllowed if the caller may not use the model.
    - `find_way` selects how a request is answered. If `find_way` is None, the engine answers every request.
    - `passthrough_files` reads the files in pass-through requests; None if no hook or guardrail checks their texts.
    - `today` returns the date as YYYY-MM-DD, and `clock` returns the time in seconds since the epoch.
    - `new_id` returns an unguessable id with the given prefix.
    - `seals` waits for the encryption key, which may be in the store. Raises StoreUnavailable if the store fails.
    - `lease_s` is the time in seconds after which an unrenewed lease expires.
    - `retention_s` is the time in seconds for which a response is stored.
    - `sinks` receive the records of answers in the background and on WebSockets.
    """

    service: GenerationService
    store: Store
    resolve: Callable[[str, Caller], ResponsesModel]
    seals: SealsSource
    today: Callable[[], str]
    new_id: NewId
    clock: Callable[[], float]
    lease_s: float = 10.0
    retention_s: float = Retention().response_s
    servers: ServerRules = field(default_factory=ServerRules)
    caller_of: CallerSource = unlimited
    charge_journal: ChargeJournal = charge_nothing
    find_way: FindWay | None = None
    describer: ImageDescriber | None = None
    files: FileReader | None = None
    passthrough_files: FileReader | None = None
    sinks: Sequence[RecordSink] = ()

    def record(self, record: RequestRecord) -> None:
        """Send the record of an answer to all sinks."""
        for sink in self.sinks:
            sink(record)


class SealsSource(Protocol):
    async def __call__(self) -> ItemSealing: ...
