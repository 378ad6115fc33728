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
from unisono.api.responses.compaction import EFFECTIVE_FIELDS
from unisono.api.responses.conversations.schema import AddedItems, ChangedConversation, NewConversation
from unisono.api.responses.idempotency import MAX_KEY_LENGTH
from unisono.api.responses.queries import ItemQuery, PageQuery, ResponseQuery
from unisono.api.responses.schema import ResponsesRequest

# Error statuses of every request with a key.
PLAIN = (400, 401, 403, 503)
ONE = (*PLAIN, 404)
CHANGED = (*ONE, 409)
SENT = (*PLAIN, 408, 413, 415)
ADDED = (*SENT, 404, 409)
# Error statuses of requests that call a model.
TURNED = (*ADDED, 429, 502, 504)


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
    # The response has headers on backend and recoveries.
    has_answer_headers: bool = False
    needs_key: bool = True
    # Operations that accept the id in the answer.
    leads_to: tuple[str, ...] = ()
    # The answer may also have status 503.
    unready: bool = False
    # Error format: `Failure`, or `MessagesFailure` for Anthropic's API.
    failure: str = "Failure"


def _day(name: str, about: str) -> Schema:
    return {"name": name, "in": "query", "description": about, "schema": {"type": "string", "format": "date"}}


LISTED: Schema = {
    "name": "limit",
    "in": "query",
    "description": "Maximum number of recordings.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 200},
}
ONCE: Schema = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Key of the request; repeating the request with the same key returns the same response.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH, "pattern": "^[ -~]+$"},
}
# Fields that affect a token count, which is never stored.
COUNTED = frozenset(ResponsesRequest.model_fields) - {"store", "background"}

CHAT = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        "Create a chat completion, complete or as a stream of events.",
        "ChatCompletion",
        TURNED,
        body=ChatRequest,
        events="ChatCompletionChunk",
        has_answer_headers=True,
    ),
)

COMPLETIONS = (
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        "Complete a raw prompt, complete or as a stream of events; must be enabled by the operator.",
        "Completion",
        TURNED,
        body=CompletionRequest,
        events="CompletionChunk",
        has_answer_headers=True,
    ),
)

_ALL, _ONE = "/v1/responses", "/v1/responses/{response_id}"
RESPONSES = (
    Operation(
        "POST",
        _ALL,
        "createResponse",
        "Create a response, complete, as a stream of events, or in the background. Also available as a WebSocket.",
        "Response",
        TURNED,
        body=ResponsesRequest,
        parameters=(ONCE,),
        events="ResponseEvent",
        has_answer_headers=True,
        leads_to=("getResponse", "deleteResponse", "cancelResponse", "listInputItems"),
    ),
    Operation(
        "POST",
        f"{_ALL}/input_tokens",
        "countInputTokens",
        "Count the input tokens of a request.",
        "InputTokens",
        TURNED,
        body=ResponsesRequest,
        fields=COUNTED,
    ),
    Operation(
        "POST",
        f"{_ALL}/compact",
        "compactResponse",
        "Compact a conversation.",
        "Compaction",
        TURNED,
        body=ResponsesRequest,
        fields=EFFECTIVE_FIELDS,
        has_answer_headers=True,
    ),
    Operation(
        "GET",
        _ONE,
        "getResponse",
        "Retrieve a stored response or its events.",
        "Response",
        ONE,
        query=ResponseQuery,
        events="ResponseEvent",
    ),
    Operation("DELETE", _ONE, "deleteResponse", "Delete a stored response.", "Deleted", CHANGED),
    Operation("POST", f"{_ONE}/cancel", "cancelResponse", "Cancel a background response.", "Response", CHANGED),
    Operation(
        "GET",
        f"{_ONE}/input_items",
        "listInputItems",
        "List the input items of a response.",
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
        "Create a message in Anthropic's format, complete or as a stream of events.",
        "Message",
        TURNED,
        body=MessagesRequest,
        events="MessageEvent",
        has_answer_headers=True,
        failure="MessagesFailure",
    ),
    Operation(
        "POST",
        f"{_ALL}/count_tokens",
        "countMessageTokens",
        "Count the input tokens of a request.",
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
        "Create a conversation.",
        "Conversation",
        ADDED,
        body=NewConversation,
        leads_to=("getConversation", "updateConversation", "deleteConversation", "addItems", "listItems"),
    ),
    Operation("GET", _ONE, "getConversation", "Retrieve a conversation.", "Conversation", ONE),
    Operation(
        "POST",
        _ONE,
        "updateConversation",
        "Replace the metadata of a conversation.",
        "Conversation",
        ADDED,
        body=ChangedConversation,
    ),
    Operation("DELETE", _ONE, "deleteConversation", "Delete a conversation.", "Deleted", CHANGED),
    Operation(
        "POST",
        _ITEMS,
        "addItems",
        "Append items to a conversation.",
        "ItemPage",
        ADDED,
        body=AddedItems,
        query=ItemQuery,
    ),
    Operation("GET", _ITEMS, "listItems", "List the items of a conversation.", "ItemPage", ONE, query=PageQuery),
    Operation("GET", _ITEM, "getItem", "Retrieve an item of a conversation.", "Item", ONE, query=ItemQuery),
    Operation("DELETE", _ITEM, "deleteItem", "Delete an item and return the conversation.", "Conversation", CHANGED),
)

MODELS = (
    Operation("GET", "/v1/models", "listModels", "List the models that the key may use.", "ModelList", PLAIN),
    Operation("GET", "/v1/models/{model}", "getModel", "Retrieve a model by its name.", "Model", ONE),
    Operation("GET", "/v1/model/info", "listModelInfo", "List the models in LiteLLM's format.", "ModelInfo", PLAIN),
)

GATEWAY = (
    Operation(
        "GET",
        "/v1/usage",
        "getUsage",
        "Return the usage of the key by day and model.",
        "Usage",
        PLAIN,
        parameters=(_day("since", "First day (UTC)."), _day("until", "Last day (UTC), inclusive.")),
    ),
    Operation(
        "GET",
        "/v1/status",
        "getStatus",
        "Return the status of the gateway, limited to data that the key may see.",
        "GatewayStatus",
        PLAIN,
    ),
    Operation(
        "GET",
        "/v1/traces",
        "listTraces",
        "List the latest recordings of the key's tenant.",
        "TraceList",
        PLAIN,
        parameters=(LISTED,),
    ),
    Operation("GET", "/v1/traces/{id}", "getTrace", "Retrieve a recording.", "Trace", ONE),
    Operation(
        "POST",
        "/v1/inspect",
        "inspect",
        "Parse a recording, Harmony text or token ids, and return the output with its recoveries.",
        "Inspection",
        (*SENT, 404, 429),
        body=InspectRequest,
    ),
    Operation("GET", "/metrics", "getMetrics", "Return metrics in Prometheus format.", None, ONE),
    Operation("GET", "/openapi.json", "getDocument", "Return this document.", "Document", PLAIN),
    Operation(
        "GET",
        "/health/liveliness",
        "getLiveliness",
        "Check that the gateway is running.",
        "Alive",
        (400,),
        needs_key=False,
    ),
    Operation(
        "GET", "/health/liveness", "getLiveness", "Check that the gateway is running.", "Alive", (400,), needs_key=False
    ),
    Operation(
        "GET",
        "/health/readiness",
        "getReadiness",
        "Check that at least one model can answer.",
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
