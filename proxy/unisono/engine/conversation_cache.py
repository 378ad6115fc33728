"""Cache of generated messages, so that prompts of stateless conversations stay token-exact.

A client of Chat Completions sends its history back as text. The cache finds the token ids that the model generated for
this text: it finds a turn with a tool call by the id and content of the call, and an answer by its content. The prompt
of the continued conversation then begins with exactly the tokens that a backend has cached. If a turn ended with tool
calls, the cache also restores reasoning that the client does not send back. If a hook changed an item, the cache has
the changed text, without tokens.

An evicted entry causes no error: a message that the cache does not know is rendered from its text. The cache is held in
memory, is limited in size, and shares no entries between tenants.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from sys import getsizeof
from typing import Final

from unisono.core.conversation import (
    MESSAGE_SEPARATOR,
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Item,
    Json,
    Phase,
    Tokens,
    ToolResult,
    UserMessage,
    join_messages,
)
from unisono.core.events import Closed, HostedCall, Reasoning, Text, ToolCall
from unisono.core.frozen import dataclass

Generated = AssistantReasoning | AssistantMessage | AssistantCall
_GENERATED: Final = frozenset({AssistantReasoning, AssistantMessage, AssistantCall})
_ANSWERED: Final = frozenset({AssistantMessage, AssistantCall})

# An item of an answer. Results of server tools are stored between the items that the model generated.
StoredItem = Generated | ToolResult

MAX_DATES = 10_000
MAX_BYTES = 32 * 1024 * 1024
ENTRY_BYTES = 480  # overhead of one entry: its key, the `_Entry`, its tuples, and its place in the ordered dictionary
MAX_ENTRY_SHARE = 1 / 8  # larger entries, as a share of the cache's `max_bytes`, are not stored


@dataclass(frozen=True, slots=True)
class _Entry:
    """Items without their tokens, and the token ids of each item, packed into 4 bytes per id.

    As Python integers in a tuple, token ids would take 40 bytes each. If the items end with a call, `first_call`
    is the id of the first call to a client's tool in the same answer.
    """

    items: tuple[StoredItem, ...]
    tokens: tuple[bytes, ...]
    size: int
    first_call: str

    @classmethod
    def of(cls, items: Sequence[StoredItem], first_call: str) -> _Entry:
        bare: list[StoredItem] = []
        tokens: list[bytes] = []
        size = ENTRY_BYTES
        for item in items:
            if isinstance(item, ToolResult):
                bare.append(item)
                tokens.append(b"")
            else:
                bare.append(_with_tokens(item, ()))
                tokens.append(array("I", item.tokens).tobytes())
            size += getsizeof(bare[-1]) + getsizeof(tokens[-1]) + sum(map(getsizeof, _texts(item)))
        return cls(tuple(bare), tuple(tokens), size, first_call)

    def restored(self) -> tuple[StoredItem, ...]:
        return tuple(
            item if isinstance(item, ToolResult) else _with_tokens(item, tuple(array("I", tokens)))
            for item, tokens in zip(self.items, self.tokens, strict=True)
        )


def _with_tokens(item: Generated, tokens: Tokens) -> Generated:
    """Return a copy of the item with `tokens` instead of its own tokens."""
    match item:
        case AssistantReasoning():
            return AssistantReasoning(item.text, tokens)
        case AssistantMessage():
            return AssistantMessage(item.text, item.phase, tokens)
        case AssistantCall():
            return AssistantCall(item.call_id, item.name, item.arguments, tokens)


def _first_text(items: Sequence[Item]) -> str:
    """Return the text of the first user message; empty if there is no user message."""
    for item in items:
        if isinstance(item, UserMessage):
            return item.text
    return ""


def _texts(item: StoredItem) -> tuple[str, ...]:
    match item:
        case AssistantCall():
            return item.call_id, item.name, item.arguments
        case ToolResult():
            return item.call_id, item.name, item.output
        case _:
            return (item.text,)


# A client may add arguments with these values to a call that it sends back. The call is still recognised.
EMPTY: Final[tuple[Json, ...]] = (None, False, "", [], {})


class ConversationCache:
    """Cache of generated messages and calls.

    `max_bytes` limits the memory of the entries; the least recently used entry is evicted first.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._dates: OrderedDict[bytes, str] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Return the estimated memory of all entries, without the stored dates, in bytes."""
        return self._size

    def recall(self, tenant: str, conversation: Conversation, *, dated: bool = False) -> Conversation:
        """Return the conversation with the generated token ids and the date of its first request.

        With `dated`, the conversation keeps the date that it already has.
        """
        preamble, items = conversation.preamble, conversation.items
        if not _GENERATED.isdisjoint(map(type, items)):
            items = self._recall_items(tenant, conversation)
        if not dated and (date := self._date(tenant, conversation)) != preamble.date:
            preamble = replace(preamble, date=date)
        if items is conversation.items and preamble is conversation.preamble and not conversation.reasoning_from:
            return conversation
        return replace(conversation, items=items, reasoning_from=0, preamble=preamble)

    def _recall_items(self, tenant: str, conversation: Conversation) -> tuple[Item, ...]:
        """Return the items of a conversation, with the token ids that the model generated."""
        items: list[Item] = []
        turn: list[Generated] = []
        changed: set[str] = set()  # ids of the calls in messages that the client changed
        sent = frozenset(item.call_id for item in conversation.items if isinstance(item, AssistantCall))
        for position, item in enumerate(conversation.items):
            if position == conversation.reasoning_from:
                # Drop all reasoning before this position. This happens after the look-up of the earlier items, because
                # the cache also restores reasoning that the client left out.
                items = [known for known in items if not isinstance(known, AssistantReasoning)]
            match item:
                case AssistantReasoning() | AssistantMessage():
                    turn.append(item)
                case AssistantCall():
                    stored = self._recall_call(tenant, item, sent)
                    if turn:
                        # A Chat message contains the texts between its calls before the first call.
                        calls = self._calls_of_message(tenant, conversation.items, position)
                        turns = takewhile(bool, (self._recall_call(tenant, each, sent) for each in calls))
                        if not _has_same_texts([*turns], turn):
                            changed.update(each.call_id for each in calls)
                    items += stored if stored and item.call_id not in changed else (*turn, item)
                    turn = []
                case UserMessage() | DeveloperMessage() | ToolResult() | AddedTools():
                    items += self._recall_answer(tenant, turn)
                    turn = []
                    items.append(item)
        items += self._recall_answer(tenant, turn)
        return tuple(items)

    def record(
        self,
        tenant: str,
        closed: Iterable[Closed],
        *,
        opened: str = "",
        results: Mapping[str, ToolResult] | None = None,
        visible: Collection[str] = (),
    ) -> None:
        """Store the items that the model generated for one request, from their Closed events."""
        # `opened` is the beginning of the first message, if the client wrote it (prefill). The tokens of the message
        # include `opened`, but its text does not. `results` are the results of server tools, by call id. `visible` are
        # the labels of tool servers whose calls and results the client sees and sends back; other calls are hidden.
        turn: list[StoredItem] = []
        messages: list[AssistantMessage] = []
        before = 0  # index in `turn` of the first item after the last emitted call
        handed: tuple[bytes, tuple[StoredItem, ...], str] | None = None  # arguments of `_store` for the last call
        for event in closed:
            if isinstance(event.item, HostedCall) and event.item.approval:
                continue  # the call is in the conversation already
            # The items after an incomplete item cannot be restored exactly.
            if not event.complete:
                return
            opened, begun = "", opened
            match event.item:
                case Reasoning():
                    turn.append(AssistantReasoning(event.text, event.tokens))
                case Text(phase=phase):
                    message = AssistantMessage(begun + event.text, phase, event.tokens)
                    turn.append(message)
                    messages.append(message)
                    if phase is Phase.FINAL:
                        self._store_answer(tenant, messages)
                        turn, before = [], 0
                case ToolCall(call_id=call_id, name=name):
                    turn.append(AssistantCall(call_id, name, event.text, event.tokens))
                    handed = (_key(tenant, "call", call_id), tuple(turn), handed[2] if handed else call_id)
                    self._store(*handed)
                    turn, messages, before = [], [], 0
                case HostedCall(call_id=call_id, name=name, server=server):
                    turn.append(AssistantCall(call_id, name, event.text, event.tokens))
                    if server in visible:
                        self._store(_key(tenant, "call", call_id), tuple(turn[before:]), call_id)
                    if results is not None and call_id in results:
                        turn.append(results[call_id])
                    before = len(turn) if server in visible else before
        if handed is not None and turn and all(isinstance(item, AssistantCall | ToolResult) for item in turn):
            # Calls to server tools that follow the last call to a client's tool are stored under that client call.
            key, items, first_call = handed
            self._store(key, (*items, *turn), first_call)

    def _store_answer(self, tenant: str, messages: Sequence[AssistantMessage]) -> None:
        self._store(_key(tenant, "answer", messages[-1].text), messages[-1:])
        if len(messages) > 1:
            # Chat clients send all messages of an answer back as one text.
            self._store(_key(tenant, "answer", join_messages(each.text for each in messages)), messages)

    def _recall_call(self, tenant: str, call: AssistantCall, sent: Collection[str]) -> Sequence[StoredItem]:
        """Return the stored turn of a call, or () if it is unknown or the client changed the call."""
        stored = _without_sent(self._find(_key(tenant, "call", call.call_id)), call.call_id, sent)
        return stored if _has_same_call(stored, call) else ()

    def _calls_of_message(self, tenant: str, items: Sequence[Item], begin: int) -> Sequence[AssistantCall]:
        """Return the calls from `begin` on that may belong to the same message.

        Only results separate them. The first call of another answer, if it is known, belongs to the next message.
        """
        calls: list[AssistantCall] = []
        answers: set[str] = set()  # ids of the first calls
        for position in range(begin, len(items)):
            item = items[position]
            if isinstance(item, AssistantCall):
                entry = self._entries.get(_key(tenant, "call", item.call_id))
                if entry is not None:
                    if calls and item.call_id == entry.first_call and entry.first_call not in answers:
                        break
                    answers.add(entry.first_call)
                calls.append(item)
            elif not isinstance(item, ToolResult):
                break
        return calls

    def _recall_answer(self, tenant: str, turn: Sequence[Generated]) -> Sequence[Item]:
        items: list[Item] = []
        for item in turn:
            items += self._answer(tenant, item) if isinstance(item, AssistantMessage) else (item,)
        return items

    def _answer(self, tenant: str, message: AssistantMessage) -> Sequence[Item]:
        if message.phase is not Phase.FINAL or message.tokens:
            return (message,)
        return self._find(_key(tenant, "answer", message.text)) or (message,)

    def _date(self, tenant: str, conversation: Conversation) -> str:
        """Return the date of the conversation's first request if known, else the preamble's date.

        If the date in the prompt changed at midnight, backends could not use their prefix caches.
        """
        today = conversation.preamble.date
        key = _key(tenant, "date", conversation.preamble.instructions, _first_text(conversation.items))
        begun = not _ANSWERED.isdisjoint(map(type, conversation.items))
        date = self._dates.get(key, today) if begun else today
        self._dates[key] = date
        self._dates.move_to_end(key)
        while len(self._dates) > MAX_DATES:
            self._dates.popitem(last=False)
        return date

    def _find(self, key: bytes) -> tuple[StoredItem, ...]:
        entry = self._entries.get(key)
        if entry is None:
            return ()
        self._entries.move_to_end(key)
        return entry.restored()

    def _store(self, key: bytes, items: Sequence[StoredItem], first_call: str = "") -> None:
        entry = _Entry.of(items, first_call)
        # One long turn must not evict the turns of all other conversations.
        if entry.size > self._max_bytes * MAX_ENTRY_SHARE:
            return
        replaced = self._entries.pop(key, None)
        self._size += entry.size - (replaced.size if replaced else 0)
        self._entries[key] = entry
        while self._size > self._max_bytes:
            self._size -= self._entries.popitem(last=False)[1].size


def _without_sent(stored: Sequence[StoredItem], call_id: str, sent: Collection[str]) -> Sequence[StoredItem]:
    """Return the part of a stored turn that restores the call with the id `call_id`.

    The part contains no call or result that the client sends itself. `sent` are the ids of all calls that the client
    sends. Before the call, the part contains only the items after the last call or result with an id in `sent`. After
    the call, it contains all items except calls and results with an id in `sent`.
    """

    def is_sent(item: StoredItem) -> bool:
        return isinstance(item, AssistantCall | ToolResult) and item.call_id != call_id and item.call_id in sent

    own = next((place for place, item in enumerate(stored) if _is_call(item, call_id)), len(stored))
    begin = max((place + 1 for place, item in enumerate(stored[:own]) if is_sent(item)), default=0)
    return (*stored[begin:own], *(item for item in stored[own:] if not is_sent(item)))


def _is_call(item: StoredItem, call_id: str) -> bool:
    return isinstance(item, AssistantCall) and item.call_id == call_id


def _has_same_call(stored: Sequence[StoredItem], call: AssistantCall) -> bool:
    """Return whether a stored turn has the client's call, with the same name and arguments."""
    own = next((item for item in stored if _is_call(item, call.call_id)), None)
    return isinstance(own, AssistantCall) and own.name == call.name and _same_arguments(own.arguments, call.arguments)


