"""Hook for forbidden expressions: refuses a request, or annotates an answer.

The expressions run in time linear in the text. An error contains the name of an expression, but never the expression.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from unisono.core.conversation import AddedTools, AssistantCall, Conversation, Json, ToolResult
from unisono.core.hooks import Annotation, Answer, Changes, Hook, Request
from unisono.errors import ConfigError
from unisono.hooks.text_guardrail import (
    FIELD,
    INPUT,
    OUTPUT,
    Blocked,
    directions_of,
    is_json,
    json_texts,
    without_surrogates,
)
from unisono.schemas.patterns import BadPattern, Expression

REFUSE, ANNOTATE = "refuse", "annotate"
ACTIONS = (REFUSE, ANNOTATE)
# Matching steps between two yields to the event loop.
AT_ONCE: Final = 2_000


class Blocklist(Hook):
    """Blocklist with options `patterns`, `action` and `where`.

    `patterns` maps names, which clients see, to regular expressions. `action` is `refuse` or `annotate`. `where` is a
    list that contains `input` (all text that the model would read), `output` (all text that the model wrote), or both.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._patterns = _patterns(options.get("patterns"))
        self._refuses = _one_of(ACTIONS, "action", options.get("action", REFUSE)) == REFUSE
        self._directions = directions_of(options.get("where", [INPUT, OUTPUT]))

    async def before(self, request: Request) -> Changes | None:
        if INPUT not in self._directions:
            return None
        found = await self._matches(_texts(request.conversation))
        if found and self._refuses:
            names = ", ".join(found)
            raise Blocked(f"The request contains blocked content: {names}.", param=FIELD.get(request.surface))
        return Changes(annotation=_annotation(INPUT, found))

    async def after(self, request: Request, answer: Answer) -> Annotation | None:
        if OUTPUT not in self._directions:
            return None
        found = await self._matches(text for closed in answer.items for text in _as_read(closed.text))
        if found and self._refuses:
            raise Blocked(f"The answer contains blocked content: {', '.join(found)}.")
        return _annotation(OUTPUT, found)

    async def _matches(self, texts: Iterable[str]) -> list[str]:
        """Return the names of expressions that match in any text, in their configured order."""
        unmatched = dict(self._patterns)
        found: set[str] = set()
        work = 0
        for text in map(without_surrogates, texts):
            for name, expression in list(unmatched.items()):
                work += expression.steps(text)
                if work > AT_ONCE:
                    work = 0
                    await asyncio.sleep(0)
                if expression.found(text):
                    found.add(name)
                    del unmatched[name]
        return [name for name in self._patterns if name in found]


def _texts(conversation: Conversation) -> Iterator[str]:
    """Yield all texts of a conversation, from its instructions to its prefill."""
    yield conversation.preamble.instructions
    for item in conversation.items:
        match item:
            case AssistantCall(arguments=arguments):
                yield from _as_read(arguments)
            case ToolResult(output=output):
                yield output
            case AddedTools():
                pass  # tool declarations are not checked
            case _:
                yield item.text
    yield conversation.prefill or ""


def _as_read(text: str) -> Iterator[str]:
    """Yield the names and values of a JSON text, or any other text as a whole.

    An escape such as `\\u0040` would hide a value in the JSON text.
    """
    if is_json(text):
        yield from json_texts(text)
    else:
        yield text


def _annotation(where: str, found: Sequence[str]) -> Annotation | None:
    names: list[Json] = [*found]
    return {where: names} if names else None


def _patterns(patterns: object) -> dict[str, Expression]:
    if not isinstance(patterns, dict) or not patterns:
        raise ConfigError("patterns: must map names to regular expressions, such as {card: '[0-9]{16}'}")
    expressions: dict[str, Expression] = {}
    for name, pattern in patterns.items():
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"patterns.{name}: must be a regular expression")
        try:
            expressions[str(name)] = Expression(pattern)
        except BadPattern as error:
            raise ConfigError(f"patterns.{name}: {error}") from error
    return expressions


def _one_of(choices: Sequence[str], key: str, value: object) -> str:
    if value not in choices:
        raise ConfigError(f"{key}: must be {' or '.join(choices)}")
    return str(value)
