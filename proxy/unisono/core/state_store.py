"""State that outlives a request, and the `Store` protocol. Independent of any wire format.

All state belongs to a tenant. For a missing id and for an id of a different tenant, methods return None. Callers create
the ids, which must be impossible to guess. If the reply to a write was lost, the write may be repeated with the same
arguments; it takes effect only once. A refused write changes nothing. Errors are `StoreError` and its subclasses.
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
    """One stored item.

    `wire` is the item in the format of its API surface. `meaning` is its content for the model, with the exact token
    ids that were generated. `meaning` is empty for an item that is only displayed. For a server tool call, `meaning`
    contains the call and its result.
    """

    id: str
    meaning: tuple[Item, ...] = ()
    wire: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    `request` contains the fields of the request that the response repeats. `notes` contains other data that the API
    surface needs again. `input` contains only the items of this turn. Earlier items are in the responses `ancestors`,
    or are the first `seen` items ever added to `conversation`. `ancestors` are the ids of the responses that this
    response continues, oldest first, the parent last. `first_day` is the date of the preamble, YYYY-MM-DD. `created_at`
    is in seconds since 1970. A response is stored under its anchor: the id of its conversation, or its own id.
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
    seen: int | None = None  # None without a conversation, and for responses stored by earlier versions

    @property
    def anchor(self) -> str:
        return self.conversation or self.id

    @property
    def parent(self) -> str | None:
        return self.ancestors[-1] if self.ancestors else None


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Conversation without its items, which are read separately.

    The store counts the changes to the items (`revision`) and the items ever added (`added`), and ignores given values.
    """

    id: str
    created_at: float
    first_day: str = ""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    revision: int = 0
    added: int = field(default=0, compare=False)


# -- writing
# A process that was paused may believe that it still holds a lease. Every write therefore contains the fence, which
# grows with every new owner. The store refuses a write whose fence is not the newest. This needs no clock.


@dataclass(frozen=True, slots=True)
class Lease:
    """Right to write under an anchor (see `StoredResponse`).

    Only the holder of a conversation's lease may write to the conversation and its responses. `owner` is the id of a
    response, or ends with a colon and this id. After the lease has ended, it stays reserved for `reserve_s` seconds:
    only an owner with the same response id can acquire the lease, and writes without a lease are refused.
    """

    tenant: str
    anchor: str
    owner: str
    fence: int
    reserve_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LogWrite:
    """Addition to a response's log in one atomic operation: events (opaque bytes) and token ids.

    `first_event` is the sequence number of the first event in `events`. `first_token` is the number of the first token
    in `tokens`.
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
    """Background response that a replica must complete."""

    tenant: str
    response: str


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds for which state is stored after its last write.

    A new response renews its ancestors and their conversation, and a lease renews its conversation. All items of a
    conversation are stored for the same time. `log_s` is for logs of finished responses, `key_s` for idempotency keys.
    """

    response_s: float = 30 * 86400.0
    conversation_s: float = 30 * 86400.0
    log_s: float = 600.0
    key_s: float = 86400.0


NOTHING_LOGGED = LogWrite()


class WriteOptions(TypedDict, total=False):
    """Optional parts of `Store.create` and `Store.update`, applied in the same atomic operation.

    The write fails if `lease` is lost. `log` is appended to the response's log. If the response is terminal, its input
    and output are appended to its conversation; the write fails if the conversation does not have `revision`.
    """

    lease: Lease | None
    log: LogWrite
    revision: int | None


