"""Conversion of messages in `input`, including messages between agents."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.api.content_parts import join, text_of
from unisono.api.harmony_in_history import split_markers
from unisono.api.responses.input_conversion import InputConversion
from unisono.api.responses.input_items import InputAgentMessage, InputItem, InputMessage
from unisono.api.responses.items import SPOKEN
from unisono.core.conversation import DeveloperMessage, Item, Phase, UserMessage


def read_message(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputMessage)
    text = text_of(item.content, param=f"{param}.content")
    match item.role:
        case "user":
            return (UserMessage(text),)
        case "assistant":
            items = split_markers(text, SPOKEN.get(item.phase or "", Phase.FINAL))
            return conversion.exact(items[0], item.id) if len(items) == 1 else items
        case "system" | "developer":
            return (DeveloperMessage(text),)


def read_agent_message(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    """Convert a message between agents to a user message that names both agents."""
    assert isinstance(item, InputAgentMessage)
    # gpt-oss has no role for other agents. Without the names, the model would read the message as the user's own.
    names = f"Message from the agent {item.author} to the agent {item.recipient}:"
    text = text_of(item.content, param=f"{param}.content")
    return (UserMessage(join((names, text), "\n\n", param=param)),)
