"""Context management: the newest compaction block, and edits that clear old content.

A compaction block replaces everything before it. The edits clear old results and reasoning from a conversation before
it is rendered. An edit is not applied if it would clear fewer tokens than the client's minimum. The prompt then still
matches the backend's prompt cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final, assert_never

from unisono.api.gateway_tools import BROWSER, PYTHON
from unisono.api.messages.content_blocks import CompactionBlock
from unisono.api.messages.context_management_schema import ALL, ClearThinking, ClearToolUses, CompactEdit, Edit
from unisono.api.messages.schema import MessageParam
from unisono.api.messages.server_tools import CODE, NAMES
from unisono.core.conversation import (
    AssistantCall,
    AssistantReasoning,
    Conversation,
    Item,
    ToolResult,
    UserMessage,
)
from unisono.core.frozen import dataclass
from unisono.core.tool_host import SEPARATOR, ToolNames
from unisono.engine.request import GenerationRequest, GenerationService, RequestKey


def last_compaction(messages: Sequence[MessageParam]) -> tuple[int, int] | None:
    """Return the index of the message with the newest compaction block, and of the block in it.

    Returns None if there is no compaction block with a summary.
    """
    return next(
        (
            (position, place)
            for position in reversed(range(len(messages)))
            for place in reversed(range(len(messages[position].content)))
            if isinstance(block := messages[position].content[place], CompactionBlock) and block.content
        ),
        None,
    )


async def first_read_position(messages: Sequence[Any]) -> int:
    """Return the index of the first message that the model reads.

    This is the message with the newest compaction block, or 0 if there is no such block.
    """
    # This function runs before validation. It is a coroutine because its counterpart in the Responses API, which has to
    # decrypt items, is one.
    for position in reversed(range(len(messages))):
        content = messages[position].get("content") if isinstance(messages[position], dict) else None
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        if any(block.get("type") == "compaction" and block.get("content") for block in blocks):
            return position
    return 0


# Maximum number of tools, as pairs of a server and a name, for which an edit determines the model's name. Without this
# limit, the names in a small request could take minutes.
MAX_NAMED_TOOLS: Final = 1_000

# Text that the model reads instead of a cleared result.
CLEARED_RESULT: Final = "[The result of this old tool call was cleared to save space.]"
CLEARED_ARGUMENTS: Final = "{}"
# Names of server tools in this API, by the model's names for the tools.
CLIENT_NAMES: Final = {f"{BROWSER}.{tool}": name for (_, tool), name in NAMES.items()} | {PYTHON: CODE}
# Response fields with the number of cleared tool uses or turns, by the type of the edit.
COUNTED: Final = {"clear_tool_uses_20250919": "cleared_tool_uses", "clear_thinking_20251015": "cleared_thinking_turns"}


@dataclass(frozen=True, slots=True)
class EditedRequest:
    """Request after its edits.

    `applied` contains a report for each edit that was applied. `original_tokens` and `tokens` are the numbers of prompt
    tokens before and after the edits, or None if no tokens were counted.
    """

    request: GenerationRequest
    applied: tuple[dict[str, Any], ...] = ()
    original_tokens: int | None = None
    tokens: int | None = None


async def edited(service: GenerationService, request: GenerationRequest, edits: Sequence[Edit]) -> EditedRequest:
    """Apply the edits in order.

    Raises the errors of `GenerationService.count`, if the conversation or the tools are invalid.
    """
    applied: list[dict[str, Any]] = []
    original = tokens = None
    for edit in (_with_model_names(edit, request) for edit in edits):
        conversation, count = _cleared(request.conversation, edit)
        if not count or isinstance(edit, CompactEdit):
            continue
        if tokens is None:
            original = tokens = await service.count(request)
        if tokens <= edit.trigger_tokens:
            continue
        changed = replace(request, conversation=conversation, origin=replace(request.origin, key=RequestKey()))
        left = await service.count(changed)
        if tokens - left < max(1, edit.least_tokens):
            continue
        applied.append({"type": edit.type, COUNTED[edit.type]: count, "cleared_input_tokens": tokens - left})
        request, tokens = changed, left
    return EditedRequest(request, tuple(applied), original, tokens)


def _with_model_names(edit: Edit, request: GenerationRequest) -> Edit:
    """Return the edit with the model's tool names in addition to the client's tool names."""
    if not isinstance(edit, ClearToolUses):
        return edit
    conversation = request.conversation
    client = frozenset(tool.name for tool in (*conversation.preamble.tools, *conversation.deferred))
    labels = {server.label for server in request.server_tools.servers} if request.server_tools else set()
    # The conversation may contain calls to servers that this request does not name.
    called = {item.name for item in conversation.items if isinstance(item, AssistantCall)} - client

    def known(names: Collection[str]) -> list[str]:
        wanted = dict.fromkeys(names)
        builtin = (own for own, shown in CLIENT_NAMES.items() if shown in wanted)
        of_servers = (name for name in called if name.partition(SEPARATOR)[2] in wanted)
        # A long name is shortened, so the parts of such a name cannot be read from it.
        is_small = len(labels) * len(wanted) <= MAX_NAMED_TOOLS
        pairs = [(label, name) for label in sorted(labels) for name in wanted] if is_small else []
        return [*wanted, *builtin, *of_servers, *ToolNames(pairs, reserved=client)]

    inputs = edit.clear_tool_inputs
    names = {"exclude_tools": known(edit.exclude_tools or ())}
    return edit.model_copy(update=names | ({"clear_tool_inputs": known(inputs)} if isinstance(inputs, list) else {}))


def _cleared(conversation: Conversation, edit: Edit) -> tuple[Conversation, int]:
    """Return the conversation after an edit, and the number of cleared tool uses or turns."""
    match edit:
        case ClearToolUses():
            return without_tool_uses(conversation, edit)
        case ClearThinking():
            return without_thinking(conversation, edit)
        case CompactEdit():
            return conversation, 0
        case _:
            assert_never(edit)


def without_tool_uses(conversation: Conversation, edit: ClearToolUses) -> tuple[Conversation, int]:
    """Clear the results of all tool uses except the newest ones.

    Returns the new conversation and the number of results that were cleared.
    """
    items = list(conversation.items)
    results = [position for position, item in enumerate(items) if isinstance(item, ToolResult)]
    if edit.trigger.type == "tool_uses" and len(results) <= edit.trigger.value:
        return conversation, 0
    excluded, cleared = frozenset(edit.exclude_tools or ()), set[str]()
    count = 0
    for position in results[: max(0, len(results) - edit.keep.value)]:
        result = items[position]
        assert isinstance(result, ToolResult)
        if result.name not in excluded:
            items[position] = replace(result, output=CLEARED_RESULT)
            cleared.add(result.call_id)
            count += 1
    inputs = edit.clear_tool_inputs
    wanted = frozenset(inputs) if isinstance(inputs, list) else bool(inputs)
    return replace(conversation, items=tuple(_without_arguments(item, cleared, wanted) for item in items)), count


def _without_arguments(item: Item, cleared: Collection[str], wanted: Collection[str] | bool) -> Item:
    if not isinstance(item, AssistantCall) or item.call_id not in cleared or not wanted:
        return item
    if wanted is True or item.name in wanted:
        return replace(item, arguments=CLEARED_ARGUMENTS, tokens=())
    return item


def without_thinking(conversation: Conversation, edit: ClearThinking) -> tuple[Conversation, int]:
    """Leave out the reasoning of all turns except the newest ones.

    A turn is everything between two user messages, such as a whole loop of tool calls. Returns the new conversation and
    the number of turns without reasoning.
    """
    if edit.keep.type == ALL:
        return conversation, 0
    starts: list[int] = []
    before_turn = True
    for position, item in enumerate(conversation.items):
        if isinstance(item, UserMessage):
            before_turn = True
        elif before_turn and isinstance(item, AssistantReasoning | AssistantCall):
            starts.append(position)
            before_turn = False
    old = len(starts) - (edit.keep.value or 1)
    return (replace(conversation, reasoning_from=starts[old]), old) if old > 0 else (conversation, 0)
