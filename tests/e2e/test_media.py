"""Images and other media in a conversation, and built-in tools of the client, on every API surface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, gateway
from tests.e2e.responses import ANSWER, Line, line
from tests.e2e.surfaces import unisono_object
from tests.e2e.wires import WIRES

Json = dict[str, Any]
DATA = "iVBORw0KGgo="
LINE = "[Image removed here: this model reads text only.]"
RULE = "media-left-out"
NOT_SUPPORTED = "does not support image input"


def user(*content: Any) -> Json:
    return {"role": "user", "content": list(content)}


URL = f"data:image/png;base64,{DATA}"
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
INPUT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"}
TEXT = {"type": "text", "text": "See."}
ANSWERED = {"role": "assistant", "content": "ok"}
CHAT_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "view", "arguments": "{}"}}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "view", "input": {}}]}


def result(*content: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": "c1", "content": list(content)}


def served(kind: str, content: Any) -> Json:
    """Return the message with a call of another server's tool, and its result."""
    use = {"type": "server_tool_use", "id": "s1", "name": "view", "input": {}}
    return {"role": "assistant", "content": [use, {"type": kind, "tool_use_id": "s1", "content": content}, TEXT]}


def fetched(document: Json) -> Json:
    return served("web_fetch_tool_result", {"type": "web_fetch_result", "url": "http://a.example", "content": document})


