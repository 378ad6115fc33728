"""Raw Harmony output that a client sends back as the text of an assistant message."""

from __future__ import annotations

import re

from unisono.core.conversation import AssistantMessage, AssistantReasoning, Item, Phase

_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant)?<\|channel\|>(analysis|commentary|final)\s*(?:<\|constrain\|>\w+\s*)?<\|message\|>"
)
_TERMINATOR = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|(?:start|channel)\|>)|\Z")


def split_markers(text: str, visible: Phase) -> list[Item]:
    """Convert an assistant's text, which may begin with raw Harmony messages, to items.

    A client that once received raw Harmony output as text sends it back as content. The messages at the beginning of
    such a text are restored. The rest becomes one message of the phase `visible`.
    """
    items: list[Item] = []
    position = 0
    while header := _HEADER.match(text, position):
        end = _TERMINATOR.search(text, header.end())
        assert end is not None
        body, position = text[header.end() : end.start()], end.end()
        match header[1]:
            case "analysis":
                items += [AssistantReasoning(body)] if body else []
            case "commentary":
                items += [AssistantMessage(body, Phase.COMMENTARY)] if body else []
            case _:
                rest = body + text[position:]
                return [*items, AssistantMessage(rest, visible)] if rest else items
    rest = text[position:]
    return [*items, AssistantMessage(rest, visible)] if rest else items
