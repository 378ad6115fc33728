"""Base of the bundled guardrails: checks each text of requests and answers.

The names and values in JSON arguments and JSON answers are checked one by one, without their escapes (`checked_json`).
"""

from __future__ import annotations

import asyncio
import json
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from unisono.core.conversation import AddedTools, AssistantCall, Conversation, Item, ToolResult
from unisono.core.events import Closed, HostedCall, Text, ToolCall
from unisono.core.hooks import Changes, Hook, Request
from unisono.errors import ConfigError, Refused

INPUT, OUTPUT = "input", "output"
DIRECTIONS = (INPUT, OUTPUT)
# Actions of LiteLLM's guardrails.
BLOCK, MASK = "BLOCK", "MASK"
# For each API surface, the request field that contains the conversation.
FIELD: Final = {
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
    "completions": "prompt",
    "embeddings": "input",
    "rerank": "query",
    "score": "text_1",
    "moderations": "input",
    "images": "prompt",
    "speech": "input",
    "transcriptions": "prompt",
}

# A name with its colon, a string or a number in a JSON text.
JSON_TOKEN: Final = re.compile(
    r'(?P<string>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:\s*)?|(?P<number>-?[0-9][0-9.eE+-]*)', re.DOTALL
)

# Function that checks a text. It returns the text or a masked replacement, or raises `Refused`.
Check = Callable[[str], Awaitable[str]]


class Blocked(Refused):
    """Refusal because of forbidden content."""

    code = "content_blocked"


def directions_of(value: object) -> frozenset[str]:
    """Return the directions that the option `where` selects.

    Raises ConfigError if its value is invalid.
    """
    if not isinstance(value, list) or not value or any(place not in DIRECTIONS for place in value):
        raise ConfigError(f"where: must be a list of {' or '.join(DIRECTIONS)}, or both")
    return frozenset(map(str, value))


async def checked(
    conversation: Conversation, check: Check, *, field: str | None = None, at_once: int = 1
) -> Changes | None:
    """Check every text of a conversation. Return the changes, or None if nothing changes.

    Up to `at_once` texts are checked at the same time. A value above 1 means that a check is slow. All names and
    values of a JSON text are then first checked as one text. Tool declarations are not checked. Raises the exception of
    `check` if it refuses a text. Also raises `Blocked` if the check would change the prefill, which is the text with
    which the client starts the answer. `field` is the request field that contains the conversation; the exception names
    this field.
    """
    prefill = conversation.prefill or ""
    texts: list[Callable[[], Awaitable[Any]]] = [
        partial(check, conversation.preamble.instructions),
        partial(check, prefill),
    ]
    results = await _in_order(
        [*texts, *(partial(_checked_item, item, check, at_once > 1) for item in conversation.items)], at_once
    )
    instructions, new_prefill, *items = results
    if new_prefill != prefill:
        raise Blocked(
            "The unfinished assistant message contains content that a guardrail masks. Masking is not possible there; "
            "remove the content or the message.",
            param=field,
        )
    has_new_items = any(new is not old for new, old in zip(items, conversation.items, strict=True))
    if not has_new_items and instructions == conversation.preamble.instructions:
        return None
    return Changes(
        items=tuple(items) if has_new_items else None,
        instructions=instructions if instructions != conversation.preamble.instructions else None,
    )


async def _in_order(checks: Sequence[Callable[[], Awaitable[Any]]], at_once: int) -> list[Any]:
    """Return the results of the checks in their order.

    If several checks fail, the error of the first one in this order is raised.
    """
    if at_once == 1:
        return [await check() for check in checks]
    slots = asyncio.Semaphore(at_once)

    async def result_of(check: Callable[[], Awaitable[Any]]) -> Any:
        async with slots:
            return await check()

    running = [asyncio.create_task(result_of(check)) for check in checks]
    try:
        return [await one for one in running]
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _checked_item(item: Item, check: Check, together: bool) -> Item:
    match item:
        case AddedTools():
            return item
        case AssistantCall(arguments=text):
            new = await checked_json(text, check, together=together)
            return item if new == text else replace(item, arguments=new)
        case ToolResult(output=text):
            return item if (new := await check(text)) == text else replace(item, output=new)
        case _:
            return item if (new := await check(item.text)) == item.text else replace(item, text=new)


# The arguments of a call and an answer in JSON are checked as the client reads them after parsing. Escapes such as
# `\u0040` would hide a forbidden text from a check of the JSON text, and a mask there could make the JSON invalid: in
# `\nann@example.com`, the `n` looks like a part of the address.


