"""An approval is for one call, whoever answers it and however often: the first response that says so makes it.

Two marks in the store see to that, for every gateway of it. A response that begins holds the approval for as long as a
lease holds, so that another one is refused before anything is made. Right before the call it takes it for good: a
response that comes to nothing before then, or dies, leaves the approval to be answered again. Approvals with ids that
were not made here are nobody's to mark.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.prior_state import OUR_ID
from unisono.api.responses.schema import ResponsesRequest
from unisono.engine.turn import GenerationRequest, ServerTools
from unisono.errors import ApprovalUsed, StoreError

INPUT: Final = "input"
MARK: Final = "approval\n"
"""How such marks begin; no idempotency key of a client has a line break."""

log = logging.getLogger("unisono.responses")


def approvals_in(request: ResponsesRequest, hosting: ServerTools | None) -> dict[str, str]:
    """The approvals that are given now, and the field each stands in, as far as the request shows it."""
    given = {
        getattr(item, "approval_request_id", None): f"{INPUT}.{position}.approval_request_id"
        for position, item in enumerate(request.input)
        if item.type == "mcp_approval_response"
    }
    decisions = () if hosting is None else hosting.decisions
    return {
        decision.approval: given.get(decision.approval, INPUT)
        for decision in decisions
        if decision.approved and OUR_ID.fullmatch(decision.approval)
    }


class Approvals:
    """Those that one response was given: `fields` says by their ids where."""

    def __init__(self, means: ResponsesDeps, tenant: str, response_id: str, fields: Mapping[str, str]) -> None:
        self._means = means
        self._tenant = tenant
        self._response_id = response_id
        self._fields = fields
        self._taken: set[str] = set()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """All of them, while something goes on. Raises ApprovalUsed and StoreUnavailable."""
        await self.claim()
        try:
            yield
        finally:
            await asyncio.shield(self.give_back())

    async def claim(self) -> None:
        """Hold all of them for a while, or none. Raises ApprovalUsed and StoreUnavailable."""
        try:
            for approval in self._fields:
                await self._mark(approval, self._means.lease_s)
        except BaseException:
            await asyncio.shield(self.give_back())
            raise

    async def take(self, approval: str) -> None:
        """The call is made now. Raises ApprovalUsed and StoreUnavailable."""
        if approval in self._fields:
            # What may have been marked is not given back.
            self._taken.add(approval)
            await self._mark(approval, self._means.kept_s)

    async def give_back(self) -> None:
        """Those whose call was not made. What cannot be given back is free again when the lease would be."""
        for approval in self._fields.keys() - self._taken:
            try:
                await self._means.store.unclaim(self._tenant, MARK + approval, self._response_id)
            except StoreError as error:
                log.debug("approval not given back", extra={"code": error.code})

    def taken_by(self, turn: GenerationRequest) -> GenerationRequest:
        """The turn, which takes them."""
        if turn.hosting is None or not self._fields:
            return turn
        return replace(turn, hosting=replace(turn.hosting, take=self.take))

    async def _mark(self, approval: str, for_s: float) -> None:
        store, mine = self._means.store, self._response_id
        owner = await store.claim(self._tenant, MARK + approval, "", mine, for_s=for_s)
        if owner != mine:
            field = self._fields[approval]
            raise ApprovalUsed(
                f"'{field}': '{approval}' is for one call, which the response '{owner}' makes or has made.", param=field
            )
