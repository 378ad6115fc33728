"""Items, responses and conversations of every form, for the contract tests of stores."""

from __future__ import annotations

from itertools import count

from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    FunctionTool,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.core.generation import Usage
from unisono.core.state_store import Status, StoredConversation, StoredItem, StoredResponse

_NUMBERS = count()

NOW = 1_790_000_000.5


def fresh(kind: str) -> str:
    return f"{kind}_{next(_NUMBERS):04d}"


def said(text: str, id: str = "") -> StoredItem:
    return StoredItem(id or fresh("msg"), (UserMessage(text),), {"type": "message", "role": "user"})


def answered(text: str, id: str = "") -> StoredItem:
    message = AssistantMessage(text, Phase.FINAL, (200006, 173781, 200005, 17196, 200008, *map(ord, text), 200007))
    return StoredItem(id or fresh("msg"), (message,), {"type": "message", "role": "assistant", "content": [text]})


EVERY_ITEM = (
    said("Grüße, 世界 🌍 <|end|> \x00 \n"),
    StoredItem(fresh("msg"), (DeveloperMessage("be brief"),)),
    StoredItem(fresh("rs"), (AssistantReasoning("hm", (1, 2, 201087)),), {"summary": []}),
    StoredItem(fresh("msg"), (AssistantMessage("so", Phase.COMMENTARY, ()),)),
    answered("done"),
    StoredItem(
        fresh("mcp"),
        (AssistantCall("call_1", "docs.search", '{"q": 1', (5, 6)), ToolResult("call_1", "docs.search", "")),
        {"type": "mcp_call", "deep": {"list": [1, 2.5, None, True, {"a": "b"}]}},
    ),
    StoredItem(fresh("ws"), (), {"type": "web_search_call"}),
    StoredItem(
        fresh("at"),
        (AddedTools((FunctionTool("a__f", "F.", {"type": "object"}, namespace="a"), FunctionTool("g"))),),
    ),
)


def response(id: str = "", status: Status = Status.IN_PROGRESS, **changes: object) -> StoredResponse:
    fields: dict[str, object] = {
        "id": id or fresh("resp"),
        "status": status,
        "model": "gpt-oss-120b",
        "created_at": NOW,
        "first_day": "2026-11-20",
        "request": {"temperature": 0.5, "tools": [], "metadata": {"a": "b"}},
        "input": (said("hello"),),
    }
    return StoredResponse(**{**fields, **changes})  # type: ignore[arg-type]


def full_response() -> StoredResponse:
    return response(
        status=Status.FAILED,
        input=EVERY_ITEM[:3],
        output=EVERY_ITEM[3:],
        usage=Usage(10, 20, 5, 3),
        error={"code": "server_error", "message": "…"},
        notes={"incomplete_details": None, "recoveries": ["missing-end"]},
        ancestors=("resp_a", "resp_b"),
    )


def conversation(id: str = "") -> StoredConversation:
    return StoredConversation(id or fresh("conv"), NOW, "2026-11-20", {"topic": "tea"})