async def checked_json(text: str, check: Check, *, together: bool = False) -> str:
    """Check a text that may be JSON, and return the masked text.

    A text that is not JSON is checked as it is. A JSON text remains valid: the names, strings and numbers in it are
    checked one by one, and a masked number becomes a string. A value is also checked together with its name, because an
    expression may describe both, such as `"api_key": "..."`; the mask then replaces the value. With `together`, all
    names and values are first checked as one text. If this check finds nothing, they are not checked one by one. Raises
    the exception of `check` if it refuses the text.
    """
    if not is_json(text):
        return await check(text)
    if together and await _is_clean("\n".join(json_texts(text)), check):
        return text
    parts: list[str] = []
    copied, opening, end = 0, "", 0
    names: dict[str, str] = {}
    for match in JSON_TOKEN.finditer(text):
        written = match["string"] or match["number"]
        old = _decoded(written)
        opening, end = "" if "}" in text[end : match.start()] else opening, match.end()
        if match["colon"] is None:
            new = await _checked_value(opening, old, '"' if match["string"] else "", check)
        else:
            new = names[old] if old in names else _distinct(await check(old), names, old)
            names[old] = new
            opening = f'"{new}"{match["colon"]}'
        if new != old:
            parts += [text[copied : match.start()], json.dumps(new, ensure_ascii=False)]
            copied = match.start() + len(written)
    return "".join([*parts, text[copied:]])


def is_json(text: str) -> bool:
    """Return whether a text is a JSON object, array or string."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return False
    try:
        # Numbers stay texts, because Python refuses to convert numbers of more than 4,300 digits.
        json.loads(text, strict=False, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def json_texts(text: str) -> Iterator[str]:
    """Yield the decoded names and values of a JSON text, and each value together with its name."""
    opening, end = "", 0
    for match in JSON_TOKEN.finditer(text):
        value = _decoded(match["string"] or match["number"])
        opening, end = "" if "}" in text[end : match.start()] else opening, match.end()
        if match["colon"] is not None:
            opening = f'"{value}"{match["colon"]}'
            yield value
        elif is_json(value):
            yield from json_texts(value)
        else:
            yield value
            quote = '"' if match["string"] else ""
            yield f"{opening}{quote}{value}{quote}"


async def _is_clean(text: str, check: Check) -> bool:
    try:
        return await check(text) == text
    except Refused:
        # The forbidden text may extend over two values, which is allowed, so each value has to be checked alone.
        return False


async def _checked_value(opening: str, value: str, quote: str, check: Check) -> str:
    """Check a value alone and together with its name, and return the masked value.

    `opening` is the name of the member that contains the value, with quotes and colon; empty if there is none. `quote`
    is `"` for a string, and empty for a number.
    """
    new = await checked_json(value, check)
    if not opening or is_json(new):
        return new
    member = f"{opening}{quote}{new}{quote}"
    masked = await check(member)
    if masked == member:
        return new
    return masked.removeprefix(opening).strip('"')


def _distinct(name: str, names: Mapping[str, str], old: str) -> str:
    """Return the masked `name`, with a number appended if it equals a different name."""
    # Parsers keep only one of several members with the same name.
    used = {*names.values()} - {old}
    number = 2
    distinct = name
    while name != old and distinct in used:
        distinct = f"{name}_{number}"
        number += 1
    return distinct


def _decoded(written: str) -> str:
    return str(json.loads(written, strict=False)) if written.startswith('"') else written


def without_surrogates(text: str) -> str:
    """Replace lone surrogates with `?`, because RE2 and services reject them.

    The length stays the same.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class TextGuardrail(Hook):
    """Hook that checks each text independently.

    The option `where` is a list that contains `input`, `output` or both. `CHECKS_AT_ONCE` is the number of texts of a
    request that are checked at the same time.
    """

    CHECKS_AT_ONCE: ClassVar[int] = 1

    def __init__(self, options: Mapping[str, object]) -> None:
        directions = directions_of(options.get("where", [INPUT, OUTPUT]))
        self._checks_input = INPUT in directions
        self.holds_answers = OUTPUT in directions

    @abstractmethod
    async def checked_text(self, text: str, subject: str, field: str | None = None) -> str:
        """Return the text, with forbidden parts masked. Raises Blocked if the text must not be used.

        `subject` is `request` or `answer`, for the message of the error. `field` is the request field that contains the
        text, for `param` of the error.
        """

    async def before(self, request: Request) -> Changes | None:
        if not self._checks_input:
            return None

        field = FIELD.get(request.surface)

        async def check(text: str) -> str:
            return await self.checked_text(text, "request", field)

        return await checked(request.conversation, check, field=field, at_once=self.CHECKS_AT_ONCE)

    async def check_item(self, request: Request, item: Closed) -> str | None:
        async def check(text: str) -> str:
            return await self.checked_text(text, "answer")

        may_be_json = isinstance(item.item, ToolCall | HostedCall | Text)
        together = self.CHECKS_AT_ONCE > 1
        new = await (checked_json(item.text, check, together=together) if may_be_json else check(item.text))
        return None if new == item.text else new
