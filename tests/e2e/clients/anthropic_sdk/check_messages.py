"""Messages API through Anthropic's SDK: whole and streamed, with tools and thinking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from anthropic.tools import BetaLocalFilesystemMemoryTool
from anthropic_sdk.messaging import THINKING, WEATHER, create_message, message_request, scripted_request, text_of
from pydantic import BaseModel
from weather import ANSWER, HELLO, PARIS, SAID

whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@whole_and_streamed
def test_a_text_answer_has_content_usage_and_stop_reason(demo: Anthropic, stream: bool) -> None:
    message = create_message(demo, stream, message_request("Hello"))
    assert text_of(message) == HELLO
    assert [block.type for block in message.content] == ["text"]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "gpt-oss-demo")
    assert message.usage.output_tokens > 0
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
    assert message.id.startswith("msg_")


def test_max_tokens_of_zero_gives_an_empty_message(demo: Anthropic) -> None:
    message = demo.messages.create(**{**message_request("Hello"), "max_tokens": 0})
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0


def test_a_stream_matches_the_whole_message(scripted: Anthropic) -> None:
    for name in ("an answer", "two calls", "a preamble"):
        fields = scripted_request(name, tools=[WEATHER], thinking=THINKING)
        whole, streamed = create_message(scripted, False, fields), create_message(scripted, True, fields)
        assert len(whole.content) == len(streamed.content) > 1
        for block, streamed_block in zip(whole.content, streamed.content, strict=True):
            assert block.model_dump(exclude={"id", "parsed_output"}) == streamed_block.model_dump(
                exclude={"id", "parsed_output"}
            )
        assert whole.stop_reason == streamed.stop_reason
        assert whole.usage.output_tokens == streamed.usage.output_tokens


def test_stream_events_are_in_order(scripted: Anthropic) -> None:
    events = list(scripted.messages.create(**scripted_request("an answer", thinking=THINKING), stream=True))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas.count("signature_delta") == 1
    assert deltas.index("signature_delta") == deltas.index("text_delta") - 1


@whole_and_streamed
@pytest.mark.parametrize("thinking", [None, THINKING, {"type": "adaptive", "display": "omitted"}])
def test_the_tool_loop_reaches_the_final_answer(demo: Anthropic, stream: bool, thinking: Any) -> None:
    fields = message_request(PARIS, tools=[WEATHER], **({} if thinking is None else {"thinking": thinking}))
    first = create_message(demo, stream, fields)
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"location": "Paris"})
    assert call.id.startswith("toolu_")
    thinking_blocks = [block for block in first.content if block.type == "thinking"]
    expected = "" if thinking != THINKING else "We need the weather in Paris. Use get_weather."
    assert [block.thinking for block in thinking_blocks] == ([] if thinking is None else [expected])
    assert all(block.signature for block in thinking_blocks)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    fields["messages"] += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = create_message(demo, stream, fields)
    assert (text_of(second), second.stop_reason) == (ANSWER, "end_turn")
    # The prompt of the second turn contains the thinking of the first, even if its text was omitted.
    assert second.usage.cache_read_input_tokens > first.usage.input_tokens


def test_the_tool_runner_completes_the_tool_loop(demo: Anthropic) -> None:
    locations: list[str] = []

    @beta_tool
    def get_weather(location: str) -> str:
        """Gets the current weather in a city.

        Args:
            location: City name
        """
        locations.append(location)
        return "18 degrees, sunny"

    runner = demo.beta.messages.tool_runner(
        model="gpt-oss-demo",
        max_tokens=1000,
        messages=[{"role": "user", "content": PARIS}],
        tools=[get_weather],
        extra_body={"temperature": 0},
    )
    assert text_of(runner.until_done()) == ANSWER
    assert locations == ["Paris"]


@whole_and_streamed
def test_tool_choice_forces_a_call(scripted: Anthropic, stream: bool) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        message = create_message(scripted, stream, scripted_request("an answer", tools=[WEATHER], tool_choice=choice))
        assert message.stop_reason == "tool_use"
        assert [block.name for block in message.content if block.type == "tool_use"] == ["get_weather"]


class Town(BaseModel):
    city: str
    degrees: int


def test_output_is_parsed_into_the_output_format(demo: Anthropic) -> None:
    message = demo.messages.parse(**message_request("Hello!"), output_format=Town)
    assert isinstance(message.parsed_output, Town)


def test_non_json_output_is_reported_as_a_refusal(scripted: Anthropic) -> None:
    schema = {"type": "json_schema", "schema": Town.model_json_schema()}
    message = scripted.messages.create(**scripted_request("no JSON", model="free", output_config={"format": schema}))
    assert (message.stop_reason, message.stop_details.type) == ("refusal", "refusal")


@whole_and_streamed
def test_max_tokens_ends_the_answer(scripted: Anthropic, stream: bool) -> None:
    message = create_message(scripted, stream, scripted_request("an answer", max_tokens=12))
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)


@whole_and_streamed
def test_a_stop_sequence_ends_the_answer_and_is_reported(scripted: Anthropic, stream: bool) -> None:
    message = create_message(scripted, stream, scripted_request("an answer", stop_sequences=["the answer"]))
    assert (text_of(message), message.stop_reason, message.stop_sequence) == ("Here is ", "stop_sequence", "the answer")


def test_a_prefilled_assistant_message_is_continued(scripted: Anthropic) -> None:
    fields = scripted_request("an answer")
    fields["messages"] = [*fields["messages"], {"role": "assistant", "content": "Once"}]
    assert text_of(scripted.messages.create(**fields)).endswith(SAID)


def test_count_tokens_matches_the_usage_of_the_answer(demo: Anthropic) -> None:
    fields = {"model": "gpt-oss-demo", "messages": [{"role": "user", "content": PARIS}], "tools": [WEATHER]}
    counted = demo.messages.count_tokens(**fields).input_tokens
    usage = demo.messages.create(**fields, max_tokens=5).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
CODE = {"type": "code_execution_20250522", "name": "code_execution"}


@whole_and_streamed
def test_web_search_results_can_be_sent_back_unchanged(scripted: Anthropic, stream: bool) -> None:
    fields = scripted_request("a search, then: an answer", tools=[SEARCH])
    message = create_message(scripted, stream, fields)
    use, result, answer = message.content
    assert (use.type, use.name, use.input) == ("server_tool_use", "web_search", {"query": "capital France"})
    assert (result.type, result.tool_use_id) == ("web_search_tool_result", use.id)
    assert [hit.type for hit in result.content] == ["web_search_result"] * len(result.content) != []
    assert (answer.text, message.stop_reason) == (SAID, "end_turn")
    assert message.usage.server_tool_use.web_search_requests == 1
    fields["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Thanks"}]
    counted = scripted.messages.count_tokens(model="scripted", messages=fields["messages"], tools=[SEARCH])
    assert counted.input_tokens > message.usage.input_tokens
    assert scripted.messages.create(**fields).role == "assistant"


PAUSING_SCRIPT = "a search, then: a page, then: an answer"


@whole_and_streamed
def test_a_paused_answer_continues_when_sent_back(scripted: Anthropic, stream: bool) -> None:
    fields = scripted_request(PAUSING_SCRIPT, tools=[SEARCH], thinking=THINKING)
    first = create_message(scripted, stream, fields)
    assert (first.stop_reason, text_of(first)) == ("pause_turn", "")
    assert first.content[-1].type == "web_fetch_tool_result"
    fields["messages"] += [{"role": "assistant", "content": first.content}]
    second = create_message(scripted, stream, fields)
    assert (second.stop_reason, text_of(second)) == ("end_turn", SAID)


def test_the_tool_runner_continues_after_pause_turn(scripted: Anthropic) -> None:
    runner = scripted.beta.messages.tool_runner(**scripted_request(PAUSING_SCRIPT, tools=[SEARCH]))
    reasons = [message.stop_reason for message in runner]
    assert reasons == ["pause_turn", "end_turn"]


@whole_and_streamed
def test_code_execution_returns_stdout_and_return_code(scripted: Anthropic, stream: bool) -> None:
    message = create_message(scripted, stream, scripted_request("a program, then: an answer", tools=[CODE]))
    use, result, answer = message.content
    assert (use.name, use.input) == ("code_execution", {"code": "print(6 * 7)"})
    assert (result.content.stdout.strip(), result.content.return_code) == ("42", 0)
    assert answer.text == SAID


@whole_and_streamed
def test_operator_tools_run_without_appearing_in_the_content(scripted: Anthropic, stream: bool) -> None:
    body = {"unisono": {"run_tools": True}}
    message = create_message(scripted, stream, scripted_request("a tool, then: an answer", extra_body=body))
    assert [block.type for block in message.content] == ["text"]
    assert (text_of(message), message.stop_reason) == (SAID, "end_turn")


async def test_the_async_client_streams_the_same_text(stage: Any, usual: dict[str, Any]) -> None:
    async with (
        AsyncAnthropic(base_url=stage.demo, **usual) as client,
        client.messages.stream(**message_request("Hello")) as streaming,
    ):
        pieces = [piece async for piece in streaming.text_stream]
        message = await streaming.get_final_message()
    assert "".join(pieces) == text_of(message) == HELLO
    assert len(pieces) > 1


@whole_and_streamed
def test_the_gateway_searches_deferred_tools(scripted: Anthropic, stream: bool) -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    other = {"name": "now", "input_schema": {"type": "object"}}
    tools = [search, other, {**WEATHER, "defer_loading": True}]
    message = create_message(scripted, stream, scripted_request("a search of Anthropic, then: two calls", tools=tools))
    use, result, *calls = (block for block in message.content if block.type != "text")
    assert (use.type, use.name, use.input) == ("server_tool_use", "tool_search_tool_bm25", {"query": "weather"})
    assert result.content.type == "tool_search_tool_search_result"
    assert [reference.tool_name for reference in result.content.tool_references] == ["get_weather"]
    assert {call.name for call in calls} == {"get_weather"}
    assert message.stop_reason == "tool_use"


@whole_and_streamed
def test_the_memory_tool_of_the_sdk_writes_a_file(scripted: Anthropic, stream: bool, tmp_path: Path) -> None:
    memory = BetaLocalFilesystemMemoryTool(str(tmp_path))
    fields = scripted_request("a memory, then: an answer", tools=[memory])
    runner = scripted.beta.messages.tool_runner(**fields, **({"stream": True} if stream else {}))
    last = runner.until_done()
    assert text_of(last) == "Here is the answer."
    assert (tmp_path / "memories" / "tea.txt").read_text() == "They like tea."
