"""Custom tools: the content of a call is the text itself, and may have to match a grammar."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, THOUGHT, Desk, Json, answers, calls, desk
from tests.e2e.responses import streamed
from tests.schemas.test_grammars import APPLY_PATCH, PATCH
from unisono.schemas.grammars import MISMATCH

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME = "apply_patch"
USER = {"role": "user", "content": "Hi"}
RAW = f"{THOUGHT}<|channel|>commentary to=functions.{NAME}<|message|>{PATCH}<|call|>"
# Output of the model, and the recoveries.
OUTPUTS: Mapping[str, tuple[str, list[str]]] = {
    "the text": (RAW, []),
    "the text, as JSON": (calls(NAME, PATCH), []),
    "an object with the input": (calls(NAME, json.dumps({"input": PATCH})), ["wrapped-input"]),
    "an object with the patch": (calls(NAME, json.dumps({"patch": PATCH})), ["wrapped-input"]),
}
LARK = {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH}
# Like the grammar of Codex's `exec`.
ANY_TEXT = {"type": "grammar", "syntax": "lark", "definition": "start: TEXT\nTEXT: /(.|\\n)+/"}
DATE = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}-[0-9]{2}"}


@dataclass(frozen=True)
class Reply:
    """Input of the only call, the `unisono` object, and the history for the next request."""

    text: str
    about: Json
    history: Json


async def responses(harness: Desk, *, stream: bool, form: Json | None = None, **fields: Any) -> Reply:
    tool = {"type": "custom", "name": NAME, "description": "Edit files.", **({"format": form} if form else {})}
    body = {"model": "gpt-oss", "input": [USER], "tools": [tool], "stream": stream, **fields}
    answer = await harness.gateway.post("/v1/responses", json.dumps(body).encode())
    response = streamed(answer).last if stream else answer.body
    [call] = [item for item in response["output"] if item["type"] == "custom_tool_call"] or [
        {"input": "", "call_id": ""}
    ]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "fine"}
    return Reply(call["input"], response["unisono"], {"input": [USER, *response["output"], result]})


async def chat(harness: Desk, *, stream: bool, form: Json | None = None, **fields: Any) -> Reply:
    nested = {"type": "grammar", "grammar": {key: form[key] for key in ("syntax", "definition")}} if form else None
    custom = {"name": NAME, "description": "Edit files.", **({"format": nested} if nested else {})}
    tools = [{"type": "custom", "custom": custom}]
    answer = await harness.gateway.chat(stream=stream, **{"tools": tools, "messages": [USER], **fields})
    assert answer.status == 200, answer.raw
    if stream:
        deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
        parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
        call_id = "".join(part.get("id", "") for part in parts)
        text = "".join(part["custom"]["input"] for part in parts)
        [about] = [event["unisono"] for event in answer.events if "unisono" in event]
    else:
        [call] = answer.body["choices"][0]["message"].get("tool_calls") or [{"id": "", "custom": {"input": ""}}]
        call_id, text, about = call["id"], call["custom"]["input"], answer.body["unisono"]
    made = {"id": call_id, "type": "custom", "custom": {"name": NAME, "input": text}}
    said = {"role": "assistant", "content": None, "tool_calls": [made]}
    return Reply(
        text, dict(about), {"messages": [USER, said, {"role": "tool", "tool_call_id": call_id, "content": "fine"}]}
    )


Ask = Callable[..., Awaitable[Reply]]
on_both = pytest.mark.parametrize("ask", [responses, chat], ids=["responses", "chat"])
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "vllm, unguided", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


@pytest.mark.sampled(one_in=3)
@both_forms
@on_both
@pytest.mark.parametrize(("output", "rules"), OUTPUTS.values(), ids=OUTPUTS)
async def test_the_client_gets_the_text_however_the_model_writes_it(
    harness: Desk, ask: Ask, output: str, rules: list[str], stream: bool
) -> None:
    model = harness.think(output, answers("Done."))
    reply = await ask(harness, stream=stream)
    assert f"type {NAME} = (_: string) => any;" in model.asked[0].prompt
    assert reply.text == PATCH
    assert [rule for rule in reply.about["recoveries"] if rule != "restored-stop"] == rules
    assert "notes" not in reply.about
    # The next prompt contains the call as the model wrote it.
    await ask(harness, stream=stream, **reply.history)
    written = output.removeprefix(THOUGHT)
    assert model.asked[-1].prompt.startswith(model.asked[0].prompt)
    assert written in model.asked[-1].prompt


@on_both
async def test_a_json_document_as_text_is_not_unwrapped(harness: Desk, ask: Ask) -> None:
    document = json.dumps({"input": PATCH, "priority": 3})
    harness.think(calls(NAME, document), answers("Done."))
    reply = await ask(harness, stream=False)
    assert reply.text == document
    assert "wrapped-input" not in reply.about.get("recoveries", [])


@both_forms
@on_both
async def test_a_call_of_another_server_is_read_as_text(harness: Desk, ask: Ask, stream: bool) -> None:
    model = harness.think(answers("Done."))
    made = {"id": "call_9", "type": "custom", "custom": {"name": NAME, "input": PATCH}}
    in_chat: Json = {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "call_9", "content": "fine"},
        ],
        "tools": [{"type": "custom", "custom": {"name": NAME}}],
        "tool_choice": "auto",
    }
    item = {"type": "custom_tool_call", "call_id": "call_9", "name": NAME, "input": PATCH}
    result = {"type": "custom_tool_call_output", "call_id": "call_9", "output": "fine"}
    if ask is chat:
        answer = await harness.gateway.chat(stream=stream, **in_chat)
        assert answer.status == 200, answer.raw
    else:
        await ask(harness, stream=stream, input=[USER, item, result])
    call = f"<|start|>assistant to=functions.{NAME}<|channel|>commentary<|message|>{PATCH}<|call|>"
    assert call in model.asked[0].prompt


@both_forms
@on_both
async def test_a_text_that_breaks_a_regex_is_written_again(harness: Desk, ask: Ask, stream: bool) -> None:
    wrong = calls(NAME, "tomorrow")
    right = calls(NAME, "2026-11")
    guided = harness.kind.guided
    model = harness.think(wrong, *([] if guided else [right]), bodies=["2026-11"])
    reply = await ask(harness, stream=stream, form=DATE)
    assert reply.text == "2026-11"
    assert "unmet" not in reply.about
    held = [asked.held.regex for asked in model.asked if asked.held is not None]
    assert held == ([DATE["definition"]] if guided else [])
    assert ("regenerated-call" in reply.about["recoveries"]) == (not guided)


@both_forms
@on_both
async def test_a_text_that_never_matches_is_handed_over_with_a_note(harness: Desk, ask: Ask, stream: bool) -> None:
    harness.think(calls(NAME, "tomorrow"), bodies=["tomorrow"])
    reply = await ask(harness, stream=stream, form=DATE)
    assert reply.text == "tomorrow"
    assert reply.about["unmet"] == "The arguments of a call do not match the tool's schema."


@pytest.mark.sampled(one_in=3)
@both_forms
@on_both
@pytest.mark.parametrize("wrong", ["*** Begin Patch\n*** End Patch", "ls"])
async def test_a_patch_of_codex_is_checked(harness: Desk, ask: Ask, wrong: str, stream: bool) -> None:
    harness.think(calls(NAME, wrong), RAW, bodies=[wrong, PATCH, PATCH])
    reply = await ask(harness, stream=stream, form=LARK)
    assert reply.text == PATCH
    assert "regenerated-call" in reply.about["recoveries"]
    # vLLM's default engine cannot read this grammar, although it reads others.
    notes = [
        "The backend failed on the constraint (lark). The output was generated without this constraint and "
        "validated afterwards."
    ]
    assert reply.about.get("notes", []) in ([], notes)


@pytest.mark.sampled(one_in=3)
@both_forms
@on_both
@pytest.mark.parametrize("wrapper", ["input", "patch"])
async def test_json_around_a_text_is_removed_although_the_grammar_allows_it(
    harness: Desk, ask: Ask, wrapper: str, stream: bool
) -> None:
    wrapped = json.dumps({wrapper: PATCH})
    harness.think(calls(NAME, wrapped), bodies=[wrapped])
    reply = await ask(harness, stream=stream, form=ANY_TEXT)
    assert reply.text == PATCH
    assert "wrapped-input" in reply.about["recoveries"]


async def test_a_grammar_that_cannot_be_enforced_is_noted(harness: Desk) -> None:
    model = harness.think(RAW)
    reply = await responses(harness, stream=False, form={**LARK, "definition": "start: other"})
    assert reply.text == PATCH
    [note] = reply.about["notes"]
    assert note.startswith("tools.0.format: shown to the model, but not enforced: ")
    assert "start: other" in model.asked[0].prompt


@both_forms
async def test_a_forced_call_is_opened_without_a_content_type(harness: Desk, stream: bool) -> None:
    model = harness.think(answers("No."), bodies=[PATCH])
    reply = await responses(harness, stream=stream, tool_choice={"type": "custom", "name": NAME})
    assert reply.text == PATCH
    assert model.asked[-1].behind == f"<|channel|>commentary to=functions.{NAME}<|message|>"
    assert MISMATCH not in str(reply.about)
