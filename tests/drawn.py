"""Hypothesis strategies for conversation items: every kind, with any text and any tokens."""

from __future__ import annotations

from hypothesis import strategies as st

from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    FunctionTool,
    Item,
    Phase,
    ToolResult,
    UserMessage,
)
from unisono.core.generation import VOCABULARY

text = st.text(st.characters(codec="utf-8"), max_size=30)
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=8).map(tuple)
tool = st.builds(FunctionTool, text, text, st.none() | st.just({"type": "object"}), st.booleans(), st.booleans(), text)
item: st.SearchStrategy[Item] = st.one_of(
    st.builds(UserMessage, text),
    st.builds(DeveloperMessage, text),
    st.builds(AssistantReasoning, text, tokens),
    st.builds(AssistantMessage, text, st.sampled_from(Phase), tokens),
    st.builds(AssistantCall, text, text, text, tokens),
    st.builds(ToolResult, text, text, text),
    st.builds(AddedTools, st.lists(tool, max_size=3).map(tuple)),
)
