"""What the gateway remembers of stateless conversations, so that they stay token-exact.

A Chat client sends its history back as text. The ids the model really generated are found again here: by the call's id
and its content for tool turns, by content for answers. A continued conversation then extends the very tokens a backend
has cached, and the reasoning of a running tool turn survives clients that do not send it back. Forgetting is always
safe: what is not found is rendered from its text. Bounded, in process, per tenant.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import getsizeof

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Item,
    Phase,
    ToolResult,
    UserMessage,
    join_messages,
)
from unisono.core.events import Closed, HostedCall, Reasoning, Text, ToolCall

Generated = AssistantReasoning | AssistantMessage | AssistantCall

Kept = Generated | ToolResult
"""What is said in a turn: a hosted tool's result stands between what the model generated."""

MAX_DATES = 10_000
MAX_BYTES = 32 * 1024 * 1024
ENTRY_BYTES = 480
"""Key, entry, tuples, and the place in an ordered dictionary."""
MAX_ENTRY_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class _Entry:
    """Items without their tokens, and the tokens of each item in four bytes per id: as objects they take forty."""

    items: tuple[Kept, ...]
    tokens: tuple[bytes, ...]
    size: int

    @classmethod
    def of(cls, items: Sequence[Kept]) -> _Entry:
        tokens = tuple(b"" if isinstance(item, ToolResult) else array("I", item.tokens).tobytes() for item in items)
        bare = tuple(item if isinstance(item, ToolResult) else replace(item, tokens=()) for item in items)
        texts = sum(getsizeof(text) for item in bare for text in _texts(item))
        return cls(bare, tokens, ENTRY_BYTES + texts + sum(map(getsizeof, (*bare, *tokens))))

    def restored(self) -> tuple[Kept, ...]:
        return tuple(
            item if isinstance(item, ToolResult) else replace(item, tokens=tuple(array("I", tokens)))
            for item, tokens in zip(self.items, self.tokens, strict=True)
        )


def _texts(item: Kept) -> tuple[str, ...]:
    match item:
        case AssistantCall():
            return item.call_id, item.name, item.arguments
        case ToolResult():
            return item.call_id, item.name, item.output
        case _:
            return (item.text,)


