"""Pure conversion of a request's messages to conversation items in the model's order.

Each text block of an assistant message becomes one message of the model. The last text block is the final answer,
unless the message has a client call, or a server tool call after this block. All other texts are commentary. Adjacent
text blocks with citations are joined to one text. Reasoning is read only if this gateway signed or sealed it. A block
that cannot be read is left out with a note. An error would end the session, because clients send the block again with
every later request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final, Protocol

from pydantic import ValidationError

from unisono.api.client_toolbox import to_toolbox
from unisono.api.compaction_summary import pending_calls
from unisono.api.content_parts import join
from unisono.api.field_types import MAX_MESSAGES
from unisono.api.harmony_in_history import split_markers
from unisono.api.history_builder import History
from unisono.api.messages.content_blocks import (
    TOOL_REMOVAL,
    ChangedTool,
    CompactionBlock,
    ContentBlock,
    RedactedBlock,
    ServerResultBlock,
    ServerUseBlock,
    TextBlock,
    ThinkingBlock,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    has_citations,
    text_of,
)
from unisono.api.messages.schema import MessageParam, MessagesTool
from unisono.api.messages.server_tools import is_encrypted, references_in, result_text, sealed_in, to_declared
from unisono.api.messages.tool_input import to_arguments
from unisono.api.tool_calls import to_gateway_id
from unisono.api.unused_fields import without_effect
from unisono.core.conversation import (
    SUMMARY_HEADINGS,
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
from unisono.core.tool_host import ToolNames
from unisono.errors import InvalidRequest

# Prefix of a failed tool result, because Harmony has no field for a failure.
FAILED: Final = "Error"
NOT_OURS: Final = "no effect, because it was changed, or is not from this gateway"
NOT_ADDED: Final = (
    "no effect, because the tool is declared already, is not available, or has no valid definition; "
    "use the name of a deferred tool, or a complete definition"
)


class SealedBlocks(Protocol):
    """Reader of data that this gateway has sealed or signed, and that clients send back."""

    def open(self, tenant: str, text: str) -> tuple[Item, ...] | None:
        """Return the sealed items; None if this gateway did not seal `text` for this tenant."""
        ...

    def session(self, tenant: str, text: str) -> str:
        """Return the tool server session in a seal; "" if there is none or the seal is invalid."""
        ...

    def signed(self, tenant: str, text: str, signature: str) -> bool: ...


class HistoryReader:
    """Converter of messages, which are added in order.

    `seals` may be None if no block is sealed or signed. `deferred` contains the deferred tools by name. The model sees
    the declaration of a deferred tool at the position of the first `tool_reference` with the tool's name.
    `client_tools` are the names of the client's tools.
    """

    def __init__(
        self,
        tenant: str,
        seals: SealedBlocks | None = None,
        deferred: Mapping[str, FunctionTool] | None = None,
        client_tools: Iterable[str] = (),
    ) -> None:
        self.history = History()
        self.notes = self.history.notes
        self._tenant = tenant
        self._seals = seals
        self._deferred = deferred or {}
        # The model's names of MCP tools in calls that are not sealed.
        self._names = ToolNames(reserved=client_tools)
        # Server tool calls of the current message with their results, as this gateway sealed them, by call id.
        self._sealed: dict[str, tuple[AssistantCall, ToolResult]] = {}
        # Ids of all server tool calls in the current message.
        self._served_calls: frozenset[str] = frozenset()
        # Names of the tools that the model must not call any more.
        self.removed: set[str] = set()

    def add(self, position: int, message: MessageParam, begin: int = 0) -> None:
        """Add the blocks of the message at index `position`, from block index `begin` on.

        Raises InvalidRequest for a block that cannot be converted. The error names the block.
        """
        blocks = _placed(position, message, begin)
        match message.role:
            case "user":
                self._user(blocks)
            case "assistant":
                self._assistant(blocks)
            case "system":
                if text := self.instructions(position, message):
                    self.history.add(DeveloperMessage(text))
                self._change_tools(blocks)

    def instructions(self, position: int, message: MessageParam) -> str:
        """Return the instructions in the system message at index `position`."""
        self.notes += without_effect(f"messages.{position}.", message.model_extra or {})
        blocks = _placed(position, message)
        return text_of([entry for entry in blocks if not isinstance(entry[1], ToolChangeBlock)], self.notes)

    def add_compacted(self, messages: Sequence[MessageParam], position: int, place: int) -> None:
        """Add the message at index `position`, whose block at index `place` is a compaction.

        The compaction replaces all earlier messages, and all earlier blocks of this message.
        """
        message = messages[position]
        block = message.content[place]
        assert isinstance(block, CompactionBlock)
        summaries = [UserMessage(heading + (block.content or "")) for heading in SUMMARY_HEADINGS]
        sealed = block.encrypted_content
        opened = self._seals.open(self._tenant, sealed) if sealed and self._seals is not None else None
        # A block from another server has only the summary. A summary that the client has changed is used as it is.
        is_unchanged = opened is not None and any(summary in opened for summary in summaries)
        items: Sequence[Item] = opened if opened is not None and is_unchanged else summaries[:1]
        if len(message.content) == 1:
            # The answer paused after the compaction, and the client may have sent its newest messages again.
            later = [each for each in messages[position + 1 :] if each.role == "user"]
            texts = {_user_text(each) for each in later}
            blocks = (block for each in later for block in each.content)
            results = {to_gateway_id(block.tool_use_id) for block in blocks if isinstance(block, ToolResultBlock)}
            items = [item for item in items if not _is_repeated(item, texts, results)]
        for item in items:
            # The results of calls may follow, and a preamble between the calls does not separate them.
            match item:
                case AssistantCall():
                    self.history.call(item)
                case ToolResult():
                    self.history.result(item)
                case AssistantReasoning() | AssistantMessage():
                    self.history.add_within_exchange(item)
                case _:
                    self.history.add(item)
        self.history.move_if_repeated(pending_calls(items))
        at = f"messages.{position}.content.{place}.tool_changes"
        changes = [(f"{at}.{index}", change) for index, change in enumerate(block.tool_changes or ())]
        # The items in this gateway's own blocks already contain the notices about removed tools.
        told = [change for _, change in changes if _removal_notice(change) in items]
        replaced = [block for each in messages[:position] for block in each.content]
        self._track_removals([*replaced, *message.content[:place], *told])
        self._change_tools(change for change in changes if change[1] not in told)
        if message.content[place + 1 :]:
            self.add(position, message, place + 1)

    def items(self) -> tuple[Item, ...]:
        self.history.check_results()
        items = self.history.items()
        if len(items) > MAX_MESSAGES:
            raise InvalidRequest(
                f"'messages' contains more than {MAX_MESSAGES:,} messages, calls and results.", param="messages"
            )
        return items

    def _user(self, blocks: Sequence[tuple[str, ContentBlock]]) -> None:
        others: list[tuple[str, ContentBlock]] = []
        for at, block in blocks:
            if isinstance(block, ToolResultBlock):
                self._result(at, block)
            elif not isinstance(block, ToolChangeBlock):
                others.append((at, block))
        # A message that contains only tool results adds no user message. An empty message adds one, because the client
        # sent it on purpose.
        text = text_of(others, self.notes)
        if text or not blocks:
            self.history.add(UserMessage(text))
        self._change_tools(blocks)

    def _result(self, at: str, block: ToolResultBlock) -> None:
        call_id = to_gateway_id(block.tool_use_id)
        inner = [(f"{at}.content.{place}", part) for place, part in enumerate(block.content)]
        output = text_of(inner, self.notes)
        if block.is_error and not output.lower().startswith(FAILED.lower()):
            output = f"{FAILED}: {output}" if output else FAILED
        # Harmony names the tool in the header of a result. Anthropic's result has only the id of its call.
        name = self.history.name_of(call_id, f"{at}.tool_use_id", sent=block.tool_use_id)
        self.history.result(ToolResult(call_id, name, output))
        references = [part.tool_name for part in block.content if isinstance(part, ToolReferenceBlock)]
        self._add_found(references)

    def _add_found(self, names: Iterable[str]) -> None:
        """Declare the deferred tools that a search found."""
        if found := tuple(self._deferred[name] for name in names if name in self._deferred):
            # The results of parallel calls may follow.
            self.history.add_within_exchange(AddedTools(found))

    def _track_removals(self, blocks: Iterable[ContentBlock]) -> None:
        """Update `removed` with the tool changes in blocks that the model does not read."""
        for block in blocks:
            if isinstance(block, CompactionBlock):
                self._track_removals(block.tool_changes or ())
            elif isinstance(block, ToolChangeBlock) and block.type == TOOL_REMOVAL:
                self.removed.add(block.tool_name)
            elif isinstance(block, ToolChangeBlock):
                self.removed -= {tool.name for tool in self._tools_of(block.tool)} or {block.tool_name}

    def _change_tools(self, blocks: Iterable[tuple[str, ContentBlock]]) -> None:
        """Declare the added tools at the current position, and tell the model of removed tools."""
        for at, block in blocks:
            if not isinstance(block, ToolChangeBlock):
                continue
            name = block.tool_name
            if (notice := _removal_notice(block)) is not None:
                self.removed.add(name)
                self.history.add_within_exchange(notice)
                continue
            tools = self._tools_of(block.tool, at)
            names = {tool.name for tool in tools} or {name}
            if tools:
                self.history.add_within_exchange(AddedTools(tools))
            elif name not in self.removed:
                self.notes.append(f"{at}: {NOT_ADDED}")
            # The prompt declares a tool only once. A tool that is added again therefore needs this sentence.
            for again in sorted(names & self.removed):
                self.history.add_within_exchange(DeveloperMessage(f"You can call this tool again: {again}"))
            self.removed -= names

    def _tools_of(self, tool: ChangedTool, at: str = "") -> tuple[FunctionTool, ...]:
        """Return the tool that a block adds: a deferred tool, or a tool with its own definition.

        The result is empty if the tool is unknown or its definition is invalid.
        """
        if tool.definition is None:
            found = self._deferred.get(tool.name or "")
            return () if found is None else (found,)
        with suppress(ValidationError, InvalidRequest):
            definition = MessagesTool.model_validate(tool.definition)
            return to_toolbox([to_declared(definition, f"{at}.tool.definition")]).tools
        return ()

    def _assistant(self, blocks: Sequence[tuple[str, ContentBlock]]) -> None:
        self._sealed = {
            to_gateway_id(block.tool_use_id): sealed_call
            for _, block in blocks
            if isinstance(block, ServerResultBlock) and (sealed_call := self._sealed_call(block)) is not None
        }
        self._served_calls = frozenset(
            to_gateway_id(block.id) for _, block in blocks if isinstance(block, ServerUseBlock)
        )
        # A message is one exchange, so text between its calls does not separate the calls from their results.
        self.history.add()
        # The last text is the answer only if no call follows. Otherwise the model wrote the text to announce a call.
        calls = [place for place, (_, block) in enumerate(blocks) if isinstance(block, ToolUseBlock | ServerUseBlock)]
        texts = [place for place, (_, block) in enumerate(blocks) if isinstance(block, TextBlock) and block.text]
        hands_over = any(isinstance(block, ToolUseBlock) for _, block in blocks)
        answers = bool(texts) and not hands_over and texts[-1] > max(calls, default=-1)
        place = 0
        for is_text, group in groupby(blocks, key=lambda entry: isinstance(entry[1], TextBlock)):
            group_blocks = list(group)
            if is_text:
                last = answers and place <= texts[-1] < place + len(group_blocks)
                self._texts(
                    [block.text for _, block in group_blocks if isinstance(block, TextBlock)],
                    has_citations(group_blocks),
                    last,
                )
            else:
                for at, block in group_blocks:
                    self._other_block(at, block)
            place += len(group_blocks)

    def _texts(self, texts: Sequence[str], is_one: bool, is_answer: bool) -> None:
        some = [join(texts, param="messages")] if is_one else [text for text in texts if text]
        for place, text in enumerate(some, 1):
            final = is_answer and place == len(some)
            self.history.add_within_exchange(*split_markers(text, Phase.FINAL if final else Phase.COMMENTARY))

    def _other_block(self, at: str, block: ContentBlock) -> None:
        match block:
            case ThinkingBlock():
                self.history.add_within_exchange(*self._reasoning_items(at, block))
            case RedactedBlock():
                self.history.add_within_exchange(*self._opened(block.data, at))
            case ToolUseBlock():
                self.history.call(AssistantCall(to_gateway_id(block.id), block.name, to_arguments(block.input)))
            case ServerUseBlock():
                sealed_call = self._sealed.get(to_gateway_id(block.id))
                name = self._names.add(block.mcp_server, block.name) if block.mcp_server else block.name
                own = AssistantCall(to_gateway_id(block.id), name, to_arguments(block.input))
                self.history.call(own if sealed_call is None else sealed_call[0])
            case ServerResultBlock():
                self._server_result(at, block)
            case ToolResultBlock():
                self._result(at, block)
            case ToolChangeBlock():
                self._change_tools([(at, block)])
            case _:
                self.history.add_within_exchange(*split_markers(text_of([(at, block)], self.notes), Phase.COMMENTARY))

    def _server_result(self, at: str, block: ServerResultBlock) -> None:
        call_id = to_gateway_id(block.tool_use_id)
        sealed_call = self._sealed.get(call_id)
        if sealed_call is not None and call_id not in self._served_calls:
            # Clients may omit the calls to tools that they did not declare, but send the results.
            self.history.call(sealed_call[0])
        if sealed_call is not None:
            self.history.result(sealed_call[1])
        else:
            # Conversations from other servers may have no call for the result.
            is_known = self.history.has_call(call_id)
            name = self.history.name_of(call_id, at) if is_known else block.type.removesuffix("_tool_result")
            text = result_text(block.content)
            self.history.result(ToolResult(call_id, name, text))
            if not text and is_encrypted(block.content):
                self.notes.append(f"{at}: no effect, because only the server that encrypted it can read it")
        self._add_found(references_in(block.content))

    def _sealed_call(self, block: ServerResultBlock) -> tuple[AssistantCall, ToolResult] | None:
        """Return the call and the result that this gateway sealed in a result block, or None."""
        sealed = sealed_in(block)
        items = self._seals.open(self._tenant, sealed) if sealed and self._seals is not None else None
        if items is None or len(items) != 2:
            return None
        call, result = items
        if not (isinstance(call, AssistantCall) and isinstance(result, ToolResult)):
            return None
        return (call, result) if call.call_id == result.call_id == to_gateway_id(block.tool_use_id) else None

    def _reasoning_items(self, at: str, block: ThinkingBlock) -> Sequence[Item]:
        # If reasoning was omitted from the answer, its block has no text, and the signature is the sealed reasoning.
        # Anybody could have written unsigned reasoning, so the model does not see it.
        if self._seals is not None and block.thinking:
            if self._seals.signed(self._tenant, block.thinking, block.signature):
                return [AssistantReasoning(block.thinking)]
        elif self._seals is not None:
            return self._opened(block.signature, at)
        self.notes.append(f"{at}: {NOT_OURS}")
        return ()

    def _opened(self, sealed: str, at: str) -> Sequence[Item]:
        items = None if self._seals is None else self._seals.open(self._tenant, sealed)
        if items is None or not all(isinstance(item, AssistantReasoning) for item in items):
            self.notes.append(f"{at}: {NOT_OURS}")
            return ()
        return items


def _removal_notice(block: ContentBlock) -> DeveloperMessage | None:
    """Return the message that tells the model about a removed tool; None for any other block."""
    if not isinstance(block, ToolChangeBlock) or block.type != TOOL_REMOVAL:
        return None
    return DeveloperMessage(f"From now on, do not call this tool: {block.tool_name}")


def _placed(position: int, message: MessageParam, begin: int = 0) -> list[tuple[str, ContentBlock]]:
    """Return the blocks of a message from the index `begin` on, each with its path."""
    at = f"messages.{position}.content"
    return [(f"{at}.{place}", block) for place, block in enumerate(message.content[begin:], begin)]


def _is_repeated(item: Item, texts: Collection[str], results: Collection[str]) -> bool:
    """Return whether the client sent `item` again in later messages.

    `texts` are the texts of the later user messages. `results` are the ids of the calls whose results they contain.
    """
    is_message = isinstance(item, UserMessage) and item.text in texts
    return is_message or (isinstance(item, ToolResult) and item.call_id in results)


def _user_text(message: MessageParam) -> str:
    return text_of([("", block) for block in message.content if isinstance(block, TextBlock)], [])