# Surface, history, and the position of the removed part.
HISTORIES: dict[str, tuple[str, list[Any], str]] = {
    "chat: an earlier message": ("chat", [user(TEXT, CHAT_IMAGE), ANSWERED, user(TEXT)], "messages.0.content.1"),
    "chat: a tool result": (
        "chat",
        [user(TEXT), CHAT_CALL, {"role": "tool", "tool_call_id": "c1", "content": [CHAT_IMAGE]}],
        "messages.2.content.0",
    ),
    "chat: a tool result in a message of the user": (
        "chat",
        [
            user(TEXT),
            CHAT_CALL,
            {"role": "tool", "tool_call_id": "c1", "content": "See below."},
            user(TEXT, CHAT_IMAGE),
        ],
        "messages.3.content.1",
    ),
    "messages: an earlier message": ("messages", [user(IMAGE, TEXT), ANSWERED, user(TEXT)], "messages.0.content.0"),
    "messages: a refused message merged with the next one": (
        "messages",
        [user(TEXT, IMAGE, TEXT)],
        "messages.0.content.1",
    ),
    "messages: a tool result": (
        "messages",
        [user(TEXT), USE, user(result(TEXT, IMAGE))],
        "messages.2.content.0.content.1",
    ),
    "messages: a tool result beside text": (
        "messages",
        [user(TEXT), USE, user(result(IMAGE), TEXT)],
        "messages.2.content.0.content.0",
    ),
    "messages: an image in a document": (
        "messages",
        [user({"type": "document", "source": {"type": "content", "content": [IMAGE]}}), ANSWERED, user(TEXT)],
        "messages.0.content.0.source.content.0",
    ),
    "messages: the result of a server": (
        "messages",
        [user(TEXT), served("mcp_tool_result", [TEXT, IMAGE]), user(TEXT)],
        "messages.1.content.1.content.1",
    ),
    "messages: a fetched document": (
        "messages",
        [user(TEXT), fetched({"type": "document", "source": {"type": "content", "content": [IMAGE]}}), user(TEXT)],
        "messages.1.content.1.content.content.source.content.0",
    ),
    "messages: a search result": (
        "messages",
        [user({"type": "search_result", "source": "s", "title": "t", "content": [TEXT, IMAGE]}), ANSWERED, user(TEXT)],
        "messages.0.content.0.content.1",
    ),
    "responses: an output of code": (
        "responses",
        [
            "See.",
            {"type": "code_interpreter_call", "id": "ci_1", "code": "c", "outputs": [{"type": "image", "url": URL}]},
            "Go on.",
        ],
        "input.1.outputs.0",
    ),
    "responses: an earlier message": (
        "responses",
        [user(INPUT_IMAGE), ANSWERED, user({"type": "input_text", "text": "Go on."})],
        "input.0.content.0",
    ),
    "responses: a tool result": (
        "responses",
        ["See.", CALL, {"type": "function_call_output", "call_id": "c1", "output": [INPUT_IMAGE]}],
        "input.2.output.0",
    ),
    "responses: the result of a custom tool": (
        "responses",
        [
            "See.",
            {"type": "custom_tool_call", "call_id": "c1", "name": "view", "input": "a"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": [INPUT_IMAGE]},
        ],
        "input.2.output.0",
    ),
}
FILES = {
    "pdf": {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": DATA}},
    "file by its id": {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
}

# Surface, newest message, and the field that its error names.
NEWEST: dict[str, tuple[str, list[Any], str]] = {
    "chat": ("chat", [user(TEXT, CHAT_IMAGE)], "messages.0.content.1.type"),
    "chat, before a call": ("chat", [user(CHAT_IMAGE), CHAT_CALL], "messages.0.content.0.type"),
    "messages": ("messages", [user(IMAGE)], "messages.0.content.0.type"),
    "messages, after texts": ("messages", [user(TEXT, TEXT, IMAGE)], "messages.0.content.2.type"),
    "messages, before a text": ("messages", [user(IMAGE, TEXT)], "messages.0.content.0.type"),
    "messages, beside a result": (
        "messages",
        [user(TEXT), USE, user(result(TEXT), IMAGE)],
        "messages.2.content.1.type",
    ),
    "responses": ("responses", [user(INPUT_IMAGE)], "input.0.content.0.type"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Line]:
    async with line(WIRES["vllm"]) as running:
        yield running


async def send(harness: Line, surface: str, history: list[Any], *, stream: bool = False) -> Answer:
    harness.say(ANSWER)
    items = [user({"type": "text", "text": item}) if isinstance(item, str) else item for item in history]
    if surface == "responses":
        return await harness.post(input=items, stream=stream)
    fields: Json = {"model": "gpt-oss", "messages": items, "stream": stream}
    if surface == "chat":
        return await harness.gateway.chat(**fields)
    return await harness.gateway.messages(**fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("surface", "history", "place"), HISTORIES.values(), ids=HISTORIES)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_image_in_the_history_becomes_a_line_of_text(
    harness: Line, surface: str, history: list[Any], place: str, stream: bool
) -> None:
    answer = await send(harness, surface, history, stream=stream)
    about = unisono_object(answer)
    assert harness.prompts[-1].count(LINE) == 1
    assert DATA not in harness.prompts[-1]
    assert about["recoveries"] == [RULE]
    assert [note for note in about["notes"] if note.startswith(f"{place}: replaced by a line of text")]
    if not stream:
        assert answer.headers["x-unisono-recoveries"] == RULE


@pytest.mark.parametrize("block", FILES.values(), ids=FILES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_in_a_tool_result_becomes_a_line_of_text(harness: Line, block: Json) -> None:
    answer = await send(harness, "messages", [user(TEXT), USE, user(result(block))])
    assert unisono_object(answer)["recoveries"] == [RULE]
    assert "[File removed here" in harness.prompts[-1]


@pytest.mark.parametrize("block", FILES.values(), ids=FILES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_fetched_file_becomes_a_line_of_text(harness: Line, block: Json) -> None:
    about = unisono_object(await send(harness, "messages", [user(TEXT), fetched(block), user(TEXT)]))
    assert about["recoveries"] == [RULE]
    assert [note for note in about["notes"] if note.startswith("messages.1.content.1.content.content: replaced")]
    assert "[File removed here" in harness.prompts[-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_image_in_the_instructions_becomes_a_line_of_text(harness: Line) -> None:
    harness.say(ANSWER)
    answer = await harness.gateway.messages(system=[TEXT, IMAGE], messages=[user(TEXT)])
    about = unisono_object(answer)
    assert about["recoveries"] == [RULE]
    assert [note for note in about["notes"] if note.startswith("system.1: replaced by a line of text")]
    assert harness.prompts[-1].count(LINE) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_an_image_in_a_new_search_result_is_refused(harness: Line) -> None:
    block = {"type": "search_result", "source": "s", "title": "t", "content": [IMAGE]}
    answer = await send(harness, "messages", [user(block)])
    assert answer.status == 400
    assert "messages.0.content.0.content.0.type" in answer.raw.decode()


@pytest.mark.parametrize(("surface", "history", "param"), NEWEST.values(), ids=NEWEST)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_image_in_the_newest_message_is_refused_and_the_session_continues(
    harness: Line, surface: str, history: list[Any], param: str
) -> None:
    refused = await send(harness, surface, history)
    assert refused.status == 400
    assert NOT_SUPPORTED in refused.raw.decode()
    assert param in refused.raw.decode()
    resent = [*history, *([{"role": "tool", "tool_call_id": "c1", "content": "a"}] if CHAT_CALL in history else [])]
    continued = await send(harness, surface, [*resent, user(TEXT)])
    assert unisono_object(continued)["recoveries"] == [RULE]
    assert harness.prompts[-1].count(LINE) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stored_response_continues_after_an_image(harness: Line) -> None:
    first = await send(harness, "responses", HISTORIES["responses: a tool result"][1])
    second = await harness.post(input="Go on.", previous_response_id=first.body["id"])
    assert second.status == 200
    assert harness.prompts[-1].count(LINE) == 1
    assert unisono_object(second)["recoveries"] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_conversation_keeps_a_line_of_text_for_an_image(harness: Line) -> None:
    items = [
        {"role": "user", "content": [INPUT_IMAGE]},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": [INPUT_IMAGE]},
    ]
    created = await harness.made("/conversations", items=items)
    added = await harness.made(f"/conversations/{created.body['id']}/items", items=items[:1])
    for answer, places in ((created, ("items.0.content.0", "items.2.output.0")), (added, ("items.0.content.0",))):
        assert answer.body["unisono"]["recoveries"] == [RULE]
        notes = answer.body["unisono"]["notes"]
        assert [note.partition(": replaced")[0] for note in notes] == list(places)
    harness.say(ANSWER)
    assert (await harness.whole(input="Go on.", conversation=created.body["id"]))["unisono"]["recoveries"] == []
    assert harness.prompts[-1].count(LINE) == 3


async def test_a_model_may_strip_media_from_the_newest_message_too() -> None:
    async with WIRES["vllm"].fake() as fake:
        entry = {
            "model_name": "gpt-oss",
            "litellm_params": {"model": "vllm/tiny", "api_base": fake.url},
            "unisono": {"media": "strip"},
        }
        async with gateway({"model_list": [entry]}) as running:
            harness = Line(WIRES["vllm"], fake, running)
            for surface, history, _ in NEWEST.values():
                if CHAT_CALL in history:
                    continue
                answer = await send(harness, surface, history)
                assert unisono_object(answer)["recoveries"] == [RULE]
                assert harness.prompts[-1].count(LINE) == 1


# Items of built-in tools that the client runs, and the text that the model reads.
CLIENT_TOOLS: dict[str, tuple[list[Json], str, str]] = {
    "shell": (
        [
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}, "status": "completed"},
            {
                "type": "shell_call_output",
                "call_id": "c1",
                "output": [{"stdout": "a.py", "stderr": "oh", "outcome": {"type": "exit", "exit_code": 2}}],
            },
        ],
        '{"commands":["ls"]}',
        "a.py\noh\nexit code 2",
    ),
    "local_shell": (
        [
            {
                "type": "local_shell_call",
                "id": "lsh_1",
                "call_id": "c1",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            },
            {"type": "local_shell_call_output", "id": "c1", "output": "a.py"},
        ],
        '"command":["ls"]',
        "a.py",
    ),
    "apply_patch": (
        [
            {
                "type": "apply_patch_call",
                "call_id": "c1",
                "status": "completed",
                "operation": {"type": "create_file", "path": "a.py", "diff": "+1"},
            },
            {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed", "output": "no such folder"},
        ],
        '"path":"a.py"',
        "failed: no such folder",
    ),
}


@pytest.mark.parametrize(("items", "arguments", "output"), CLIENT_TOOLS.values(), ids=CLIENT_TOOLS)
@pytest.mark.asyncio(loop_scope="module")
async def test_calls_of_the_clients_built_in_tools_are_shown_to_the_model(
    harness: Line, items: list[Json], arguments: str, output: str
) -> None:
    answer = await send(harness, "responses", ["See.", *items, user({"type": "input_text", "text": "Go on."})])
    assert answer.status == 200, answer.raw
    assert arguments in harness.prompts[-1]
    assert f"<|message|>{output}<|end|>" in harness.prompts[-1]


@pytest.mark.parametrize(("items", "arguments", "output"), CLIENT_TOOLS.values(), ids=CLIENT_TOOLS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_result_of_such_a_tool_is_shown_without_its_call(
    harness: Line, items: list[Json], arguments: str, output: str
) -> None:
    answer = await send(harness, "responses", ["See.", items[1]])
    assert [
        note
        for note in unisono_object(answer)["notes"]
        if note.startswith("input.1.") and "the model reads this" in note
    ]
    assert arguments not in harness.prompts[-1]
    assert f"<|message|>{output}<|end|>" in harness.prompts[-1]
