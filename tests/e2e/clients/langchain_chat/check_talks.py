"""Chats through LangChain: reasoning, usage, stored responses and errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.ai import UsageMetadata

HELLO = "Hello! How can I help you today?"
REASONING = "Let me see."


def test_a_streamed_answer_equals_the_whole_answer(demo: Any, on_responses: bool) -> None:
    model = demo(use_responses_api=on_responses)
    assert model.invoke("Hello!").text == HELLO
    pieces = [chunk.text for chunk in model.stream("Hello!")]
    assert "".join(pieces) == HELLO
    # Tokens that arrive together share an event, so only a whole answer in one piece is wrong.
    assert sum(map(bool, pieces)) > 1


# The library reuses connections across models.
@pytest.mark.asyncio(loop_scope="session")
async def test_a_batch_of_requests_is_answered(demo: Any, on_responses: bool) -> None:
    answers = await demo(use_responses_api=on_responses).abatch(["Hello!"] * 4)
    assert [answer.text for answer in answers] == [HELLO] * 4


def reasoning_in(message: AIMessage) -> list[dict[str, Any]]:
    """Return the reasoning blocks of a message, as parsed by the library.

    The library parses summaries and copies all other fields to `extras`.
    """
    blocks: list[Any] = message.content_blocks
    return [block["extras"] for block in blocks if block["type"] == "reasoning"]


def test_reasoning_is_separate_from_the_answer_on_responses(scripted: Any) -> None:
    message = scripted(use_responses_api=True).invoke("script: an answer")
    [reasoning] = reasoning_in(message)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": REASONING}]
    assert message.text == "Here is the answer."


def test_streamed_reasoning_is_one_item(scripted: Any) -> None:
    chunks = list(scripted(use_responses_api=True).stream("script: an answer"))
    message = sum(chunks[1:], start=chunks[0])
    assert len(reasoning_in(message)) == 1
    assert message.text == "Here is the answer."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_usage_is_reported(scripted: Any, stream: bool, on_responses: bool) -> None:
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


def test_a_chat_continues_from_a_stored_response(demo: Any) -> None:
    model = demo(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("Hello!")
    assert first.response_metadata["id"].startswith("resp_")
    messages = [HumanMessage("Hello!"), first, HumanMessage("Hello!")]
    second = model.invoke(messages)
    single = model.invoke("Hello!")
    # The prompt contains the earlier messages, which were not sent again.
    assert second.usage_metadata["input_tokens"] > single.usage_metadata["input_tokens"]
    assert second.response_metadata["id"] != first.response_metadata["id"]


def test_an_unknown_previous_response_is_not_found(demo: Any) -> None:
    model = demo(use_responses_api=True, use_previous_response_id=True)
    unknown = AIMessage("Hi.", response_metadata={"id": "resp_nobody"})
    with pytest.raises(openai.NotFoundError):
        model.invoke([HumanMessage("Hello!"), unknown, HumanMessage("Hello!")])


ERRORS: dict[str, tuple[str, str, dict[str, Any], type[Exception]]] = {
    "an unknown model": ("nobody", "Hello!", {}, openai.NotFoundError),
    "an unreachable backend": ("down", "Hello!", {}, openai.InternalServerError),
    "a busy backend": ("scripted", "script: busy", {}, openai.InternalServerError),
    "a prompt beyond the context": ("small", "word " * 600, {}, openai.BadRequestError),
    "an invalid field": ("scripted", "Hello!", {"temperature": 9}, openai.BadRequestError),
}


@pytest.mark.parametrize(("model", "prompt", "fields", "error"), ERRORS.values(), ids=ERRORS)
def test_a_failure_raises_the_matching_exception(
    scripted: Any, model: str, prompt: str, fields: dict[str, Any], error: type[Exception], on_responses: bool
) -> None:
    with pytest.raises(error):
        scripted(model, use_responses_api=on_responses, **fields).invoke(prompt)


def test_an_undeclared_tool_in_tool_choice_is_rejected(scripted: Any, on_responses: bool) -> None:
    model = scripted(use_responses_api=on_responses).bind(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        tool_choice={"type": "function", "function": {"name": "g"}},
    )
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        model.invoke("Hello!")