def _has_same_texts(turns: Sequence[Sequence[StoredItem]], given: Sequence[Generated]) -> bool:
    """Return whether the client's reasoning and preambles match the stored turns of its message.

    For each of the two kinds, the client's text must be equal to the text of the first turn, or of several turns from
    the first. The client may omit a kind, because it may not have seen it, but it must not have changed the text.
    """
    for kind, between in ((AssistantReasoning, ""), (AssistantMessage, MESSAGE_SEPARATOR)):
        wanted, end = _joined(given, kind, between), 0
        for turn in turns if wanted else ():
            text = _joined(turn, kind, between)
            text = between + text if end and text else text
            if not wanted.startswith(text, end):
                return False
            end += len(text)
            if end == len(wanted):
                break
        if end < len(wanted):
            return False
    return True


def _joined(items: Iterable[StoredItem], kind: type[AssistantReasoning] | type[AssistantMessage], between: str) -> str:
    return between.join(item.text for item in items if isinstance(item, kind) and item.text)


def _same_arguments(stored: str, given: str) -> bool:
    """Return whether a client's arguments are the same text or JSON as the stored arguments.

    Members with the value null, and members that the client added with an empty value (`EMPTY`), are ignored. A blank
    text means `{}`. JSON is compared because some APIs pass arguments as an object, which the client may serialize
    differently. Numbers are compared as double-precision floats, because common JSON parsers round them.
    """
    if stored == given:
        return True
    try:
        own, other = json.loads(stored, parse_int=float), json.loads(given.strip() or "{}", parse_int=float)
        if isinstance(own, dict) and isinstance(other, dict):
            # Claude Code sends a call back with the defaults of its tool, such as `"replace_all": false`.
            other = {name: value for name, value in other.items() if own.get(name) is not None or value not in EMPTY}
            own = {name: value for name, value in own.items() if value is not None}
        return bool(own == other)
    except (ValueError, RecursionError):
        return False


def _key(*parts: str) -> bytes:
    # The lengths in front keep different lists of parts from producing the same text.
    text = f"{[*map(len, parts)]}{''.join(parts)}"
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).digest()
