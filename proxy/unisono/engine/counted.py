"""Prompt cache of a request: reuses the prompt that was rendered for a token count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.core.conversation import AnswerForm, Conversation
from unisono.core.tools import LeftOutTool
from unisono.engine.prompts import RenderedPrompt
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


@dataclass(slots=True)
class PromptCache:
    """Cache of one prompt, shared by a request and its modified copies.

    It is empty before the first count. A request whose conversation or form was changed by a hook finds nothing.
    """

    _asked: tuple[Conversation, AnswerForm | None] | None = None
    _found: tuple[PreparedPrompt, RenderedPrompt] | None = None

    def keep(
        self, conversation: Conversation, form: AnswerForm | None, prepared: PreparedPrompt, rendered: RenderedPrompt
    ) -> None:
        self._asked, self._found = (conversation, form), (prepared, rendered)

    def of(self, conversation: Conversation, form: AnswerForm | None) -> tuple[PreparedPrompt, RenderedPrompt] | None:
        if self._asked is None or self._asked[0] is not conversation or self._asked[1] is not form:
            return None
        return self._found
