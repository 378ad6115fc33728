"""What a turn's conversation was made into when its prompt was counted, for the run that begins with that prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.core.conversation import AnswerForm, Conversation
from unisono.core.tools import LeftOutTool
from unisono.engine.prompts import RenderedPrompt
from unisono.harmony.tools import ToolSet


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A turn's conversation as it is rendered, and its tools, named and checked. `left_out`: some hosted ones could not
    be declared, `left_out_tools` are those by server."""

    conversation: Conversation
    tools: ToolSet
    left_out: bool = False
    left_out_tools: Mapping[str, Sequence[LeftOutTool]] = field(default_factory=dict)


@dataclass(slots=True)
class PromptCache:
    """Goes with a turn, and with those that are made of it; empty before somebody counts. A turn that asks for
    something else by now, since a hook changed it, finds nothing here."""

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
