"""Idempotency keys: the same request sent twice is one response.

A key is tied to a body and to the response made for it. Whoever comes second, on any replica, gets that response: from
its log while it goes on, as it is kept when it is over.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from hashlib import blake2b

from starlette.requests import Request

from unisono.api.responses.means import Means
from unisono.core.state import Status, StoredResponse
from unisono.errors import InvalidRequest, StoreConflict, StoreError

HEADER = "idempotency-key"
LONGEST_KEY = 255
NO_EFFECT = "Idempotency-Key: no effect with store false"
BEGINS_WITHIN_S = 5.0
"""How long a response may take from the claim of its key until it is there, in seconds."""
LOOK_EVERY_S = 0.05

log = logging.getLogger("unisono.responses")


@dataclass(frozen=True, slots=True)
class Claim:
    """A key as it came with a request: `digest` says which body."""

    tenant: str
    key: str
    digest: str


async def claim_of(request: Request, tenant: str) -> Claim | None:
    """The request's key; None without one. Raises InvalidRequest."""
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if not key or len(key) > LONGEST_KEY or not all(" " <= letter <= "~" for letter in key):
        raise InvalidRequest(f"'Idempotency-Key' must be 1 to {LONGEST_KEY} printable ASCII characters.")
    digest = blake2b(await request.body(), digest_size=16, person=b"unisono-body")
    return Claim(tenant, key, digest.hexdigest())


async def owner_of(means: Means, claim: Claim, response_id: str) -> str:
    """The response that has the key: `response_id`, or the one of an earlier request. Raises KeyReused for another
    body."""
    return await means.store.claim(claim.tenant, claim.key, claim.digest, response_id)


async def give_back(means: Means, claim: Claim, response_id: str) -> None:
    """Nothing came of the claim: the next request with the key begins anew. Whether it worked does not matter: a
    failed response keeps nobody from trying again."""
    try:
        await means.store.unclaim(claim.tenant, claim.key, response_id)
    except StoreError as error:
        log.warning("idempotency key not given back", extra={"code": error.code})


async def begun(means: Means, claim: Claim, response_id: str) -> StoredResponse | None:
    """The response an earlier request claimed the key for; None when it was never made, or failed, and the key is free
    again."""
    until = asyncio.get_running_loop().time() + BEGINS_WITHIN_S
    while True:
        [response] = await means.store.responses(claim.tenant, [response_id])
        if response is not None and response.status is Status.FAILED:
            await means.store.unclaim(claim.tenant, claim.key, response_id)
            return None
        if response is not None:
            return response
        if await owner_of(means, claim, response_id) != response_id:
            raise StoreConflict("Another request with this Idempotency-Key is being made; try again.")
        if asyncio.get_running_loop().time() >= until:
            # Its maker died between the claim and the response, or the response was deleted.
            await means.store.unclaim(claim.tenant, claim.key, response_id)
            return None
        await asyncio.sleep(LOOK_EVERY_S)
