"""Approvals and questions of tools that are answered after a compaction of the conversation."""

from __future__ import annotations

import pytest

from tests.e2e.hosting import calls, desk, made, result
from tests.e2e.responses import ANSWER, Json, Line, kinds, text_of
from tests.e2e.test_guarded_server_tools import answered
from tests.mcp.conftest import Upstream

TRIGGER = {"type": "compaction_trigger"}
USER = {"role": "user", "content": "Go"}
SUMMARY = "<|channel|>final<|message|>Summary.<|return|>"
# A tool with its argument, the rule for its approval, and the type of the item that waits for the user.
TOOLS = {
    "approval": ("echo", "text", "always", "mcp_approval_request"),
    "question": ("book", "city", "never", "mcp_elicitation_request"),
}


async def compacted(harness: Line, first: Json, way: str, fields: Json) -> tuple[Json, list[Json]]:
    """Compact a conversation; return the fields of the request that continues it, and its first input items."""
    harness.say(SUMMARY)
    if way == "compact":
        answer = await harness.post("/compact", previous_response_id=first["id"])
        return {}, answer.body["output"]
    if way == "sent":
        second = await harness.whole(store=False, input=[USER, *first["output"], TRIGGER])
        return {"store": False}, second["output"]
    fields = fields or {"previous_response_id": first["id"]}
    second = await harness.whole(input=[TRIGGER], **fields)
    return (fields if way == "conversation" else {"previous_response_id": second["id"]}), []


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kind", TOOLS)
@pytest.mark.parametrize("way", ["stored", "conversation", "sent", "compact"])
async def test_the_call_runs_after_the_compaction(upstream: Upstream, way: str, kind: str) -> None:
    tool, argument, approval, waits = TOOLS[kind]
    text = f"compacted {way}"
    async with desk(upstream, entry={"require_approval": approval}) as harness:
        fields = {"conversation": await harness.conversation()} if way == "conversation" else {}
        harness.say(calls(tool, **{argument: text}))
        first = await harness.whole(input=[USER], store=way != "sent", **fields)
        [request] = made(first, waits)
        fields, items = await compacted(harness, first, way, fields)
        # The model does not read that the user has decided.
        assert "did not" not in harness.said
        items += [request] if items else []
        harness.say(ANSWER)
        last = await harness.whole(input=[*items, answered(request)], **fields)
        [call], written = made(last), f'{{"{argument}":"{text}"}}'
        assert text in upstream.noted(text)[-1]
        assert harness.said.endswith(f"{written}<|call|>{result(tool, call['output'])}")
        # A question repeats the call, and the model reads both calls.
        assert harness.said.count(f"{written}<|call|>") == (1 if kind == "approval" else 2)


async def test_a_message_after_the_compaction_gives_up_the_call(upstream: Upstream) -> None:
    async with desk(upstream, entry={"require_approval": "always"}) as harness:
        harness.say(calls("echo", text="given up"))
        first = await harness.whole(input=[USER])
        harness.say(SUMMARY)
        second = await harness.whole(previous_response_id=first["id"], input=[TRIGGER])
        assert kinds(second["output"]) == ["compaction"]
        harness.say(ANSWER)
        third = await harness.whole(previous_response_id=second["id"], input="Never mind")
        assert text_of(third)
        assert result("echo", "The user did not approve this call.") in harness.said
