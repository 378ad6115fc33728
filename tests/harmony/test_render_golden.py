"""Golden prompts: one file per conversation in `tests/golden/render`, with spelled markers.

A changed file changes the prompts of all users; review it before the commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Effort,
    FunctionTool,
    Phase,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import plan_tools

GOLDEN = Path(__file__).parents[1] / "golden" / "render"

DAY = "2026-11-20"
WEATHER = FunctionTool(
    "get_weather",
    "Weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        },
        "required": ["city"],
    },
)
SEARCH = FunctionTool(
    "docs.search",
    "Search the documents.\nReturns at most ten.",
    {
        "title": "SearchArguments",
        "type": "object",
        "$defs": {
            "Range": {
                "title": "Range",
                "type": "object",
                "properties": {"since": {"type": "string", "format": "date"}, "until": {"type": "string"}},
                "required": ["since"],
            }
        },
        "properties": {
            "query": {"title": "Query", "type": "string", "minLength": 1},
            "limit": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 10}, {"type": "null"}], "default": None},
            "range": {"anyOf": [{"$ref": "#/$defs/Range"}, {"type": "null"}], "description": "When\nit was written"},
            "kinds": {"type": "array", "items": {"enum": ["page", "note"]}},
            "sort-by": {"const": "date"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["query"],
        "additionalProperties": False,
    },
)
NOW = FunctionTool("now", "The time.", {"type": "object", "properties": {}})
QUESTION = UserMessage("What is the weather in Köln?")
CALL = AssistantCall("call_1", "get_weather", '{"city": "Köln"}')
RESULT = ToolResult("call_1", "get_weather", '{"celsius": 9}')

CASES = {
    "plain": Conversation(Preamble(date=DAY), (UserMessage("Hello!"),)),
    "no_date": Conversation(Preamble(), (UserMessage("Hello!"),)),
    "effort_low": Conversation(Preamble(date=DAY, effort=Effort.LOW), (UserMessage("Hello!"),)),
    "effort_high": Conversation(Preamble(date=DAY, effort=Effort.HIGH), (UserMessage("Hello!"),)),
    "instructions": Conversation(Preamble("Answer in one line.", date=DAY), (UserMessage("Hello!"),)),
    "tools": Conversation(Preamble("Use the tools.", (WEATHER, SEARCH, NOW), date=DAY), (QUESTION,)),
    "tool_round_trip": Conversation(
        Preamble(tools=(WEATHER,), date=DAY),
        (QUESTION, AssistantReasoning("The user wants the weather. Call the tool."), CALL, RESULT),
    ),
    "two_calls": Conversation(
        Preamble(tools=(WEATHER, SEARCH), date=DAY),
        (
            *(QUESTION, CALL, RESULT, AssistantCall("call_2", "docs.search", '{"query":"rain"}')),
            ToolResult("call_2", "docs.search", "Nothing found."),
        ),
    ),
    "preamble": Conversation(
        Preamble(tools=(WEATHER,), date=DAY),
        (
            QUESTION,
            AssistantReasoning("Tell, then call."),
            AssistantMessage("I look it up.", Phase.COMMENTARY),
            CALL,
            RESULT,
        ),
    ),
    "answered_turn_loses_its_reasoning": Conversation(
        Preamble(tools=(WEATHER,), date=DAY),
        (
            *(QUESTION, AssistantReasoning("Dropped."), CALL, RESULT, AssistantReasoning("Dropped too.")),
            *(AssistantMessage("9 degrees."), UserMessage("And in Bonn?"), AssistantReasoning("Kept.")),
            AssistantCall("call_3", "get_weather", '{"city": "Bonn"}'),
            ToolResult("call_3", "get_weather", '{"celsius": 10}'),
        ),
    ),
    "prefill": Conversation(Preamble(date=DAY), (UserMessage("Name a colour."),), "The colour is"),
    "developer_in_the_middle": Conversation(
        Preamble("Be brief.", date=DAY),
        (UserMessage("Hi"), AssistantMessage("Hello."), DeveloperMessage("From now on, rhyme."), UserMessage("Again")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_prompt_equals_the_golden_file(encoding: Encoding, case: str) -> None:
    conversation = CASES[case]
    tools = plan_tools(conversation.preamble.tools)
    golden = (GOLDEN / f"{case}.txt").read_bytes().decode()
    renderer = Renderer(encoding)
    assert renderer.prompt(conversation, tools) == encoding.encode_marked(golden)
    assert renderer.text_prompt(conversation, tools) == golden


def test_every_golden_file_has_a_conversation() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == CASES.keys()
