"""State that outlives a request, and the `Store` protocol. Independent of any wire format.

All state belongs to a tenant. A missing id and an id of another tenant both return None. Callers create the ids, which
must be unguessable. Every write may be repeated with the same arguments if its reply was lost; it takes effect once. A
refused write changes nothing. Failures of the store raise the `StoreError` family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Protocol, TypedDict, Unpack

from unisono.core.access import KeyStore
from unisono.core.conversation import Item, Json, Tokens
from unisono.core.directory import DirectoryStore
from unisono.core.frozen import dataclass
from unisono.core.generation import Usage
from unisono.core.quotas import AccountStore
from unisono.core.recordings import TraceStore
from unisono.core.request_store import RequestStore


class Status(StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """True if the response no longer changes."""
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item under its id.

    `wire` is the item in the form of its API surface. `meaning` is its content for the model, with the exact generated
    token ids. `meaning` is empty for an item that is only displayed, and has several items for a call with its result.
    """

    id: str
    meaning: tuple[Item, ...] = ()
    wire: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    `request` echoes the request; `notes` holds other data that the API surface needs again. `input` holds the items of
    this turn only. Earlier items are found through `ancestors` or in `conversation`. `ancestors` are the ids of the
    responses that this one continues, oldest first, the parent last. `first_day` is the date of the preamble,
    YYYY-MM-DD; `created_at` is in seconds since 1970. A response is stored under its anchor: its conversation, or
    itself.
    """

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
    """Head of a conversation; its items are read separately.

    `revision` grows by one with every change of the items. The store sets it and ignores the caller's value.
    """

    id: str
    created_at: float
    first_day: str = ""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    revision: int = 0


# -- writing
# A process that was paused may believe that it still holds a lease. The fence therefore travels with every write, and
# the store compares it. The clock of the process decides nothing.


@dataclass(frozen=True, slots=True)
class Lease:
    """Right to write under an anchor.

    The holder of a conversation's lease is the only writer of the conversation and its responses. `fence` grows with
    every new owner. The store refuses a writer whose fence is not the newest.
    """

    tenant: str
    anchor: str
    owner: str
    fence: int


@dataclass(frozen=True, slots=True)
class LogWrite:
    """Addition to a response's log in one atomic operation: events (opaque bytes) and token ids.

    `first_event` is the sequence number of the first event, `first_token` the number of the first generated token.
    """

    first_event: int = 0
    events: tuple[bytes, ...] = ()
    first_token: int = 0
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events from number `first` on, in sequence; `ended` is True if no more events follow."""

    first: int
    events: tuple[bytes, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BackgroundRun:
    """Background response that a replica must carry on."""

    tenant: str
    response: str


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention of state in seconds since its last write; a conversation is kept as a whole.

    `log_s` applies to the log of a finished response, `key_s` to idempotency keys.
    """

    response_s: float = 30 * 86400.0
    conversation_s: float = 30 * 86400.0
    log_s: float = 600.0
    key_s: float = 86400.0


NOTHING_LOGGED = LogWrite()


class WriteOptions(TypedDict, total=False):
    """Optional parts of `Store.create` and `Store.update`, applied in the same atomic operation.

    The write fails if `lease` is lost. `log` is appended to the response's log. `revision` is the expected revision of
    the conversation, to which the input and output of a terminal response are appended.
    """

    lease: Lease | None
    log: LogWrite
    revision: int | None


class Store(KeyStore, DirectoryStore, AccountStore, TraceStore, RequestStore, Protocol):
    """Storage for state.

    Any method may raise `StoreUnavailable`; each method names its other errors.
    """

    async def start(self) -> tuple[str, ...]:
        """Prepare the store and return warnings for the operator.

        They name settings under which state can be lost.
        """
        ...

    async def aclose(self) -> None: ...

    async def check(self, beginning: StoredResponse | None = None) -> None:
        """Return if the store answers and accepts writes, and `beginning` is not too large.

        `beginning` is a response before anything of it is generated; it is not written. Raises `StoreTooLarge`.
        """
        ...

    # -- responses
    # The log is written together with the response: no reader sees a finished response without its last events.

    async def create(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        """Store a new response and the beginning of its log, in one atomic operation.

        Raises `NotFound` (no such conversation), `StoreConflict` (another response has the id, the lease is lost or
        belongs to another owner, the conversation changed), `StoreTooLarge`.
        """
        ...

    async def update(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        """Replace the mutable parts of a response that is not terminal; its input stays as created.

        A terminal status closes the log after `log`. Raises as `create`, and `NotFound` for a deleted response.
        """
        ...

    async def responses(self, tenant: str, ids: Sequence[str]) -> tuple[StoredResponse | None, ...]:
        """Return the responses in the order of `ids`, None for each missing one.

        Raises `StoreUnreadable`.
        """
        ...

    async def delete_response(self, tenant: str, response: str) -> bool:
        """Delete a response, its items and its log; return False if there was none.

        A generation that is still running notices the deletion at its next write.
        """
        ...

    async def item(self, tenant: str, item: str) -> StoredItem | None:
        """Return an item by its id alone, from any response or conversation of the tenant.

        An item of a response is available as long as the response is stored. An item that was appended to a
        conversation is available for `Retention.conversation_s` after that.
        """
        ...

    # -- logs
    # Events and tokens are numbered by the writer. A repeated write is recognised by its numbers, and a gap is
    # refused, so that a log is always a beginning of the answer.

    async def log(self, lease: Lease, response: str, write: LogWrite) -> None:
        """Append to the log of a response that runs under `lease`.

        Content that is already logged must be identical. Raises `NotFound`, `StoreConflict` (lease lost, a gap, other
        content, or terminal).
        """
        ...

    async def is_log_complete(self, lease: Lease, response: str) -> bool:
        """Return False if the store may have lost the last log writes of another owner.

        This happens if the server failed over or restarted since those writes. A new owner calls this before its first
        write; False is permanent for the response. Raises `NotFound`, `StoreConflict` (lease lost).
        """
        ...

    async def events(
        self, tenant: str, response: str, first: int, *, limit: int = 512, wait_s: float = 0.0
    ) -> EventPage | None:
        """Return logged events from number `first` on; None if there is no log (any more).

        If there are none, wait up to `wait_s` seconds for new events or for the end.
        """
        ...

    async def tokens(self, tenant: str, response: str) -> Tokens:
        """Return the token ids logged so far; empty if there is no log."""
        ...

    # -- conversations
    # The revision counts changes of the items. A response appends to the revision that it has read, so two answers to
    # the same state cannot both be appended.

    async def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem] = ()
    ) -> None:
        """Store a new conversation. Raises `StoreConflict` (the id exists), `StoreTooLarge`."""
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
        """Return at most `limit` items in order, only those that follow the item `after`.

        None if there is no such conversation or no item `after` in it.
        """
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
        """Append items, all or none, and return the new revision.

        With `revision`, append only if the conversation still has that revision; without it, a repeated call is not
        recognised. Raises `NotFound`, `StoreConflict` (changed meanwhile, leased by another owner, an id already
        present), `StoreTooLarge`.
        """
        ...

    async def set_metadata(
        self, tenant: str, conversation: str, metadata: Mapping[str, Json]
    ) -> StoredConversation | None: ...

    async def delete_item(self, tenant: str, conversation: str, item: str) -> bool:
        """Return False if there was none. Raises `StoreConflict` while a lease is held."""
        ...

    async def delete_conversation(self, tenant: str, conversation: str) -> bool:
        """Delete a conversation but not its responses; return False if there was none.

        Raises `StoreConflict` while a lease is held.
        """
        ...

    async def acquire(self, tenant: str, anchor: str, owner: str, for_s: float, *, force: bool = False) -> Lease | None:
        """Acquire the lease of `anchor` for `for_s` seconds; return None if another owner has it.

        `force` revokes the other owner's lease. The same owner gets the same fence again.
        """
        ...

    async def renew(self, lease: Lease, for_s: float) -> bool:
        """Return False if the lease is lost."""
        ...

    async def release(self, lease: Lease) -> None: ...

    async def watch(self, run: BackgroundRun, for_s: float) -> None:
        """Report the job through `lapsed` unless this is called again within `for_s` seconds."""
        ...

    async def unwatch(self, run: BackgroundRun) -> None: ...

    async def lapsed(self, limit: int = 16) -> tuple[BackgroundRun, ...]:
        """Return jobs whose watch has expired, the longest expired first.

        Each is returned until a replica watches or unwatches it.
        """
        ...

    async def claim(self, tenant: str, key: str, digest: str, response: str, *, for_s: float | None = None) -> str:
        """Bind an idempotency key to a body (its digest), and return the response that owns the key.

        That is the given one on first use, the earlier one on a repeat. Raises `KeyReused` for another body. A key is
        stored for `Retention.key_s` from its first use, and for at least `for_s` seconds from now.
        """
        ...

    async def unclaim(self, tenant: str, key: str, response: str) -> None:
        """Release a key if it still belongs to that response, because the response was not created."""
        ...

    async def secret(self, name: str, candidate: bytes) -> bytes:
        """Return the secret of that name, which is permanent and the same for all replicas.

        If the store has none yet, store and return `candidate`.
        """
        ...

    async def count(self, tenant: str, name: str, amount: int, *, once: str, for_s: float) -> int:
        """Add to a counter and return its value; each value of `once` adds only once.

        The counter is deleted `for_s` seconds after its last change.
        """
        ...
