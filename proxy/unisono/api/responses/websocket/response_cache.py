"""Cache of one WebSocket: the last unstored response of each lane, for continuation.

The cache is dropped when the socket closes. A stored response that continues an unstored response contains the items of
the unstored response in its own input, so that it can be continued without the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from unisono.api.responses.configuration_updates import CONFIGURATION_UPDATE, configuration_in
from unisono.api.responses.continued_history import PriorState, continued, is_compacted, recall
from unisono.api.responses.inbound import referenced_ids
from unisono.api.responses.items import meaning_of
from unisono.api.responses.persistence import JOINS
from unisono.api.responses.prepared_request import PreparedRequest
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.approval_history import server_tool_history
from unisono.api.responses.websocket.frames import Lane
from unisono.core.conversation import AddedTools, Item
from unisono.core.frozen import dataclass
from unisono.core.item_records import to_record
from unisono.core.state_store import Store, StoredItem, StoredResponse

# Capacity of a socket's cache in characters and tokens. Even several lanes with full context windows need far less.
CACHE_CAPACITY = 8_000_000


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """Unstored response that can be continued.

    `past` is the prior state for a request that continues the response; its ancestors are stored responses. `loose`
    holds the items that are not in the store.
    """

    past: PriorState
    loose: tuple[StoredItem, ...] = ()


class ResponseCache:
    """Cache of the newest response of each lane. If it is full, the oldest response is evicted."""

    def __init__(self, most: int = CACHE_CAPACITY) -> None:
        self._capacity = most
        self._lanes: dict[Lane, tuple[str, CachedResponse, int]] = {}

    def keep(self, lane: Lane, response_id: str, cached: CachedResponse) -> None:
        self._lanes.pop(lane, None)
        self._lanes[lane] = (response_id, cached, weight(cached.past.earlier))
        while sum(size for _, _, size in self._lanes.values()) > self._capacity:
            del self._lanes[next(iter(self._lanes))]

    def forget(self, response_id: object) -> None:
        """Evict the response with this id. Unknown ids and values of other types have no effect."""
        for lane, (known, _, _) in list(self._lanes.items()):
            if known == response_id:
                del self._lanes[lane]

    def find(self, response_id: str | None) -> CachedResponse | None:
        return next((cached for known, cached, _ in self._lanes.values() if known == response_id), None)


def weight(items: Iterable[Item]) -> int:
    """Return the size of items for the cache: the total of their characters and tokens."""
    return sum(map(_weight_of, items))


def _weight_of(item: Item) -> int:
    if isinstance(item, AddedTools):
        return len(json.dumps(to_record(item)))
    values = (getattr(item, name) for name in type(item).__slots__)
    return sum(len(value) for value in values if isinstance(value, str | tuple))


class Continuation:
    """Continuation of a cached response by a request on a WebSocket.

    `found` is the cached response that the request continues, or None.
    """

    def __init__(self, found: CachedResponse | None) -> None:
        self._found = found
        self._prior = PriorState()

    async def recall(self, store: Store, tenant: str, request: ResponsesRequest) -> PriorState:
        """Read the prior state as `prior_state.recall` does, from the cache instead of the store."""
        if self._found is None:
            self._prior = await recall(store, tenant, request)
            return self._prior
        rest = await recall(store, tenant, request.model_copy(update={"previous_response_id": None}))
        ids = set(referenced_ids(request))
        loose = {item.id: item for item in self._found.loose if item.id in ids}
        self._prior = replace(self._found.past, stored_items={**(rest.stored_items or {}), **loose})
        return self._prior

    def complete_request(self, prepared: PreparedRequest, sticky: str) -> PreparedRequest:
        """Return the request with its complete input and a routing key.

        `sticky` becomes the routing key of a request without a routing key.
        """
        generation = prepared.generation
        if prepared.request.stored and self._found is not None:
            generation = replace(generation, input=(*self._found.loose, *generation.input))
        if not generation.request.routing.sticky:
            generation = replace(
                generation,
                request=replace(generation.request, routing=replace(generation.request.routing, sticky=sticky)),
            )
        return replace(prepared, generation=generation)

    def cached_response(self, prepared: PreparedRequest, response: StoredResponse) -> CachedResponse | None:
        """Return the cache entry of a response; None if it is stored or cannot be continued."""
        request = prepared.request
        if request.stored or request.conversation is not None or response.status not in JOINS:
            return None
        new = (*prepared.generation.input, *response.output)
        loose = (*(self._found.loose if self._found else ()), *new)
        earlier = continued(self._prior.earlier, new)
        if is_compacted(response):
            # The compaction replaces the conversation, but its `configuration_update` items stay in force.
            updates = (item for item in loose if item.wire.get("type") == CONFIGURATION_UPDATE)
            loose, earlier = (*updates, *response.output), meaning_of(response.output)
        past = PriorState(
            earlier=earlier,
            ancestors=self._prior.ancestors,
            first_day=prepared.frame.first_day,
            hosted=self._prior.hosted + server_tool_history(new, self._prior.hosted),
            configuration=configuration_in(new, self._prior.configuration),
        )
        return CachedResponse(past, loose)
