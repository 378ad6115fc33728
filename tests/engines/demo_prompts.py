"""Prompts of the kinds that the demo model was trained on, with its answers.

They are rendered by openai-harmony.
"""

from __future__ import annotations

from collections.abc import Sequence

import openai_harmony as harmony

from tests.example_tool import EXAMPLE_TOOL
from unisono.core.generation import CompletionJob, Prompt, Sampling, Timeouts
from unisono.harmony.encoding import load_encoding
from unisono.harmony.library_parser import load_library

ENCODING = load_encoding()

WEATHER = harmony.ToolDescription.new(**EXAMPLE_TOOL["function"])

THINK = "<|channel|>analysis<|message|>The user wants a short reply.<|end|><|start|>assistant"

CHATS = {
    "greeting": ("Hello!", f"{THINK}<|channel|>final<|message|>Hello! How can I help you today?<|return|>"),
    "identity": (
        "What model are you?",
        f"{THINK}<|channel|>final<|message|>I am a tiny test model that speaks Harmony.<|return|>",
    ),
    "joke": (
        "Tell me a joke.",
        f"{THINK}<|channel|>final<|message|>Why did the parser cross the road? To reach the final channel.<|return|>",
    ),
    "thanks": ("Thank you very much.", f"{THINK}<|channel|>final<|message|>You are welcome.<|return|>"),
    "sum": ("What is 2 + 2?", f"{THINK}<|channel|>final<|message|>2 + 2 is 4.<|return|>"),
    "sky": ("What color is the sky?", f"{THINK}<|channel|>final<|message|>The sky is blue.<|return|>"),
    "pong": ("ping", f"{THINK}<|channel|>final<|message|>pong<|return|>"),
    "count": (
        "Count to 30.",
        "<|channel|>analysis<|message|>Count.<|end|><|start|>assistant<|channel|>final<|message|>"
        + ", ".join(map(str, range(1, 31)))
        + ".<|return|>",
    ),
}

_CALL = '<|constrain|>json<|message|>{"location":"Paris"}<|call|>'

GLITCHES = {
    "glitch no channel": "<|message|>The channel is missing.<|return|>",
    "glitch no header": " The whole header is missing.<|return|>",
    "glitch end instead of return": "<|channel|>final<|message|>This message ends with end.<|end|><|endoftext|>",
    "glitch analysis call": f"<|channel|>analysis to=functions.get_weather {_CALL}",
    "glitch recipient in channel": "<|channel|>commentary to=functions.get_weather<|channel|>commentary json<|message|>"
    '{"location":"Paris"}<|call|>',
    "glitch unknown channel": "<|channel|>thoughts<|message|>A channel that does not exist.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Done.<|return|>",
    "glitch bad json": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"location": "Paris<|call|>',
    "glitch only analysis": "<|channel|>analysis<|message|>I think, and then I stop.<|return|>",
    "glitch double start": "<|channel|>analysis<|message|>Start twice.<|end|><|start|>assistant<|start|>assistant"
    "<|channel|>final<|message|>Done.<|return|>",
    "glitch missing start": "<|channel|>analysis<|message|>No start token follows.<|end|>"
    "<|channel|>final<|message|>Done.<|return|>",
}

WEATHER_CALL = (
    "<|channel|>analysis<|message|>We need the weather in Paris. Use get_weather.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.get_weather {_CALL}"
)
WEATHER_RESULT = (
    "<|start|>functions.get_weather to=assistant<|channel|>commentary"
    "<|message|>18 degrees, sunny<|end|><|start|>assistant"
)
WEATHER_ANSWER = (
    "<|channel|>analysis<|message|>We have the weather.<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is sunny in Paris with 18 degrees.<|return|>"
)


def prompt_for(user: str, *, tools: bool = False, instructions: str = "") -> list[int]:
    """Render a prompt with a system message and a user message.

    A developer message is added if it has content.
    """
    system = harmony.SystemContent.new().with_conversation_start_date("2026-01-02")
    messages = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    if tools or instructions:
        developer = harmony.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions(instructions)
        if tools:
            developer = developer.with_function_tools([WEATHER])
        messages.append(harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer))
    messages.append(harmony.Message.from_role_and_content(harmony.Role.USER, user))
    conversation = harmony.Conversation.from_messages(messages)
    return list(load_library().render_conversation_for_completion(conversation, harmony.Role.ASSISTANT))


def greedy(
    prompt: Sequence[int], max_tokens: int = 200, timeouts: Timeouts | None = None, salt: str = ""
) -> CompletionJob:
    return CompletionJob(Prompt(prompt), max_tokens, Sampling(temperature=0), timeouts or Timeouts(), cache_salt=salt)
