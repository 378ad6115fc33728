"""Rebuild an Anthropic message from its stream events, as a client does."""

from __future__ import annotations

from typing import Any

import orjson


def named_events(stream: bytes) -> list[dict[str, Any]]:
    """Parse all events except pings, and check that each event name matches its type."""
    events: list[dict[str, Any]] = []
    assert stream.endswith(b"\n\n")
    for block in stream.split(b"\n\n")[:-1]:
        name, _, data = block.partition(b"\ndata: ")
        event = orjson.loads(data)
        assert name == b"event: " + event["type"].encode()
        if event["type"] != "ping":
            events.append(event)
    return events


def fold(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Rebuild the message of a non-streaming response, and check that blocks do not overlap."""
    first, *rest, last, end = events
    assert first["type"] == "message_start"
    assert (last["type"], end) == ("message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    content: list[dict[str, Any]] = message["content"]
    assert content == []
    opened, arguments = False, ""
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not opened
                assert event["index"] == len(content)
                opened, arguments = True, ""
                content.append(event["content_block"])
            case "content_block_delta":
                assert opened
                assert event["index"] == len(content) - 1
                arguments += _add(content[-1], event["delta"])
            case "content_block_stop":
                assert opened
                assert event["index"] == len(content) - 1
                opened = False
                if arguments:
                    content[-1]["input"] = orjson.loads(arguments)
            case other:
                raise AssertionError(other)
    assert not opened
    ending = {name: last[name] for name in ("usage", "context_management", "unisono") if name in last}
    return {**message, **last["delta"], **ending}


def _add(block: dict[str, Any], delta: dict[str, Any]) -> str:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case "compaction_delta":
            assert (block["type"], block["content"], block["encrypted_content"]) == ("compaction", None, None)
            assert delta.keys() == {"type", "content", "encrypted_content"}
            block |= {**delta, "type": "compaction"}
        case "input_json_delta":
            return str(delta["partial_json"])
        case other:
            raise AssertionError(other)
    return ""
