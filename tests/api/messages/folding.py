"""What an Anthropic client makes of a stream: the events folded back into the message they stand for."""

from __future__ import annotations

from typing import Any

import orjson


def named_events(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of every event but pings; each stands under its own name."""
    found: list[dict[str, Any]] = []
    assert stream.endswith(b"\n\n")
    for block in stream.split(b"\n\n")[:-1]:
        name, _, data = block.partition(b"\ndata: ")
        event = orjson.loads(data)
        assert name == b"event: " + event["type"].encode()
        if event["type"] != "ping":
            found.append(event)
    return found


def fold(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message, as a whole answer has it. Blocks are opened and stopped one after the other."""
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
    return {**message, **last["delta"], "usage": last["usage"], "unisono": last["unisono"]}


def _add(block: dict[str, Any], delta: dict[str, Any]) -> str:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case "input_json_delta":
            return str(delta["partial_json"])
        case other:
            raise AssertionError(other)
    return ""
