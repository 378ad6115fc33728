"""Prompts that token counts rendered, so that the generation need not render them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from unisono.core.conversation import AnswerForm, Conversation
from unisono.core.tools import LeftOutTool
from unisono.engine.prompts import RenderedPrompt
from unisono.engine.turn import GenerationRequest, RequestKey
from unisono.harmony.tools import ToolSet


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A request's conversation as it is rendered, and its checked tools with their names.

    `left_out`: some server tools could not be declared. `left_out_tools` lists them by server.
    """

    conversation: Conversation
    tools: ToolSet
    left_out: bool = False
    left_out_tools: Mapping[str, Sequence[LeftOutTool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """A prompt rendered by a token count, with the request fields that it was made from."""

    conversation: Conversation
    form: AnswerForm | None
    prepared: PreparedPrompt
    rendered: RenderedPrompt


class CountedPrompts:
    """Table of counted prompts by request.

    A request and its modified copies share one entry. The entry is dropped with the last of them.
    """

    def __init__(self) -> None:
        self._prompts: WeakKeyDictionary[RequestKey, CountedPrompt] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._prompts)

    def record(self, request: GenerationRequest, prepared: PreparedPrompt, rendered: RenderedPrompt) -> None:
        self._prompts[request.key] = CountedPrompt(request.conversation, request.form, prepared, rendered)

    def find(self, request: GenerationRequest) -> CountedPrompt | None:
        """Return the request's prompt; None if it was not counted or a hook changed its conversation or form."""
        counted = self._prompts.get(request.key)
        if counted is None or counted.conversation is not request.conversation or counted.form is not request.form:
            return None
        return counted