class Store(KeyStore, DirectoryStore, AccountStore, TraceStore, RequestStore, Protocol):
    """Storage for state.

    Any method may raise `StoreUnavailable`. The docstring of each method lists its other errors.
    """

    async def start(self) -> tuple[str, ...]:
        """Prepare the store and return warnings for the operator about settings that can lose state."""
        ...

    async def aclose(self) -> None: ...

    async def check(self, beginning: StoredResponse | None = None, tenant: str = "") -> None:
        """Check that the store answers and accepts writes; raise an error otherwise.

        `beginning` is a new response of `tenant`; it is not written, but its ancestors are renewed. Raises
        `StoreTooLarge` if it is too large, or if its conversation has no room for its input.
        """
        ...

    # -- responses
    # Log and response are written in one operation, so no reader sees a finished response without its last events.

    async def create(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        """Store a new response and the beginning of its log, in one atomic operation.

        Raises `NotFound` if the conversation does not exist. Raises `StoreConflict` if a different response has the id,
        if the lease is lost or has a different owner, or if the conversation has changed. Raises `StoreTooLarge` if a
        response that has not ended is too large. A finished response is stored whatever its size.
        """
        ...

    async def update(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        """Replace all parts except the input of a response that is not terminal.

        A terminal status closes the log after `log`. Raises the errors of `create`, and `NotFound` if the response was
        deleted.
        """
        ...

    async def responses(self, tenant: str, ids: Sequence[str]) -> tuple[StoredResponse | None, ...]:
        """Return the responses in the order of `ids`, with None for each missing response.

        Raises `StoreUnreadable` if a stored response cannot be read.
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
        conversation is available for `Retention.conversation_s` seconds after it was appended.
        """
        ...

    # -- logs
    # The writer numbers events and tokens. The store recognises a repeated write by these numbers, and refuses a write
    # that would leave a gap. A log therefore always contains the beginning of the answer, without gaps.

    async def log(self, lease: Lease, response: str, write: LogWrite) -> None:
        """Append to the log of a response that runs under `lease`.

        Raises `NotFound` if the response does not exist. Raises `StoreConflict` if the lease is lost, the write would
        leave a gap, content with the same numbers differs, or the response is terminal.
        """
        ...

    async def is_log_complete(self, lease: Lease, response: str) -> bool:
        """Return False if the store may have lost the last log writes of an earlier owner.

        This can happen if the server of the store failed over or restarted since those writes. A new owner calls this
        before its first write. Once False, the result stays False for the response. Raises `NotFound` if the response
        does not exist, and `StoreConflict` if the lease is lost.
        """
        ...

    async def events(
        self, tenant: str, response: str, first: int, *, limit: int = 512, wait_s: float = 0.0
    ) -> EventPage | None:
        """Return at most `limit` logged events from number `first` on; None if there is no log.

        If there are no such events yet, wait up to `wait_s` seconds for new events or for the end of the log.
        """
        ...

    async def tokens(self, tenant: str, response: str) -> Tokens:
        """Return the token ids logged so far; empty if there is no log."""
        ...

    # -- conversations
    # The revision counts changes to the items. A response is appended only if the conversation still has the revision
    # that the response continues. Two answers to the same state can therefore not both be appended.

    async def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem] = ()
    ) -> None:
        """Store a new conversation.

        Raises `StoreConflict` if the id exists, and `StoreTooLarge` if the data is too large.
        """
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
        upto: int | None = None,
    ) -> tuple[StoredItem, ...] | None:
        """Return at most `limit` items in order, only those that follow the item `after`.

        With `upto`, only items among the first `upto` items ever added are returned. A restriction of None does not
        apply. Returns None if the conversation does not exist or does not contain the item `after`.
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

        If `revision` is None, the items are appended to any revision, and a repeated call appends them again. Raises
        `NotFound` if the conversation does not exist. Raises `StoreConflict` if it has a different revision, if a
        different owner has its lease, or if it already contains one of the ids. Without a lease, raises `StoreTooLarge`
        if the items are too large. With a lease, the items belong to an answer, whose size is not limited.
        """
        ...

    async def set_metadata(
        self, tenant: str, conversation: str, metadata: Mapping[str, Json]
    ) -> StoredConversation | None: ...

    async def delete_item(self, tenant: str, conversation: str, item: str) -> bool:
        """Delete an item; return False if it did not exist.

        Raises `StoreConflict` while any owner has the lease.
        """
        ...

    async def delete_conversation(self, tenant: str, conversation: str) -> bool:
        """Delete a conversation but not its responses; return False if it did not exist.

        Raises `StoreConflict` while any owner has the lease.
        """
        ...

    async def acquire(
        self, tenant: str, anchor: str, owner: str, for_s: float, *, force: bool = False, reserve_s: float = 0.0
    ) -> Lease | None:
        """Acquire the lease of `anchor` for `for_s` seconds; return None if another owner has it.

        With `force`, a lease that another owner has for the same response is revoked. A lease for a different response
        is never revoked. An owner that already has the lease gets it again, with the same fence.
        """
        ...

    async def renew(self, lease: Lease, for_s: float) -> bool:
        """End the lease `for_s` seconds from now, before its reserve; return False if it is lost."""
        ...

    async def release(self, lease: Lease) -> None: ...

    async def watch(self, run: BackgroundRun, for_s: float) -> None:
        """Watch a background run; it lapses unless this is called again within `for_s` seconds."""
        ...

    async def unwatch(self, run: BackgroundRun) -> None: ...

    async def lapsed(self, limit: int = 16) -> tuple[BackgroundRun, ...]:
        """Return at most `limit` runs whose watch has expired, in the order of expiry.

        Each run is returned again by later calls, until a replica watches or unwatches it.
        """
        ...

    async def claim(self, tenant: str, key: str, digest: str, response: str, *, for_s: float | None = None) -> str:
        """Bind an idempotency key to the digest of a body; return the response that owns the key.

        The response of the first call for a key owns the key. Raises `KeyReused` if the key is bound to a different
        body. The key is stored for `Retention.key_s` seconds from its first use, or for `for_s` seconds from now.
        """
        ...

    async def unclaim(self, tenant: str, key: str, response: str) -> None:
        """Release an idempotency key if the response owns it, because the response was not created."""
        ...

    async def secret(self, name: str, candidate: bytes) -> bytes:
        """Return the permanent secret with this name; store and return `candidate` if none exists."""
        ...

    async def count(self, tenant: str, name: str, amount: int, *, once: str, for_s: float) -> int:
        """Add `amount` to a counter and return its value; a repeated `once` adds nothing.

        The counter is deleted `for_s` seconds after its last change.
        """
        ...
