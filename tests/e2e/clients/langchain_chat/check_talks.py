"""Talks through LangChain: thoughts, what an answer cost, responses that the gateway keeps, and errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.ai import UsageMetadata

HELLO = "Hello! How can I help you today?"
THOUGHT = "Let me see."


def test_an_answer_is_the_same_whole_and_streamed(demo: Any, on_responses: bool) -> None:
    model = demo(use_responses_api=on_responses)
    assert model.invoke("Hello!").text == HELLO
    pieces = [chunk.text for chunk in model.stream("Hello!")]
    assert "".join(pieces) == HELLO
    assert sum(map(bool, pieces)) > 3


# The library keeps its connections from one model to the next.
@pytest.mark.asyncio(loop_scope="session")
async def test_many_may_be_asked_at_once(demo: Any, on_responses: bool) -> None:
    answers = await demo(use_responses_api=on_responses).abatch(["Hello!"] * 4)
    assert [answer.text for answer in answers] == [HELLO] * 4


def thoughts_in(message: AIMessage) -> list[dict[str, Any]]:
    """What the library makes of reasoning; it reads summaries, and keeps everything else as it came."""
    blocks: list[Any] = message.content_blocks
    return [block["extras"] for block in blocks if block["type"] == "reasoning"]


def test_thoughts_are_told_apart_from_the_answer_on_responses(scripted: Any) -> None:
    message = scripted(use_responses_api=True).invoke("script: an answer")
    [thought] = thoughts_in(message)
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message.text == "Here is the answer."


def test_thoughts_begin_an_item_of_their_own_in_a_stream(scripted: Any) -> None:
    chunks = list(scripted(use_responses_api=True).stream("script: an answer"))
    message = sum(chunks[1:], start=chunks[0])
    assert len(thoughts_in(message)) == 1
    assert message.text == "Here is the answer."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_an_answer_cost_is_told(scripted: Any, stream: bool, on_responses: bool) -> None:
    model = scripted(use_responses_api=on_responses, stream_usage=True)
    if stream:
        chunks = list(model.stream("script: an answer"))
        message = sum(chunks[1:], start=chunks[0])
    else:
        message = model.invoke("script: an answer")
    usage: UsageMetadata = message.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_token_details"]["reasoning"] == 4
    assert usage["output_tokens"] > 4


def test_a_talk_goes_on_from_what_the_gateway_keeps(demo: Any) -> None:
    model = demo(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("Hello!")
    assert first.response_metadata["id"].startswith("resp_")
    talk = [HumanMessage("Hello!"), first, HumanMessage("Hello!")]
    second = model.invoke(talk)
    once = model.invoke("Hello!")
    # What was said before stands in the prompt, though it was not sent again.
    assert second.usage_metadata["input_tokens"] > once.usage_metadata["input_tokens"]
    assert second.response_metadata["id"] != first.response_metadata["id"]


def test_a_response_that_nobody_keeps_is_told_to_be_unknown(demo: Any) -> None:
    model = demo(use_responses_api=True, use_previous_response_id=True)
    unknown = AIMessage("Hi.", response_metadata={"id": "resp_nobody"})
    with pytest.raises(openai.NotFoundError):
        model.invoke([HumanMessage("Hello!"), unknown, HumanMessage("Hello!")])


ERRORS: dict[str, tuple[str, str, dict[str, Any], type[Exception]]] = {
    "a model that there is not": ("nobody", "Hello!", {}, openai.NotFoundError),
    "a backend that is not there": ("down", "Hello!", {}, openai.InternalServerError),
    "a backend that is busy": ("scripted", "script: busy", {}, openai.InternalServerError),
    "a prompt that is too long": ("small", "word " * 600, {}, openai.BadRequestError),
    "a field that is wrong": ("scripted", "Hello!", {"temperature": 9}, openai.BadRequestError),
}


@pytest.mark.parametrize(("model", "given", "fields", "error"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_of_its_type(
    scripted: Any, model: str, given: str, fields: dict[str, Any], error: type[Exception], on_responses: bool
) -> None:
    with pytest.raises(error):
        scripted(model, use_responses_api=on_responses, **fields).invoke(given)


def test_a_tool_that_was_not_declared_is_an_error_that_names_the_choice(scripted: Any, on_responses: bool) -> None:
    model = scripted(use_responses_api=on_responses).bind(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        tool_choice={"type": "function", "function": {"name": "g"}},
    )
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        model.invoke("Hello!")
