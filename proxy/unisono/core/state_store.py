"""State: what outlives a request, and the port it is kept behind. Free of any wire format.

Everything belongs to a tenant, and an id that is missing and one of another tenant are the same None. Ids are made by
callers and must be unguessable. Every write may be repeated with the same arguments, after an answer that never came,
and is then done once; a write that is refused leaves nothing behind. What the store is asked and it cannot do it
raises as the `StoreError` family.

A response lives under its anchor: the conversation it belongs to, or itself. Leases are taken on anchors, so whoever
holds a conversation's lease is the only one who writes to it or to its responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from unisono.core.access import KeyStore
from unisono.core.conversation import Item, Json, Tokens
from unisono.core.generation import Usage
from unisono.core.quotas import AccountStore
from unisono.core.recordings import TraceStore

MIB = 1 << 20


class Status(StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Nothing changes any more."""
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item under its id. `shown` is how a surface shows it, in that surface's own form; `said` is what it means to
    the model, with the exact generated token ids: empty for an item that is only shown, several items where one
    stands for a call and its result."""

    id: str
    said: tuple[Item, ...] = ()
    shown: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response. `request` is the echo of what was asked and `notes` whatever else its surface needs again;
    `input` are the items of this turn only, earlier ones are found through `ancestors` (ids of the responses it
    continues, oldest first, the parent last) or in `conversation`. `first_day` is the date of the preamble, YYYY-MM-DD;
    `created_at` in seconds since 1970."""

    id: str
    status: Status
    model: str
    created_at: float
    first_day: str = ""
    request: Mapping[str, Json] = field(default_factory=dict)
    input: tuple[StoredItem, ...] = ()
    output: tuple[StoredItem, ...] = ()
    usage: Usage | None = None
    error: Mapping[str, Json] | None = None
    notes: Mapping[str, Json] = field(default_factory=dict)
    ancestors: tuple[str, ...] = ()
    conversation: str | None = None

    @property
    def anchor(self) -> str:
        return self.conversation or self.id

    @property
    def parent(self) -> str | None:
        return self.ancestors[-1] if self.ancestors else None


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """The head of a conversation; its items are read apart. `revision` grows by one with every change of the items and
    is the store's to set: what a caller puts there is ignored."""

    id: str
    created_at: float
    first_day: str = ""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write under an anchor. `fence` grows with every new owner: a writer whose fence is not the newest
    is refused, however sure it is of itself."""

    tenant: str
    anchor: str
    owner: str
    fence: int


@dataclass(frozen=True, slots=True)
class LogWrite:
    """What a run adds to a response's log in one act: events (opaque bytes), the first of which has the sequence
    number `first_event`, and generated token ids, the first of which is number `first_token`."""

    first_event: int = 0
    events: tuple[bytes, ...] = ()
    first_token: int = 0
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events from `first` on, in sequence. `ended` says that nothing comes after them."""

    first: int
    events: tuple[bytes, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BackgroundRun:
    """A background response somebody is to carry on with."""

    tenant: str
    response: str


@dataclass(frozen=True, slots=True)
class Retention:
    """How long state is kept, in seconds, from its last write; a conversation's last write counts for all of it.
    `log_s` is for the log of a finished response, `key_s` for idempotency keys."""

    response_s: float = 30 * 86400.0
    conversation_s: float = 30 * 86400.0
    log_s: float = 600.0
    key_s: float = 86400.0


@dataclass(frozen=True, slots=True)
class StateLimits:
    """The largest an item, a response (input and output) and a conversation may be, in encoded bytes."""

    item: int = 1 * MIB
    response: int = 8 * MIB
    conversation: int = 32 * MIB


NOTHING_LOGGED = LogWrite()


class Store(KeyStore, AccountStore, TraceStore, Protocol):
    """Where state is kept. Besides `StoreUnavailable`, which any method may raise, each names what it raises."""

    async def start(self) -> tuple[str, ...]:
        """Make ready, and return what an operator should know: settings under which state can be lost."""
        ...

    async def aclose(self) -> None: ...

    async def check(self, beginning: StoredResponse | None = None) -> None:
        """Return when the store answers and takes writes, and `beginning`, a response before anything of it is made,
        is not too large already. Writes nothing of it. Raises `StoreTooLarge`."""
        ...

    async def create(
        self,
        tenant: str,
        response: StoredResponse,
        *,
        lease: Lease | None = None,
        log: LogWrite = NOTHING_LOGGED,
        revision: int | None = None,
    ) -> None:
        """Keep a new response, with the beginning of its log, in one act. One that is terminal already may be given
        `revision`: its input and output are then appended to its conversation in the same act. Raises `NotFound`
        (no such conversation), `StoreConflict` (another response has the id, the lease is lost or somebody else's,
        the conversation changed), `StoreTooLarge`."""
        ...

    async def update(
        self,
        tenant: str,
        response: StoredResponse,
        *,
        lease: Lease | None = None,
        log: LogWrite = NOTHING_LOGGED,
        revision: int | None = None,
    ) -> None:
        """Replace what changes in a response that is not terminal; its input stays as created. A terminal status
        closes the log behind `log`. `revision` and errors as for `create`; `NotFound` for one that was deleted."""
        ...

    async def responses(self, tenant: str, ids: Sequence[str]) -> tuple[StoredResponse | None, ...]:
        """In the order asked. Raises `StoreUnreadable`."""
        ...

    async def delete_response(self, tenant: str, response: str) -> bool:
        """Forget a response, its items and its log; False when there was none. A run that still goes on finds out at
        its next write."""
        ...

    async def item(self, tenant: str, item: str) -> StoredItem | None:
        """An item of a response or of a conversation by its id alone, for as long as that response is kept, or
        `Retention.conversation_s` after it was appended."""
        ...

    async def log(self, lease: Lease, response: str, write: LogWrite) -> None:
        """Add to the log of a response that runs under `lease`. What is there already must be the same. Raises
        `NotFound`, `StoreConflict` (lease lost, a gap, other content, or terminal)."""
        ...

    async def is_log_complete(self, lease: Lease, response: str) -> bool:
        """Return False if the store may have lost the last log writes of another owner, because the server failed over
        or restarted since. A new owner calls this before its first write; False is permanent for the response. Raises
        `NotFound`, `StoreConflict` (lease lost)."""
        ...

    async def events(
        self, tenant: str, response: str, first: int, *, limit: int = 512, wait_s: float = 0.0
    ) -> EventPage | None:
        """Logged events from number `first` on. With none there, waits up to `wait_s` seconds for some or for the end.
        None when there is no log (any more)."""
        ...

    async def tokens(self, tenant: str, response: str) -> Tokens:
        """The token ids logged so far; empty when there is no log."""
        ...

    async def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem] = ()
    ) -> None:
        """Raises `StoreConflict` when another has the id, `StoreTooLarge`."""
        ...

    async def conversation(self, tenant: str, conversation: str) -> StoredConversation | None: ...

    async def conversation_items(
        self,
        tenant: str,
        conversation: str,
        *,
        after: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> tuple[StoredItem, ...] | None:
        """Items in order, those behind the item `after` only, at most `limit`. None when there is no such conversation
        or no item `after` in it."""
        ...

    async def conversation_item(self, tenant: str, conversation: str, item: str) -> StoredItem | None: ...

    async def append(
        self,
        tenant: str,
        conversation: str,
        items: Sequence[StoredItem],
        *,
        revision: int | None = None,
        lease: Lease | None = None,
    ) -> int:
        """Add items at the end, all or none, and return the new revision. With `revision`, only if it is still that
        one; a repeat needs it to be known as one. Raises `NotFound`, `StoreConflict` (changed meanwhile, held by
        somebody's lease, an id that is in it already), `StoreTooLarge`."""
        ...

    async def set_metadata(
        self, tenant: str, conversation: str, metadata: Mapping[str, Json]
    ) -> StoredConversation | None: ...

    async def delete_item(self, tenant: str, conversation: str, item: str) -> bool:
        """False when there was none. Raises `StoreConflict` while a lease is held."""
        ...

    async def delete_conversation(self, tenant: str, conversation: str) -> bool:
        """Its responses stay. False when there was none; raises `StoreConflict` while a lease is held."""
        ...

    async def acquire(self, tenant: str, anchor: str, owner: str, for_s: float, *, force: bool = False) -> Lease | None:
        """Take the lease of `anchor` for that many seconds; None when another owner has it. `force` takes it away
        from them. The same owner gets the same fence again."""
        ...

    async def renew(self, lease: Lease, for_s: float) -> bool:
        """False when it is lost."""
        ...

    async def release(self, lease: Lease) -> None: ...

    async def watch(self, run: BackgroundRun, for_s: float) -> None:
        """Unless this is called again within `for_s` seconds, `lapsed` names the run."""
        ...

    async def unwatch(self, run: BackgroundRun) -> None: ...

    async def lapsed(self, limit: int = 16) -> tuple[BackgroundRun, ...]:
        """Runs nobody watches any more, longest first; each is named until somebody watches or unwatches it."""
        ...

    async def claim(self, tenant: str, key: str, digest: str, response: str, *, for_s: float | None = None) -> str:
        """Tie an idempotency key to a body (its digest) and a response id. Returns the response that has the key: the
        one given for a first use, the earlier one for a repeat. Raises `KeyReused` for another body. A key is kept for
        `Retention.key_s` from its first use on, or with `for_s` at least so many seconds from now, which the response
        that has it may say again."""
        ...

    async def unclaim(self, tenant: str, key: str, response: str) -> None:
        """Give a key back, if it is still that response's: nothing came of it."""
        ...

    async def secret(self, name: str, candidate: bytes) -> bytes:
        """The secret of that name, the same for all replicas and for ever: `candidate` if there is none yet."""
        ...

    async def count(self, tenant: str, name: str, amount: int, *, once: str, for_s: float) -> int:
        """Add to a counter that is forgotten `for_s` seconds after its last change, and return it. The same `once`
        adds once."""
        ...
