"""Operations of the gateway: one row per method and path, grouped by topic.

Equivalent paths without `/v1` are left out. A test compares the rows with the actual routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unisono.api.chat.schema import ChatRequest
from unisono.api.completions.schema import CompletionRequest
from unisono.api.field_types import OpenModel
from unisono.api.inspect_request import InspectRequest
from unisono.api.messages.schema import MessagesInput, MessagesRequest
from unisono.api.openapi.models import Schema
from unisono.api.responses.compaction import TAKEN
from unisono.api.responses.conversations.schema import AddedItems, ChangedConversation, NewConversation
from unisono.api.responses.idempotency import LONGEST_KEY
from unisono.api.responses.queries import ItemQuery, PageQuery, ResponseQuery
from unisono.api.responses.schema import ResponsesRequest

PLAIN = (400, 401, 403, 503)
"""Error statuses of every request with a key."""
ONE = (*PLAIN, 404)
CHANGED = (*ONE, 409)
SENT = (*PLAIN, 408, 413, 415)
ADDED = (*SENT, 404, 409)
TURNED = (*ADDED, 429, 502, 504)
"""Error statuses of requests that call a model."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    `answer` names the schema of a JSON answer, None for text. `events` names the schema of each event, if the answer
    may be a stream. `failures` are statuses. `fields` are the fields of the `body` that have an effect, None for
    all.
    """

    method: str
    path: str
    name: str
    summary: str
    answer: str | None
    failures: tuple[int, ...]
    body: type[OpenModel] | None = None
    fields: frozenset[str] | None = None
    query: type[OpenModel] | None = None
    parameters: tuple[Schema, ...] = ()
    events: str | None = None
    tells: bool = False
    """The response has headers on backend and recoveries."""
    needs_key: bool = True
    leads_to: tuple[str, ...] = ()
    """Operations that accept the id in the answer."""
    unready: bool = False
    """The answer may also have status 503."""
    failure: str = "Failure"
    """Error format: `Failure`, or `MessagesFailure` for Anthropic's API."""


def _day(name: str, about: str) -> Schema:
    return {"name": name, "in": "query", "description": about, "schema": {"type": "string", "format": "date"}}


LISTED: Schema = {
    "name": "limit",
    "in": "query",
    "description": "How many at most.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 200},
}
ONCE: Schema = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same request sent twice with it is one response.",
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[ -~]+$"},
}
COUNTED = frozenset(ResponsesRequest.model_fields) - {"store", "background"}
"""Fields that affect a token count, which is never stored."""

CHAT = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        "Answer a conversation, as a whole or as events.",
        "ChatCompletion",
        TURNED,
        body=ChatRequest,
        events="ChatCompletionChunk",
        tells=True,
    ),
)

COMPLETIONS = (
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        "Continue a raw prompt, as a whole or as events; only where the operator allows it.",
        "Completion",
        TURNED,
        body=CompletionRequest,
        events="CompletionChunk",
        tells=True,
    ),
)

_ALL, _ONE = "/v1/responses", "/v1/responses/{response_id}"
RESPONSES = (
    Operation(
        "POST",
        _ALL,
        "createResponse",
        "Answer, as a whole, as events, or in the background. A WebSocket at this path does the same many times.",
        "Response",
        TURNED,
        body=ResponsesRequest,
        parameters=(ONCE,),
        events="ResponseEvent",
        tells=True,
        leads_to=("getResponse", "deleteResponse", "cancelResponse", "listInputItems"),
    ),
    Operation(
        "POST",
        f"{_ALL}/input_tokens",
        "countInputTokens",
        "Count the tokens of a prompt.",
        "InputTokens",
        TURNED,
        body=ResponsesRequest,
        fields=COUNTED,
    ),
    Operation(
        "POST",
        f"{_ALL}/compact",
        "compactResponse",
        "Make a conversation short.",
        "Compaction",
        TURNED,
        body=ResponsesRequest,
        fields=TAKEN,
        tells=True,
    ),
    Operation(
        "GET",
        _ONE,
        "getResponse",
        "Fetch a kept response, or its events.",
        "Response",
        ONE,
        query=ResponseQuery,
        events="ResponseEvent",
    ),
    Operation("DELETE", _ONE, "deleteResponse", "Delete a kept response.", "Deleted", CHANGED),
    Operation(
        "POST", f"{_ONE}/cancel", "cancelResponse", "Call off a response in the background.", "Response", CHANGED
    ),
    Operation(
        "GET",
        f"{_ONE}/input_items",
        "listInputItems",
        "List what a response was asked.",
        "ItemPage",
        ONE,
        query=PageQuery,
    ),
)
_OPEN = "InOpenResponses"
OPEN_RESPONSES = tuple(
    replace(
        each,
        path=f"/open-responses{each.path}",
        name=each.name + _OPEN,
        leads_to=tuple(name + _OPEN for name in each.leads_to),
    )
    for each in RESPONSES
)

