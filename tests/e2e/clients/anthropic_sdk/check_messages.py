"""Messages, as applications for Anthropic's API ask them: whole, streamed, with tools and with thoughts."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from anthropic_sdk.messaging import THINKING, WEATHER, answered, asked, scene, text
from pydantic import BaseModel
from weather import ANSWER, HELLO, PARIS, SAID

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@both
def test_a_question_is_answered(demo: Anthropic, stream: bool) -> None:
    message = answered(demo, stream, asked("Hello"))
    assert text(message) == HELLO
    assert [block.type for block in message.content] == ["text"]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "gpt-oss-demo")
    assert message.usage.output_tokens > 0
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
    assert message.id.startswith("msg_")


def test_a_stream_is_the_whole_answer(scripted: Anthropic) -> None:
    for name in ("an answer", "two calls", "a preamble"):
        fields = scene(name, tools=[WEATHER], thinking=THINKING)
        whole, streamed = answered(scripted, False, fields), answered(scripted, True, fields)
        assert len(whole.content) == len(streamed.content) > 1
        for one, other in zip(whole.content, streamed.content, strict=True):
            assert one.model_dump(exclude={"id", "parsed_output"}) == other.model_dump(exclude={"id", "parsed_output"})
        assert whole.stop_reason == streamed.stop_reason
        assert whole.usage.output_tokens == streamed.usage.output_tokens


def test_events_come_in_their_order(scripted: Anthropic) -> None:
    events = list(scripted.messages.create(**scene("an answer", thinking=THINKING), stream=True))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas.count("signature_delta") == 1
    assert deltas.index("signature_delta") == deltas.index("text_delta") - 1


@both
@pytest.mark.parametrize("thinking", [None, THINKING, {"type": "adaptive", "display": "omitted"}])
def test_the_loop_to_the_final_answer(demo: Anthropic, stream: bool, thinking: Any) -> None:
    fields = asked(PARIS, tools=[WEATHER], **({} if thinking is None else {"thinking": thinking}))
    first = answered(demo, stream, fields)
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"location": "Paris"})
    assert call.id.startswith("toolu_")
    thoughts = [block for block in first.content if block.type == "thinking"]
    shown = "" if thinking != THINKING else "We need the weather in Paris. Use get_weather."
    assert [block.thinking for block in thoughts] == ([] if thinking is None else [shown])
    assert all(block.signature for block in thoughts)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    fields["messages"] += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = answered(demo, stream, fields)
    assert (text(second), second.stop_reason) == (ANSWER, "end_turn")
    # The thoughts of the first turn are in the prompt of the second, whatever was shown of them.
    assert second.usage.cache_read_input_tokens > first.usage.input_tokens


def test_the_tool_runner_runs_the_loop(demo: Anthropic) -> None:
    asked_for: list[str] = []

    @beta_tool
    def get_weather(location: str) -> str:
        """Gets the current weather in a city.

        Args:
            location: City name
        """
        asked_for.append(location)
        return "18 degrees, sunny"

    runner = demo.beta.messages.tool_runner(
        model="gpt-oss-demo",
        max_tokens=1000,
        messages=[{"role": "user", "content": PARIS}],
        tools=[get_weather],
        extra_body={"temperature": 0},
    )
    assert text(runner.until_done()) == ANSWER
    assert asked_for == ["Paris"]


@both
def test_a_tool_is_forced(scripted: Anthropic, stream: bool) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        message = answered(scripted, stream, scene("an answer", tools=[WEATHER], tool_choice=choice))
        assert message.stop_reason == "tool_use"
        assert [block.name for block in message.content if block.type == "tool_use"] == ["get_weather"]


class Town(BaseModel):
    city: str
    degrees: int


def test_an_answer_is_what_its_type_says(demo: Anthropic) -> None:
    message = demo.messages.parse(**asked("Hello!"), output_format=Town)
    assert isinstance(message.parsed_output, Town)


def test_what_is_no_json_is_a_refusal(scripted: Anthropic) -> None:
    schema = {"type": "json_schema", "schema": Town.model_json_schema()}
    message = scripted.messages.create(**scene("no JSON", model="free", output_config={"format": schema}))
    assert (message.stop_reason, message.stop_details.type) == ("refusal", "refusal")


@both
def test_a_bound_ends_the_answer(scripted: Anthropic, stream: bool) -> None:
    message = answered(scripted, stream, scene("an answer", max_tokens=12))
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)


@both
def test_a_stop_sequence_ends_the_answer_and_is_named(scripted: Anthropic, stream: bool) -> None:
    message = answered(scripted, stream, scene("an answer", stop_sequences=["the answer"]))
    assert (text(message), message.stop_reason, message.stop_sequence) == ("Here is ", "stop_sequence", "the answer")


def test_the_beginning_of_an_answer_is_gone_on_from(scripted: Anthropic) -> None:
    fields = scene("an answer")
    fields["messages"] = [*fields["messages"], {"role": "assistant", "content": "Once"}]
    assert text(scripted.messages.create(**fields)).endswith(SAID)


def test_tokens_are_counted_as_the_answer_counts_them(demo: Anthropic) -> None:
    fields = {"model": "gpt-oss-demo", "messages": [{"role": "user", "content": PARIS}], "tools": [WEATHER]}
    counted = demo.messages.count_tokens(**fields).input_tokens
    usage = demo.messages.create(**fields, max_tokens=5).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
CODE = {"type": "code_execution_20250522", "name": "code_execution"}


@both
def test_the_web_is_searched_and_the_search_goes_back_as_it_came(scripted: Anthropic, stream: bool) -> None:
    fields = scene("a search, then: an answer", tools=[SEARCH])
    message = answered(scripted, stream, fields)
    use, result, said = message.content
    assert (use.type, use.name, use.input) == ("server_tool_use", "web_search", {"query": "capital France"})
    assert (result.type, result.tool_use_id) == ("web_search_tool_result", use.id)
    assert [found.type for found in result.content] == ["web_search_result"] * len(result.content) != []
    assert (said.text, message.stop_reason) == (SAID, "end_turn")
    assert message.usage.server_tool_use.web_search_requests == 1
    fields["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Thanks"}]
    counted = scripted.messages.count_tokens(model="scripted", messages=fields["messages"], tools=[SEARCH])
    assert counted.input_tokens > message.usage.input_tokens
    assert scripted.messages.create(**fields).role == "assistant"


PAUSES = "a search, then: a page, then: an answer"


@both
def test_an_answer_that_pauses_is_sent_back_and_goes_on(scripted: Anthropic, stream: bool) -> None:
    fields = scene(PAUSES, tools=[SEARCH], thinking=THINKING)
    first = answered(scripted, stream, fields)
    assert (first.stop_reason, text(first)) == ("pause_turn", "")
    assert first.content[-1].type == "web_fetch_tool_result"
    fields["messages"] += [{"role": "assistant", "content": first.content}]
    second = answered(scripted, stream, fields)
    assert (second.stop_reason, text(second)) == ("end_turn", SAID)


def test_the_tool_runner_goes_on_behind_a_pause(scripted: Anthropic) -> None:
    runner = scripted.beta.messages.tool_runner(**scene(PAUSES, tools=[SEARCH]))
    reasons = [message.stop_reason for message in runner]
    assert reasons == ["pause_turn", "end_turn"]


@both
def test_code_is_run(scripted: Anthropic, stream: bool) -> None:
    message = answered(scripted, stream, scene("a program, then: an answer", tools=[CODE]))
    use, result, said = message.content
    assert (use.name, use.input) == ("code_execution", {"code": "print(6 * 7)"})
    assert (result.content.stdout.strip(), result.content.return_code) == ("42", 0)
    assert said.text == SAID


@both
def test_the_operators_tools_are_run_unseen(scripted: Anthropic, stream: bool) -> None:
    body = {"unisono": {"run_tools": True}}
    message = answered(scripted, stream, scene("a tool, then: an answer", extra_body=body))
    assert [block.type for block in message.content] == ["text"]
    assert (text(message), message.stop_reason) == (SAID, "end_turn")


async def test_an_asynchronous_client_reads_the_same(stage: Any, usual: dict[str, Any]) -> None:
    async with (
        AsyncAnthropic(base_url=stage.demo, **usual) as client,
        client.messages.stream(**asked("Hello")) as streaming,
    ):
        pieces = [piece async for piece in streaming.text_stream]
        message = await streaming.get_final_message()
    assert "".join(pieces) == text(message) == HELLO
    assert len(pieces) > 1
