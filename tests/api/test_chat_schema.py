"""Fields of Chat Completions requests: accepted, noted as without effect, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from unisono.api.chat.inbound import ChatGeneration, to_generation_request
from unisono.api.chat.schema import ChatRequest
from unisono.api.error_responses import failure_of
from unisono.api.request_options import EFFORTS
from unisono.core.access import Caller
from unisono.core.conversation import Effort
from unisono.core.generation import Sampling
from unisono.errors import InvalidRequest, UnisonoError

USER = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def generation_of(**fields: Any) -> ChatGeneration:
    body = {"model": "gpt-oss-20b", "messages": [USER]} | fields
    request = ChatRequest.model_validate(body)
    return to_generation_request(
        request, model="group", today="2026-11-20", caller=Caller("default"), request_id="req_1"
    )


def error_of(**fields: Any) -> UnisonoError:
    with pytest.raises((ValidationError, InvalidRequest)) as caught:
        generation_of(**fields)
    failure = failure_of(caught.value)
    assert failure.status == 400
    assert failure.message
    return failure


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


def after_call(result: dict[str, Any]) -> dict[str, Any]:
    """Return messages with a call and a result of another one."""
    return {"messages": [{"role": "assistant", "tool_calls": [FUNCTION | {"id": "c1"}]}, {"content": "x", **result}]}


def tool(name: object, **fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name, **fields}}]}


def schema_format(schema: object, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    # case: (request fields, field in the error, error code)
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "messages null": ({"messages": None}, "messages", "invalid_value"),
    "model null": ({"model": None}, "model", "invalid_value"),
    "model empty": ({"model": ""}, "model", "invalid_value"),
    "role": (message("owner", "x"), "messages.0.role", "invalid_value"),
    "content number": (message("user", 5), "messages.0.content", "invalid_value"),
    "content object": (message("user", {"type": "text"}), "messages.0.content", "invalid_value"),
    "part without text": (message("user", [{"type": "text"}]), "messages.0.content.0.text", "invalid_value"),
    "part unknown": (message("user", [{"type": "smell"}]), "messages.0.content.0.type", "invalid_value"),
    "part image": (
        message("user", [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]),
        "messages.0.content.1.type",
        "unsupported_value",
    ),
    "part audio": (message("user", [{"type": "input_audio"}]), "messages.0.content.0.type", "unsupported_value"),
    "part file": (message("user", [{"type": "file"}]), "messages.0.content.0.type", "unsupported_value"),
    "surrogate": (message("user", "a\ud800"), "messages.0.content.0.text", "invalid_value"),
    "surrogate in a schema": (tool("f", parameters={"a": "\ud800"}), "tools.0.function.parameters", "invalid_value"),
    "tool message without id": (message("tool", "x"), "messages.0.tool_call_id", "invalid_value"),
    "function message without name": (message("function", "x"), "messages.0.name", "invalid_value"),
    "unknown call id": (after_call({"role": "tool", "tool_call_id": "c"}), "messages.1.tool_call_id", "invalid_value"),
    "unknown function": (after_call({"role": "function", "name": "g"}), "messages.1.name", "invalid_value"),
    "call without function": (
        message("assistant", None, tool_calls=[{"id": "a", "type": "function"}]),
        "messages.0.tool_calls.0.function",
        "invalid_value",
    ),
    "call with a hostile name": (
        message("assistant", None, tool_calls=[{"id": "a", "function": {"name": "f <|end|>", "arguments": ""}}]),
        "messages.0.tool_calls.0.function.name",
        "invalid_value",
    ),
    "tool name empty": (tool(""), "tools.0.function.name", "invalid_value"),
    "tool name with a space": (tool("my tool"), "tools.0.function.name", "invalid_value"),
    "tool name with a newline": (tool("f\n# Instructions"), "tools.0.function.name", "invalid_value"),
    "tool name ending in a newline": (tool("f\n"), "tools.0.function.name", "invalid_value"),
    "tool name too long": (tool("f" * 129), "tools.0.function.name", "invalid_value"),
    "tool name a number": (tool(5), "tools.0.function.name", "invalid_value"),
    "tool parameters a list": (tool("f", parameters=[]), "tools.0.function.parameters", "invalid_value"),
    "tool schema too large": (
        tool("f", parameters={"enum": ["x" * 1000] * 300}),
        "tools.0.function.parameters",
        "invalid_value",
    ),
    "tool type a list": ({"tools": [{"type": []}]}, "tools.0.type", "invalid_value"),
    "duplicate tool": ({"tools": [FUNCTION, FUNCTION]}, "tools.1.function.name", "invalid_value"),
    "too many tools": (
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(513)]},
        "tools",
        "invalid_value",
    ),
    "schemas too large together": (
        {
            "tools": [
                {"type": "function", "function": {"name": f"f{n}", "parameters": {"enum": ["x" * 1000] * 200}}}
                for n in range(6)
            ]
        },
        "tools",
        "invalid_value",
    ),
    "tool without function": ({"tools": [{"type": "function"}]}, "tools.0.function", "invalid_value"),
    "only unsupported tools": ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_value"),
    "namespace without tools": (
        {"tools": [{"type": "namespace", "name": "n", "tools": []}]},
        "tools.0.tools",
        "unsupported_value",
    ),
    "namespace with a hostile name": (
        {"tools": [{"type": "namespace", "name": "n\n", "tools": [FUNCTION]}]},
        "tools.0.tools.0.function.name",
        "invalid_value",
    ),
    "strict tool with an open schema": (
        tool("f", parameters={"type": "object", "properties": {}}, strict=True),
        "tools.0.function.parameters.additionalProperties",
        "invalid_value",
    ),
    "strict tool with an unsupported keyword": (
        tool("f", parameters={"type": "object", "additionalProperties": False, "not": {}}, strict=True),
        "tools.0.function.parameters.not",
        "invalid_value",
    ),
    "tool_choice unknown": ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
    "tool_choice a number": ({"tool_choice": 3}, "tool_choice", "invalid_value"),
    "tool_choice without a type": ({"tool_choice": {"name": "f"}}, "tool_choice", "invalid_value"),
    "tool_choice without a name": ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    "tool_choice with a hostile name": (
        {**tool("f"), "tool_choice": {"type": "function", "function": {"name": "f\n"}}},
        "tool_choice",
        "invalid_value",
    ),
    "tool_choice required without tools": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "tool_choice named without tools": ({"tool_choice": FUNCTION}, "tool_choice", "invalid_value"),
    "tool_choice named and not declared": (
        {**tool("g"), "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "invalid_value",
    ),
    "tool_choice of an undeclared type": (
        {**tool("f"), "tool_choice": {"type": "web_search"}},
        "tool_choice",
        "invalid_value",
    ),
    "allowed_tools without a list": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "invalid_value"),
    "allowed_tools empty": (
        {**tool("f"), "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice",
        "invalid_value",
    ),
    "allowed_tools not declared": (
        {**tool("g"), "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}},
        "tool_choice",
        "invalid_value",
    ),
    "allowed_tools of an unknown kind": (
        {**tool("f"), "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "x"}]}},
        "tool_choice",
        "invalid_value",
    ),
    "allowed_tools of a known and an unknown kind": (
        {**tool("f"), "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [FUNCTION, {"type": "x"}]}},
        "tool_choice",
        "invalid_value",
    ),
    "allowed_tools with an unknown mode": (
        {**tool("f"), "tool_choice": {"type": "allowed_tools", "mode": "maybe", "tools": [FUNCTION]}},
        "tool_choice",
        "invalid_value",
    ),
    "function_call named and not declared": (
        {"functions": [{"name": "g"}], "function_call": {"name": "f"}},
        "function_call",
        "invalid_value",
    ),
    "function_call without a name": ({"function_call": {}}, "function_call", "invalid_value"),
    "response_format a string": ({"response_format": "json"}, "response_format", "invalid_value"),
    "response_format without a type": ({"response_format": {}}, "response_format.type", "invalid_value"),
    "response_format of another kind": (
        {"response_format": {"type": "grammar", "grammar": "x"}},
        "response_format.type",
        "unsupported_value",
    ),
    "json schema a list": (
        schema_format([]),
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    "json schema name with a space": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "invalid_value",
    ),
    "json schema pattern with a lookahead": (
        schema_format({"properties": {"x": {"type": "string", "pattern": "(?=a)"}}}),
        "response_format.json_schema.schema.properties.x.pattern",
        "invalid_value",
    ),
    "json schema with an unsupported keyword": (
        schema_format({"unevaluatedProperties": False}),
        "response_format.json_schema.schema.unevaluatedProperties",
        "invalid_value",
    ),
    "json schema with an external reference": (
        schema_format({"$ref": "https://example.com/schema"}),
        "response_format.json_schema.schema.$ref",
        "invalid_value",
    ),
    "strict json schema without additionalProperties": (
        schema_format({"type": "object", "properties": {}}, strict=True),
        "response_format.json_schema.schema.additionalProperties",
        "invalid_value",
    ),
    "schema beside json_object": (
        {"response_format": {"type": "json_object", "schema": {"type": "what"}}},
        "response_format.schema.type",
        "invalid_value",
    ),
    "reasoning budget out of range": ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens", "invalid_value"),
    "reasoning budget a string": ({"thinking_token_budget": "5"}, "thinking_token_budget", "invalid_value"),
    "thinking a string": ({"thinking": "hard"}, "thinking", "invalid_value"),
    "logprobs": ({"logprobs": 3}, "logprobs", "invalid_value"),
    "top_logprobs": ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    "audio": ({"audio": {"voice": "x"}}, "audio", "unsupported_value"),
    "effort": ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
    "effort a number": ({"reasoning_effort": 3}, "reasoning_effort", "invalid_value"),
    "effort in reasoning": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    "effort in think": ({"think": "huge"}, "think", "invalid_value"),
    "effort in the template": (
        {"chat_template_kwargs": {"reasoning_effort": "huge"}},
        "chat_template_kwargs.reasoning_effort",
        "invalid_value",
    ),
    "effort in output_config": ({"output_config": {"effort": 1}}, "output_config.effort", "invalid_value"),
    "n zero": ({"n": 0}, "n", "invalid_value"),
    "n large": ({"n": 17}, "n", "invalid_value"),
    "n a string": ({"n": "1"}, "n", "invalid_value"),
    "stop empty": ({"stop": ["a", ""]}, "stop.1", "invalid_value"),
    "stop many": ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    "stop a number": ({"stop": 5}, "stop", "invalid_value"),
    "temperature high": ({"temperature": 2.1}, "temperature", "invalid_value"),
    "temperature a string": ({"temperature": "1"}, "temperature", "invalid_value"),
    "temperature true": ({"temperature": True}, "temperature", "invalid_value"),
    "temperature not a number": ({"temperature": float("nan")}, "temperature", "invalid_value"),
    "top_p negative": ({"top_p": -0.1}, "top_p", "invalid_value"),
    "top_k": ({"top_k": -2}, "top_k", "invalid_value"),
    "min_p": ({"min_p": 1.5}, "min_p", "invalid_value"),
    "presence_penalty": ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    "repetition_penalty": ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    "repetition_penalty tiny": ({"repetition_penalty": 1e-40}, "repetition_penalty", "invalid_value"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "max_tokens a string": ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    "max_completion_tokens": ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    "seed a string": ({"seed": "1"}, "seed", "invalid_value"),
    "seed huge": ({"seed": 2**63}, "seed", "invalid_value"),
    "bias beyond the vocabulary": ({"logit_bias": {"201088": 1}}, "logit_bias.201088", "invalid_value"),
    "bias not of a token id": ({"logit_bias": {"the": 1}}, "logit_bias.the", "invalid_value"),
    "bias of a marker": ({"logit_bias": {"200002": 1}}, "logit_bias.200002", "unsupported_value"),
    "bias out of range": ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    "stream a string": ({"stream": "true"}, "stream", "invalid_value"),
    "parallel_tool_calls a number": ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
}


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_an_error_names_the_invalid_field(fields: dict[str, Any], param: str, code: str) -> None:
    failure = error_of(**fields)
    assert (failure.param, failure.code) == (param, code)
    assert param in failure.message or param == "messages"


def test_a_missing_field_is_reported_as_missing() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": [USER]})
    failure = failure_of(caught.value)
    assert failure.param == "model"
    assert failure.message == "Missing required field 'model'."


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_an_image_error_has_the_text_that_clients_look_for(kind: str) -> None:
    assert "does not support image input" in error_of(**message("user", [{"type": kind}])).message


NEUTRAL: dict[str, Any] = {
    "n": [None, 1],
    "modalities": [None, ["text"]],
    "audio": [None],
    "response_format": [None, {"type": "text"}],
    "tools": [None, []],
    "tool_choice": [None, "auto", {"type": "auto"}],
    "function_call": [None, "auto"],
    "thinking": [None, {"type": "enabled"}, True],
    "thinking_token_budget": [None, -1],
    "functions": [None, []],
    "stop": [None, []],
    "stream": [None, False],
    "stream_options": [None, {}],
    "parallel_tool_calls": [None, True],
    "temperature": [None, 1],
    "seed": [None],
    "logit_bias": [None, {}],
    "max_tokens": [None],
    "reasoning": [None, {}],
    "reasoning_effort": [None, "medium"],
    "store": [None],
    "metadata": [None],
    "user": [None],
    "include_reasoning": [None, True],
    "skip_special_tokens": [None, True],
    "spaces_between_special_tokens": [None, True, False],
    "min_tokens": [None, 0],
    "ignore_eos": [None, False],
    "stop_token_ids": [None, [], [200002, 200012], [199999]],
    "continue_final_message": [None, False],
    "add_generation_prompt": [None, True, False],
    "web_search_options": [None],
    "structured_outputs": [None, {}],
    "guided_json": [None],
    "mock_response": [None],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in NEUTRAL.items() for value in values], ids=str
)
def test_a_neutral_value_has_no_effect(field: str, value: Any) -> None:
    assert generation_of(**{field: value}) == generation_of()


def test_an_effort_that_another_field_overrides_is_noted() -> None:
    noted = generation_of(reasoning_effort="low", reasoning={"effort": "high"}, think="low")
    assert noted.request.conversation.preamble.effort is Effort.LOW
    assert noted.notes == ("reasoning.effort: no effect, because reasoning_effort is set",)


@pytest.mark.parametrize("field", [{"user": "u"}, {"user": 5}, {"safety_identifier": "x"}, {"user": ""}])
def test_the_end_user_is_not_noted_as_without_effect(field: dict[str, Any]) -> None:
    assert generation_of(**field).notes == ()


@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "flex"},
        {"prompt_cache_retention": "24h"},
        {"verbosity": "low"},
        {"prediction": {"type": "content"}},
        {"something_new": 5},
        {"priority": 1},
        {"tags": ["a"]},
        {"guided_decoding_backend": "xgrammar"},
        # Values that look like nothing ask for something too.
        {"store": False},
        {"metadata": {}},
        {"something_new": 0},
        {"priority": 0},
        {"tags": []},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_field_without_effect_is_accepted_and_noted(field: dict[str, Any]) -> None:
    noted = generation_of(**field)
    assert noted.notes == (f"{next(iter(field))}: no effect",)
    assert noted.request == generation_of().request


REFUSED: dict[str, Any] = {
    "skip_special_tokens": False,
    "min_tokens": 5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "echo": True,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "use_beam_search": True,
    "length_penalty": 1.5,
    "bad_words": ["a"],
    "allowed_token_ids": [1],
    "truncate_prompt_tokens": 100,
    "chat_template": "{{ messages }}",
    "documents": [{"text": "a"}],
    "mock_response": "Hi",
    "stop_token_ids": [13],
    "web_search_options": {},
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_cannot_be_honoured_is_an_error(field: str) -> None:
    error = error_of(**{field: REFUSED[field]})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_value")


def test_reasoning_is_left_out_on_request() -> None:
    assert generation_of().shows_reasoning
    assert not generation_of(include_reasoning=False).shows_reasoning
    assert not generation_of(reasoning={"exclude": True}).shows_reasoning
    assert generation_of(reasoning={"enabled": False}).request.conversation.preamble.effort is Effort.LOW


UNFINISHED = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]}


def test_a_message_of_the_assistant_at_the_end_is_continued_unless_the_request_says_otherwise() -> None:
    for fields in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        assert generation_of(**UNFINISHED, **fields).request.conversation.prefill == "Hel"
    for fields in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert generation_of(**UNFINISHED, **fields).request.conversation.prefill is None
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(**UNFINISHED, **both).param == "add_generation_prompt"
    assert error_of(continue_final_message=True).param == "continue_final_message"


def test_notes_cover_nested_options_and_are_limited() -> None:
    assert generation_of(reasoning={"something": False}).notes == ("reasoning.something: no effect",)
    assert generation_of(structured_outputs={"disable_fallback": True}).notes == (
        "structured_outputs.disable_fallback: no effect",
    )
    assert generation_of(chat_template_kwargs={"enable_thinking": True}).notes == (
        "chat_template_kwargs.enable_thinking: no effect",
    )
    notes = generation_of(**{f"extra_{n}_{'x' * 500}": 1 for n in range(100)}).notes
    assert len(notes) == 32
    assert max(map(len, notes)) < 100


@pytest.mark.parametrize("spelling", EFFORTS)
@pytest.mark.parametrize(
    "fields_with",
    [
        lambda effort: {"reasoning_effort": effort},
        lambda effort: {"reasoning": {"effort": effort}},
        lambda effort: {"think": effort},
        lambda effort: {"chat_template_kwargs": {"reasoning_effort": effort}},
        lambda effort: {"output_config": {"effort": effort}},
    ],
    ids=["reasoning_effort", "reasoning", "think", "template", "output_config"],
)
def test_effort_is_read_in_every_spelling_and_field(spelling: str, fields_with: Any) -> None:
    assert generation_of(**fields_with(spelling)).request.conversation.preamble.effort is EFFORTS[spelling]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, Effort.MEDIUM),
        ({"think": True}, Effort.MEDIUM),
        ({"think": False}, Effort.LOW),
        ({"reasoning_effort": "high", "think": False}, Effort.HIGH),
        ({"reasoning_effort": None, "reasoning": {"effort": "xhigh"}}, Effort.HIGH),
    ],
    ids=str,
)
def test_effort_defaults_to_medium_and_reasoning_effort_takes_precedence(fields: Any, effort: Effort) -> None:
    assert generation_of(**fields).request.conversation.preamble.effort is effort


def test_sampling_has_the_requested_values_and_defaults() -> None:
    assert generation_of().request.answer.sampling == Sampling()
    requested = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 20,
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "seed": -7,
    }
    expected = Sampling(0, 0.5, 20, 0.1, -2, 2, 1.1, -7, {17: -100.0, 201087: 5.0})
    assert generation_of(**requested, logit_bias={"17": -100, "201087": 5}).request.answer.sampling == expected
    assert generation_of(top_k=-1).request.answer.sampling.top_k == 0


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 7}, 7)],
    ids=str,
)
def test_max_completion_tokens_takes_precedence_over_max_tokens(fields: dict[str, int], limit: int | None) -> None:
    assert generation_of(**fields).request.answer.max_tokens == limit


def test_stop_is_one_string_or_several() -> None:
    assert generation_of(stop="END").request.answer.stop == ("END",)
    assert generation_of(stop=["a"] * 16).request.answer.stop == ("a",) * 16


def test_a_legacy_choice_beside_a_tool_choice_has_no_effect() -> None:
    generation = generation_of(tools=[FUNCTION], tool_choice="auto", function_call="none")
    assert generation.request.answer.calls_allowed
    assert generation.notes == ("function_call: no effect, because 'tool_choice' is set",)


BAD_PARTS: dict[str, tuple[Any, str, str]] = {
    "unknown type": ({"type": "tool_use"}, "messages.0.content.0.type", "must be input_text, output_text, reasoning,"),
    "no object": (5, "messages.0.content.0", "must be an object"),
}


@pytest.mark.parametrize(("part", "param", "reason"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_an_error_says_which_parts_are_accepted(part: Any, param: str, reason: str) -> None:
    error = error_of(messages=[{"role": "user", "content": [part]}])
    assert error.param == param
    assert error.message.startswith(f"Invalid value for '{param}': {reason}")


def test_switches_reach_the_generation_request() -> None:
    assert generation_of().request.answer.calls_allowed
    assert not generation_of(tools=[FUNCTION], tool_choice="none").request.answer.calls_allowed
    assert not generation_of(functions=[{"name": "f"}], function_call="none").request.answer.calls_allowed
    assert generation_of().request.answer.parallel_calls
    assert not generation_of(parallel_tool_calls=False).request.answer.parallel_calls
    assert not generation_of(functions=[{"name": "f"}]).request.answer.parallel_calls
    assert generation_of(stream=True, stream_options={"include_usage": True}).include_usage
    assert generation_of().request.answer.hold_calls


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2, 2**63 - 1])
def test_choices_differ_in_seed_and_request_id_only(seed: int) -> None:
    generation = generation_of(n=3, seed=seed)
    requests = [generation.request_of(index) for index in range(generation.choices)]
    assert len({request.origin.request_id for request in requests}) == 3
    assert len({request.answer.sampling.seed for request in requests}) == 3
    assert len({request.conversation for request in requests}) == 1
    assert {generation_of(n=2).request_of(index).answer.sampling.seed for index in range(2)} == {None}


def test_backends_receive_a_different_seed_for_each_choice() -> None:
    for seed in (-2, -1, 0, 1, 2, 2**31 - 1, 2**32 - 1):
        sent = [request.answer.sampling.for_backends().seed for request in generation_of(n=5, seed=seed).requests]
        assert len(set(sent)) == 5
        assert all(0 <= (one or 0) < 2**31 for one in sent)