class ConversationCache:
    """`max_bytes` bounds the memory of the entries; the least recently used entry is evicted first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._dates: OrderedDict[bytes, str] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of all entries, without the dates."""
        return self._size

    def recall(self, tenant: str, conversation: Conversation, *, dated: bool = False) -> Conversation:
        """The conversation with the generated ids of what the model said, and with its own first day, unless it is
        `dated` already."""
        items: list[Item] = []
        said: list[Generated] = []
        told = frozenset(item.call_id for item in conversation.items if isinstance(item, AssistantCall))
        for item in conversation.items:
            match item:
                case AssistantReasoning() | AssistantMessage():
                    said.append(item)
                case AssistantCall():
                    items += self._recall_call(tenant, said, item, told)
                    said = []
                case UserMessage() | DeveloperMessage() | ToolResult():
                    items += self._recall_answer(tenant, said)
                    said = []
                    items.append(item)
        items += self._recall_answer(tenant, said)
        recalled = replace(conversation, items=tuple(items))
        if dated:
            return recalled
        return replace(recalled, preamble=replace(conversation.preamble, date=self._date(tenant, conversation)))

    def record(
        self,
        tenant: str,
        closed: Iterable[Closed],
        *,
        opened: str = "",
        results: Mapping[str, ToolResult] | None = None,
        shown: Collection[str] = (),
    ) -> None:
        """Keep what the model generated in one turn. `opened` is the beginning of the first message where the client
        wrote it: the message's tokens hold it, its text does not. `results` are those of hosted calls, by their ids.
        `shown` are labels of servers whose calls the client sends back, with their results; it never sees the others,
        and the model did."""
        said: list[Kept] = []
        visible: list[AssistantMessage] = []
        before = 0  # index in `said` of the first item after the last call that was shown
        handed: tuple[bytes, tuple[Kept, ...]] | None = None
        for event in closed:
            if isinstance(event.item, HostedCall) and event.item.approval:
                # It stands in the conversation.
                continue
            if not event.tokens:
                return
            opened, begun = "", opened
            match event.item:
                case Reasoning():
                    said.append(AssistantReasoning(event.text, event.tokens))
                case Text(phase=phase):
                    message = AssistantMessage(begun + event.text, phase, event.tokens)
                    said.append(message)
                    visible.append(message)
                    if phase is Phase.FINAL:
                        self._keep_answer(tenant, visible)
                        said, before = [], 0
                case ToolCall(call_id=call_id, name=name):
                    said.append(AssistantCall(call_id, name, event.text, event.tokens))
                    handed = (_key(tenant, "call", call_id), tuple(said))
                    self._keep(*handed)
                    said, visible, before = [], [], 0
                case HostedCall(call_id=call_id, name=name, server=server):
                    said.append(AssistantCall(call_id, name, event.text, event.tokens))
                    if server in shown:
                        self._keep(_key(tenant, "call", call_id), tuple(said[before:]))
                    if results is not None and call_id in results:
                        said.append(results[call_id])
                    before = len(said) if server in shown else before
        if handed is not None and said and all(isinstance(item, AssistantCall | ToolResult) for item in said):
            # What was run beside the client's calls comes back with the last of them.
            key, items = handed
            self._keep(key, (*items, *said))

    def _keep_answer(self, tenant: str, messages: Sequence[AssistantMessage]) -> None:
        self._keep(_key(tenant, "answer", messages[-1].text), messages[-1:])
        if len(messages) > 1:
            # Chat clients send all messages of an answer back as one text.
            self._keep(_key(tenant, "answer", join_messages(each.text for each in messages)), messages)

    def _recall_call(
        self, tenant: str, said: Sequence[Generated], call: AssistantCall, told: Collection[str]
    ) -> Sequence[Item]:
        kept = _untold(self._find(_key(tenant, "call", call.call_id)), call.call_id, told)
        return kept if _same_turn(kept, said, call) else (*said, call)

    def _recall_answer(self, tenant: str, said: Sequence[Generated]) -> Sequence[Item]:
        items: list[Item] = []
        for item in said:
            items += self._answer(tenant, item) if isinstance(item, AssistantMessage) else (item,)
        return items

    def _answer(self, tenant: str, message: AssistantMessage) -> Sequence[Item]:
        if message.phase is not Phase.FINAL or message.tokens:
            return (message,)
        return self._find(_key(tenant, "answer", message.text)) or (message,)

    def _date(self, tenant: str, conversation: Conversation) -> str:
        """The first day of this conversation as far as it is known, so that midnight breaks no prefix cache."""
        today = conversation.preamble.date
        first = next((item.text for item in conversation.items if isinstance(item, UserMessage)), "")
        key = _key(tenant, "date", conversation.preamble.instructions, first)
        begun = any(isinstance(item, AssistantMessage | AssistantCall) for item in conversation.items)
        date = self._dates.get(key, today) if begun else today
        self._dates[key] = date
        self._dates.move_to_end(key)
        while len(self._dates) > MAX_DATES:
            self._dates.popitem(last=False)
        return date

    def _find(self, key: bytes) -> tuple[Kept, ...]:
        entry = self._entries.get(key)
        if entry is None:
            return ()
        self._entries.move_to_end(key)
        return entry.restored()

    def _keep(self, key: bytes, items: Sequence[Kept]) -> None:
        entry = _Entry.of(items)
        if entry.size > self._max_bytes * MAX_ENTRY_SHARE:
            return
        replaced = self._entries.pop(key, None)
        self._size += entry.size - (replaced.size if replaced else 0)
        self._entries[key] = entry
        while self._size > self._max_bytes:
            self._size -= self._entries.popitem(last=False)[1].size


def _untold(kept: Sequence[Kept], call_id: str, told: Collection[str]) -> Sequence[Kept]:
    """What of a turn goes with that call where the client tells of the calls `told`: all that was said behind the last
    of them, and what was run behind the call and is none of them."""

    def is_told(item: Kept) -> bool:
        return isinstance(item, AssistantCall | ToolResult) and item.call_id != call_id and item.call_id in told

    own = next((place for place, item in enumerate(kept) if _is_call(item, call_id)), len(kept))
    begin = max((place + 1 for place, item in enumerate(kept[:own]) if is_told(item)), default=0)
    return (*kept[begin:own], *(item for item in kept[own:] if not is_told(item)))


def _is_call(item: Kept, call_id: str) -> bool:
    return isinstance(item, AssistantCall) and item.call_id == call_id


def _same_turn(kept: Sequence[Kept], said: Sequence[Generated], call: AssistantCall) -> bool:
    """Whether a client's version of a turn is the remembered one: what it sends is equal, what it leaves out (it may
    know neither reasoning nor preambles) does not matter."""
    own = next((item for item in kept if _is_call(item, call.call_id)), None)
    if (
        not isinstance(own, AssistantCall)
        or own.name != call.name
        or not _same_arguments(own.arguments, call.arguments)
    ):
        return False
    for kind, join in ((AssistantReasoning, "".join), (AssistantMessage, join_messages)):
        given = join([item.text for item in said if isinstance(item, kind)])
        if given and given != join([item.text for item in kept if isinstance(item, kind)]):
            return False
    return True


def _same_arguments(kept: str, given: str) -> bool:
    """Whether both are the same text, or the same JSON: some APIs hand arguments over as an object, which comes back
    written in another way, its numbers as exact as readers of JSON commonly keep them."""
    if kept == given:
        return True
    try:
        return bool(json.loads(kept, parse_int=float) == json.loads(given, parse_int=float))
    except (ValueError, RecursionError):
        return False


def _key(*parts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()
