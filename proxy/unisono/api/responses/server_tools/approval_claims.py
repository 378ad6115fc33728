"""Claims on approvals: an approval is valid for one call, even if a client sends it again.

Two claims in the store ensure this across all gateways. When a response starts, it claims its approvals for the
duration of a lease, so that another response with the same approval is rejected early. Directly before the call, the
response marks the approval as used. If the response fails or its process dies before this mark, the approval can be
used again. Approvals whose ids were not created by a gateway are not claimed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from unisono.api.responses.continued_history import OUR_ID
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.schema import ResponsesRequest
from unisono.engine.request import GenerationRequest, ServerTools
from unisono.errors import ApprovalUsed, StoreError

INPUT: Final = "input"
# Field with the id of the request to the user, by the type of the user's response.
REQUEST_FIELDS: Final = {
    "mcp_approval_response": "approval_request_id",
    "mcp_elicitation_response": "elicitation_request_id",
}
# Prefix of these claims. A client's idempotency key, which is claimed in the same way, contains no line break.
MARK: Final = "approval\n"

log = logging.getLogger("unisono.responses")


def approvals_in(request: ResponsesRequest, server_tools: ServerTools | None) -> dict[str, str]:
    """Return the ids of the request's approvals, each with its field in the request.

    Denials are excluded. The field is `input` if the approval is not an item of the request.
    """
    responses = {
        getattr(item, field): f"{INPUT}.{position}.{field}"
        for position, item in enumerate(request.input)
        if (field := REQUEST_FIELDS.get(item.type)) is not None
    }
    decisions = () if server_tools is None else server_tools.decisions
    return {
        decision.approval: responses.get(decision.approval, INPUT)
        for decision in decisions
        if decision.approved and OUR_ID.fullmatch(decision.approval)
    }


class ApprovalClaims:
    """Approvals of tool calls that one response uses; each is valid for one call.

    `fields` maps the id of each approval to its field in the request, for errors.
    """

    def __init__(self, deps: ResponsesDeps, tenant: str, response_id: str, fields: Mapping[str, str]) -> None:
        self._deps = deps
        self._tenant = tenant
        self._response_id = response_id
        self._fields = fields
        self._used: set[str] = set()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Claim all approvals until the block ends. Raises the errors of `claim`."""
        await self.claim()
        try:
            yield
        finally:
            await asyncio.shield(self.release_unused())

    async def claim(self) -> None:
        """Claim all approvals temporarily. If one claim fails, release the others.

        Raises ApprovalUsed if another response has claimed or used one of the approvals, and StoreUnavailable if the
        store does not answer.
        """
        try:
            for approval in self._fields:
                await self._mark(approval, self._deps.lease_s)
        except BaseException:
            await asyncio.shield(self.release_unused())
            raise

    async def mark_used(self, approval: str) -> None:
        """Mark the approval as used, directly before its call runs.

        Raises ApprovalUsed if another response has used the approval, and StoreUnavailable if the store does not
        answer.
        """
        if approval in self._fields:
            # Remembered before the write, because an approval that may be marked in the store must not be released.
            self._used.add(approval)
            await self._mark(approval, self._deps.retention_s)

    async def release_unused(self) -> None:
        """Release the approvals of calls that did not run.

        An approval that cannot be released expires with the lease.
        """
        for approval in self._fields.keys() - self._used:
            try:
                await self._deps.store.unclaim(self._tenant, MARK + approval, self._response_id)
            except StoreError as error:
                log.debug("approval not released", extra={"code": error.code})

    def attach_to(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with `mark_used` as the function to call before each approved call."""
        if request.server_tools is None or not self._fields:
            return request
        return replace(request, server_tools=replace(request.server_tools, claim_approval=self.mark_used))

    async def _mark(self, approval: str, for_s: float) -> None:
        store, response_id = self._deps.store, self._response_id
        owner = await store.claim(self._tenant, MARK + approval, "", response_id, for_s=for_s)
        if owner != response_id:
            field = self._fields[approval]
            raise ApprovalUsed(
                f"'{field}': the approval '{approval}' is valid for one call only; response '{owner}' already uses it.",
                param=field,
            )