_ALL = "/v1/messages"
MESSAGES = (
    Operation(
        "POST",
        _ALL,
        "createMessage",
        "Answer a conversation as Anthropic does, as a whole or as events.",
        "Message",
        TURNED,
        body=MessagesRequest,
        events="MessageEvent",
        tells=True,
        failure="MessagesFailure",
    ),
    Operation(
        "POST",
        f"{_ALL}/count_tokens",
        "countMessageTokens",
        "Count the tokens of a prompt.",
        "MessageTokens",
        TURNED,
        body=MessagesInput,
        failure="MessagesFailure",
    ),
)

_ALL, _ONE = "/v1/conversations", "/v1/conversations/{conversation}"
_ITEMS, _ITEM = f"{_ONE}/items", f"{_ONE}/items/{{item}}"
CONVERSATIONS = (
    Operation(
        "POST",
        _ALL,
        "createConversation",
        "Begin one.",
        "Conversation",
        ADDED,
        body=NewConversation,
        leads_to=("getConversation", "updateConversation", "deleteConversation", "addItems", "listItems"),
    ),
    Operation("GET", _ONE, "getConversation", "Fetch one.", "Conversation", ONE),
    Operation("POST", _ONE, "updateConversation", "Set its metadata.", "Conversation", ADDED, body=ChangedConversation),
    Operation("DELETE", _ONE, "deleteConversation", "Delete one.", "Deleted", CHANGED),
    Operation("POST", _ITEMS, "addItems", "Add items at its end.", "ItemPage", ADDED, body=AddedItems, query=ItemQuery),
    Operation("GET", _ITEMS, "listItems", "List its items.", "ItemPage", ONE, query=PageQuery),
    Operation("GET", _ITEM, "getItem", "Fetch an item of it.", "Item", ONE, query=ItemQuery),
    Operation("DELETE", _ITEM, "deleteItem", "Delete an item; what is shown is the rest.", "Conversation", CHANGED),
)

MODELS = (
    Operation("GET", "/v1/models", "listModels", "List those this key may use.", "ModelList", PLAIN),
    Operation("GET", "/v1/models/{model}", "getModel", "Fetch one by its name.", "Model", ONE),
    Operation("GET", "/v1/model/info", "listModelInfo", "List them as LiteLLM does.", "ModelInfo", PLAIN),
)

GATEWAY = (
    Operation(
        "GET",
        "/v1/usage",
        "getUsage",
        "What this key has used, by day and model.",
        "Usage",
        PLAIN,
        parameters=(_day("since", "First day, of UTC."), _day("until", "Last day.")),
    ),
    Operation(
        "GET", "/v1/status", "getStatus", "What the gateway is doing, as this key may see it.", "GatewayStatus", PLAIN
    ),
    Operation(
        "GET",
        "/v1/traces",
        "listTraces",
        "List the last recordings of this key's tenant.",
        "TraceList",
        PLAIN,
        parameters=(LISTED,),
    ),
    Operation("GET", "/v1/traces/{id}", "getTrace", "Fetch a recording.", "Trace", ONE),
    Operation(
        "POST",
        "/v1/inspect",
        "inspect",
        "Read a recording, text in Harmony or token ids, and say what is mended where.",
        "Inspection",
        (*SENT, 404, 429),
        body=InspectRequest,
    ),
    Operation("GET", "/metrics", "getMetrics", "Numbers for Prometheus.", None, ONE),
    Operation("GET", "/openapi.json", "getDocument", "This document.", "Document", PLAIN),
    Operation("GET", "/health/liveliness", "getLiveliness", "Whether it lives.", "Alive", (400,), needs_key=False),
    Operation("GET", "/health/liveness", "getLiveness", "Whether it lives.", "Alive", (400,), needs_key=False),
    Operation(
        "GET",
        "/health/readiness",
        "getReadiness",
        "Whether a model can answer.",
        "Readiness",
        (400,),
        needs_key=False,
        unready=True,
    ),
)

OPERATIONS: Mapping[str, tuple[Operation, ...]] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "conversations": CONVERSATIONS,
    "open responses": OPEN_RESPONSES,
    "messages": MESSAGES,
    "models": MODELS,
    "gateway": GATEWAY,
}
