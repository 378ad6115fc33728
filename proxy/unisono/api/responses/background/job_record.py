"""Stored record of a running response, sufficient for another process to continue it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from unisono.api.body import off_loop
from unisono.api.responses.configuration_updates import configuration_in
from unisono.api.responses.continued_history import chain_of, continued
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.input_items import COMPACTION_TRIGGER
from unisono.api.responses.persistence import retry_while_down, to_stored
from unisono.api.responses.prepared_request import PreparedRequest, Sender, assembled
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.approval_history import parted
from unisono.api.responses.server_tools.mcp_spec import concealed, decrypted, has_secrets, is_concealed
from unisono.core.conversation import Json
from unisono.core.state_store import Lease, Status, StoredResponse
from unisono.core.trace_context import IDENTITY
from unisono.engine.request import GenerationRequest
from unisono.errors import StoreConflict

# Note with the request without its input. It is removed when the response is finished.
REQUEST_NOTE = "asked"
# Keys in `REQUEST_NOTE`: the notes for the client and the recoveries that the conversion of the request produced.
NOTES = "notes"
RECOVERIES = "recoveries"
# Note with two numbers: the takeovers after a crash in a row without a new token, and the number of logged tokens at
# the last takeover.
TRIES = "tries"
# Note with the value of `TRIES` at a graceful handover. An earlier version of the gateway ignores this note and changes
# `TRIES`. The values then differ, so that a crash of that process is counted.
HANDED_OVER = "handed_over"
# Note with the time at which a process first left the response to others, in seconds since 1970. It is removed when a
# process continues the response.
LEFT_SINCE = "left_since"


async def recorded(
    deps: ResponsesDeps, prepared: PreparedRequest, body: Mapping[str, Json], size: int = 0
) -> StoredResponse:
    """Return the record that is stored for a response before its generation begins.

    `body` is the original request, of `size` bytes. Raises StoreUnavailable if secrets in the request have to be
    encrypted and no key is available.
    """
    without_input = {key: value for key, value in body.items() if key != "input"}
    if has_secrets(without_input):
        without_input = concealed(without_input, await deps.seals(), prepared.sender.tenant)
    note: dict[str, Json] = {
        "body": without_input,
        "request_id": prepared.sender.request_id,
        "revision": prepared.revision,
        "size": size,
        "key": prepared.sender.caller.key,
        "user": IDENTITY.get().user,
        NOTES: [*prepared.frame.notes],
        RECOVERIES: [*prepared.generation.request.origin.recoveries],
    }
    return to_stored(prepared, prepared.frame.stored(Status.QUEUED, notes={REQUEST_NOTE: note, TRIES: [0, 0]}))


def with_takeover_counted(response: StoredResponse, tokens: int) -> tuple[StoredResponse, int]:
    """Count a takeover; return the updated response and the number of consecutive crashes.

    `tokens` is the number of logged tokens. If this number has grown since the previous takeover, the count of crashes
    restarts at 0. A graceful handover is not counted as a crash.
    """
    before: Any = response.notes.get(TRIES) or [0, 0]
    crashes = before[0] if tokens <= before[1] else 0
    if response.notes.get(HANDED_OVER) != before:
        crashes += 1
    notes = {key: value for key, value in response.notes.items() if key not in (HANDED_OVER, LEFT_SINCE)}
    counted = replace(response, status=Status.IN_PROGRESS, notes={**notes, TRIES: [crashes, tokens]})
    return counted, crashes


def with_handover_noted(response: StoredResponse) -> StoredResponse:
    """Record a graceful handover, so that the next takeover is not counted as a crash."""
    return replace(response, notes={**response.notes, HANDED_OVER: response.notes.get(TRIES) or [0, 0]})


def with_leaving_noted(response: StoredResponse, now: float) -> tuple[StoredResponse, float]:
    """Record that a process leaves the response to others.

    Returns the updated response and the time since which no process has continued it. `now` and this time are seconds
    since 1970.
    """
    noted: Any = response.notes.get(LEFT_SINCE)
    since = now if noted is None else float(noted)
    return replace(response, notes={**response.notes, LEFT_SINCE: since}), since


def key_of(response: StoredResponse) -> str:
    """Return the public id of the API key to which a running response is charged."""
    note: Any = response.notes.get(REQUEST_NOTE) or {}
    return str(note.get("key") or "")


def request_id_of(response: StoredResponse) -> str:
    """Return the id of the request that created a running response."""
    note: Any = response.notes.get(REQUEST_NOTE) or {}
    return str(note.get("request_id") or "")


def user_of(response: StoredResponse) -> str:
    """Return the end user of the request that created a running response."""
    note: Any = response.notes.get(REQUEST_NOTE) or {}
    return str(note.get("user") or "")


async def rebuild_request(deps: ResponsesDeps, tenant: str, response: StoredResponse, lease: Lease) -> PreparedRequest:
    """Rebuild the request of a stored response, with its prior state.

    Raises an UnisonoError if the request would be rejected now, or if its conversation has changed.
    """
    note: Any = response.notes.get(REQUEST_NOTE) or {}
    size = int(note.get("size") or 0)
    body = note.get("body") or {}
    if is_concealed(body):
        body = decrypted(body, await retry_while_down(deps.seals), tenant)
    # A compaction trigger must be in the input, because it makes the answer a compaction. All other input items are in
    # the prior state.
    if response.input and response.input[-1].wire.get("type") == COMPACTION_TRIGGER:
        body = {**body, "input": [{"type": COMPACTION_TRIGGER}]}
    caller = await retry_while_down(lambda: deps.caller_of(tenant, key_of(response)))
    request = await off_loop(lambda: ResponsesRequest.model_validate(body), size)
    past = await retry_while_down(lambda: chain_of(deps.store, tenant, response))
    revision = note.get("revision")
    if past.revision != revision:
        raise StoreConflict(
            "The conversation changed while the response was interrupted, so the response cannot continue; "
            "create a new response."
        )
    hosted, now = parted(response.input, past.hosted)
    past = replace(
        past,
        earlier=continued(past.earlier, response.input),
        hosted=hosted,
        now=now,
        configuration=configuration_in(response.input, past.configuration),
    )
    prepared = await assembled(
        deps,
        Sender(caller, request_id_of(response)),
        request,
        replace(past, first_day=response.first_day),
        deps.resolve(request.model, caller),
        response_id=response.id,
        created_at=int(response.created_at),
        lease=lease,
        size=size,
    )
    # Earlier versions stored neither notes nor recoveries.
    notes = tuple(note.get(NOTES, prepared.frame.notes))
    frame = replace(prepared.frame, request=response.request, ancestors=response.ancestors, notes=notes)
    rebuilt = _with_recoveries(prepared.generation.request, note.get(RECOVERIES, ()))
    # The time limit for tools applies to all processes together. It began when the response was created.
    spent_s = max(deps.clock() - response.created_at, 0.0)
    generation = replace(prepared.generation, input=response.input, request=later(rebuilt, spent_s))
    return replace(prepared, generation=generation, frame=frame, revision=revision)


def _with_recoveries(request: GenerationRequest, recoveries: Iterable[str]) -> GenerationRequest:
    return replace(request, origin=replace(request.origin, recoveries=tuple(recoveries)))


def later(request: GenerationRequest, spent_s: float) -> GenerationRequest:
    """Subtract the elapsed `spent_s` seconds from the request's time limit for server tools."""
    hosting = request.server_tools
    if hosting is None:
        return request
    return replace(request, server_tools=replace(hosting, total_s=max(hosting.total_s - spent_s, 0.0)))


def reported_elsewhere(prepared: PreparedRequest) -> PreparedRequest:
    """Mark the answer as reported by another process in metrics, spans, recordings and records."""
    request = prepared.generation.request
    request = replace(request, resumption=replace(request.resumption, is_reported_elsewhere=True))
    return replace(prepared, generation=replace(prepared.generation, request=request))


def with_incomplete_journal(prepared: PreparedRequest) -> PreparedRequest:
    """Mark the journal as incomplete: it may lack calls that have already run."""
    request = prepared.generation.request
    request = replace(request, resumption=replace(request.resumption, is_journal_complete=False))
    return replace(prepared, generation=replace(prepared.generation, request=request))
