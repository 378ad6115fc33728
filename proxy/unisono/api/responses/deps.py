"""What the surface is given to work with; the composition root fills it in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.passthrough_routes import FindWay
from unisono.api.responses.items import NewId
from unisono.api.responses.server_tools.servers import ServerRules
from unisono.core.access import Caller
from unisono.core.conversation import Item, Tokens
from unisono.core.state_store import Retention, Store
from unisono.engine.turn import GenerationService


@dataclass(frozen=True, slots=True)
class ResponsesModel:
    """What this surface knows of a model: the group that serves it, how its answers are shown, and which of the
    operator's tool servers it may use, None for all."""

    group: str
    show_reasoning: bool = True
    stream_tool_arguments: bool = False
    tool_servers: frozenset[str] | None = None
    rules: ModelRules = NO_RULES


class ItemSealing(Protocol):
    """Items in a form that only this gateway can read."""

    def seal(self, tenant: str, items: Sequence[Item]) -> str: ...

    def open(self, tenant: str, text: str) -> tuple[Item, ...] | None:
        """None for what is not ours, damaged, or another tenant's."""
        ...


async def unlimited(tenant: str, key: str) -> Caller:
    """Whoever it was may do everything still."""
    return Caller(tenant, key)


class ChargeJournal(Protocol):
    """Charge a response that fails before any run continues its journal."""

    def __call__(self, tenant: str, key: str, model: str, response_id: str, journal: Tokens) -> None: ...


def charge_nothing(tenant: str, key: str, model: str, response_id: str, journal: Tokens) -> None:
    """Default of `charge_journal`."""


class CallerSource(Protocol):
    """Who began something, by tenant and id of their key, as that key is by now. Raises StoreUnavailable."""

    async def __call__(self, tenant: str, key: str) -> Caller: ...


@dataclass(frozen=True, slots=True)
class ResponsesDeps:
    """`resolve` finds the model a name stands for and raises UnknownModel, or ModelNotAllowed where the caller may not
    use it; `find_way` says who answers for it, None that it is always the engine. `today` gives YYYY-MM-DD, `clock`
    seconds since the epoch, `new_id` an unguessable id with a prefix. `seals` waits for the key, which may be in the
    store: raises StoreUnavailable. `lease_s` is how long a lease holds without a sign of life, `kept_s` how long a
    response is kept, in seconds."""

    turns: GenerationService
    store: Store
    resolve: Callable[[str, Caller], ResponsesModel]
    seals: SealsSource
    today: Callable[[], str]
    new_id: NewId
    clock: Callable[[], float]
    lease_s: float = 10.0
    kept_s: float = Retention().response_s
    servers: ServerRules = field(default_factory=ServerRules)
    caller_of: CallerSource = unlimited
    charge_journal: ChargeJournal = charge_nothing
    find_way: FindWay | None = None


class SealsSource(Protocol):
    async def __call__(self) -> ItemSealing: ...
