"""Idempotency keys: a repeated request returns the same response.

A key belongs to one body and one response. A repeated request, on any replica, receives that response: from its log
while it is generated, from its record afterwards.

If the response failed, the key is freed, so that the same request generates a new response. If the gateway has called a
server tool for the failed response, the key is not freed, because the new response would call the tool again.

From the claim of the key until the response is stored, the response's lease shows that its owner is alive. A later
request waits for the response as long as that lease is renewed. When the lease expires, the later request acquires
it, which fences the earlier owner, and frees the key.
"""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b

from starlette.requests import Request

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.lease_keeper import RENEWALS, anchor_of, release
from unisono.api.responses.outbound.item_lifecycle import has_server_calls
from unisono.api.responses.schema import ResponsesRequest
from unisono.core.frozen import dataclass
from unisono.core.state_store import Status, StoredResponse
from unisono.errors import InvalidRequest, StoreError

HEADER = "idempotency-key"
MAX_KEY_LENGTH = 255
NO_EFFECT = "Idempotency-Key: no effect, because 'store' is false"
LOOK_EVERY_S = 0.05
MAX_LOOK_S = 0.5

log = logging.getLogger("unisono.responses")


class ClaimLost(Exception):
    """The idempotency key was claimed by another request while this one was prepared."""


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """Idempotency key of a request.

    `digest` is a hash of the request body. The key is rejected if it is sent with a different body.
    """

    tenant: str
    key: str
    digest: str


async def claim_of(request: Request, tenant: str) -> IdempotencyClaim | None:
    """Return the request's idempotency key; None if the request has no such header.

    Raises InvalidRequest if the key is empty, too long or not printable ASCII.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if not key or len(key) > MAX_KEY_LENGTH or not all(" " <= letter <= "~" for letter in key):
        raise InvalidRequest(f"'Idempotency-Key' must have 1 to {MAX_KEY_LENGTH} printable ASCII characters.")
    digest = blake2b(await request.body(), digest_size=16, person=b"unisono-body")
    return IdempotencyClaim(tenant, key, digest.hexdigest())


async def owner_of(deps: ResponsesDeps, claim: IdempotencyClaim, response_id: str) -> str:
    """Claim the key for `response_id`, and return the id of the response that owns the key.

    If an earlier request has claimed the key, this is the response of that request. Raises KeyReused if the earlier
    request had a different body.
    """
    return await deps.store.claim(claim.tenant, claim.key, claim.digest, response_id)


def is_repeatable(response: StoredResponse) -> bool:
    """Return True if a request with the key of this response generates a new response."""
    return response.status is Status.FAILED and not has_server_calls(response.output)


async def release_claim(deps: ResponsesDeps, claim: IdempotencyClaim, response_id: str) -> None:
    """Release the key of a failed response, so that a later request can claim the key.

    Errors of the store are only logged, because a later request also releases the key of a failed response.
    """
    try:
        await deps.store.unclaim(claim.tenant, claim.key, response_id)
    except StoreError as error:
        log.warning("idempotency key not released", extra={"code": error.code})


async def started(
    deps: ResponsesDeps, claim: IdempotencyClaim, owner: str, response_id: str, request: ResponsesRequest
) -> StoredResponse | None:
    """Wait until the store contains the response `owner`, which owns the key; return it.

    Returns None if that response failed and is repeatable, its process died, or it lost the key. The caller then claims
    the key again for `response_id`.
    """
    now = asyncio.get_running_loop().time
    # The owner acquires its lease shortly after it has claimed the key. Before `patient_until`, a free lease does not
    # show that the owner has died.
    patient_until = now() + deps.lease_s / RENEWALS
    pause_s = LOOK_EVERY_S
    while True:
        [response] = await deps.store.responses(claim.tenant, [owner])
        if response is not None and is_repeatable(response):
            await deps.store.unclaim(claim.tenant, claim.key, owner)
            return None
        if response is not None:
            return response
        if now() >= patient_until and await _freed(deps, claim, owner, anchor_of(request, owner), response_id):
            return None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_LOOK_S)
        if await owner_of(deps, claim, response_id) != owner:
            return None


async def _freed(deps: ResponsesDeps, claim: IdempotencyClaim, owner: str, anchor: str, response_id: str) -> bool:
    """Free the key of an owner that died before it stored its response.

    Return False if the owner is alive.
    """
    lease = await deps.store.acquire(claim.tenant, anchor, response_id, deps.lease_s)
    if lease is None:
        return False
    try:
        # The owner's fence is now outdated, so the store rejects a response that the owner tries to store from now on.
        [response] = await deps.store.responses(claim.tenant, [owner])
        if response is None:
            await deps.store.unclaim(claim.tenant, claim.key, owner)
    finally:
        await release(deps, lease)
    return True
