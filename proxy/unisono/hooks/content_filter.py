"""Hook that blocks or masks expressions and keywords in requests and answers.

The expressions are run by RE2, in time linear in the text. An error contains the name of a rule, but not its
expression.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final

import re2

from unisono.core.frozen import dataclass
from unisono.errors import ConfigError
from unisono.hooks.text_guardrail import BLOCK, MASK, Blocked, TextGuardrail, without_surrogates

# Searched characters between two yields to the event loop.
CHARACTERS_AT_ONCE: Final = 200_000

_CARD: Final = {
    "visa": r"4\d{3}(?:[ -]?\d{4}){3}",
    "mastercard": r"(?:5[1-5]\d\d|2[2-7]\d\d)(?:[ -]?\d{4}){3}",
    "amex": r"3[47]\d\d[ -]?\d{6}[ -]?\d{5}",
    "discover": r"6(?:011|5\d\d)(?:[ -]?\d{4}){3}",
}
_OCTET: Final = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# Prebuilt expressions, by their names in LiteLLM.
PREBUILT: Final[Mapping[str, str]] = {
    **{name: rf"\b{number}\b" for name, number in _CARD.items()},
    "credit_card": rf"\b(?:{'|'.join(_CARD.values())})\b",
    "email": r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}\b",
    "us_ssn": r"\b\d{3}-\d{2}-\d{4}\b",
    "us_phone": r"(?:\+?1[ .-]?)?(?:\(\d{3}\)|\b\d{3})[ .-]?\d{3}[ .-]?\d{4}\b",
    "ipv4": rf"\b(?:{_OCTET}\.){{3}}{_OCTET}\b",
    "url": r"(?i)\b(?:https?://|www\.)[^\s<>\"']+",
    "aws_access_key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "github_token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{60,})\b",
    "slack_token": r"\bxox[abpors]-[0-9A-Za-z-]{20,}",
    "generic_api_key": r"(?i)\bapi[-_]?key['\"]?[\s:=]+['\"]?[a-z0-9_-]{20,}",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Compiled expression of a content filter, with its name for clients.

    `tag` replaces each match. If it is None, a match blocks the whole text.
    """

    name: str
    expression: Any
    tag: str | None


class ContentFilter(TextGuardrail):
    """Guardrail that searches texts for expressions and keywords.

    The options are `patterns`, `blocked_words`, `keyword_redaction_tag`, `pattern_redaction_format` and `where`.
    `where` is a list that contains `input`, `output` or both. Patterns and words have the same format as in LiteLLM's
    guardrail.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__(options)
        pattern_tag = str(options.get("pattern_redaction_format", "[{pattern_name}_REDACTED]"))
        word_tag = str(options.get("keyword_redaction_tag", "[KEYWORD_REDACTED]"))
        patterns = _pattern_rules(_entries("patterns", options.get("patterns")), pattern_tag)
        self._rules = (*patterns, *_word_rules(_entries("blocked_words", options.get("blocked_words")), word_tag))
        if not self._rules:
            raise ConfigError("patterns: no rules; add `patterns` or `blocked_words`")

    async def checked_text(self, text: str, subject: str, field: str | None = None) -> str:
        if not text:
            return text
        searched, work = without_surrogates(text), 0
        for rule in self._rules:
            work += len(searched)
            if work > CHARACTERS_AT_ONCE:
                work = 0
                await asyncio.sleep(0)
            if rule.tag is None:
                if rule.expression.search(searched) is not None:
                    raise Blocked(f"The {subject} contains blocked content: {rule.name}.", param=field)
            elif rule.expression.search(searched) is not None:
                tag = rule.tag
                # The replacement is a function, because a text could contain group references such as `\1`.
                searched = text = rule.expression.sub(lambda _, tag=tag: tag, searched)
        return text


def _entries(key: str, value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and the content of each entry in a list of rules.

    Raises ConfigError for an invalid entry.
    """
    if not isinstance(value, list | None):
        raise ConfigError(f"{key}: must be a list")
    for index, entry in enumerate(value or ()):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{key}[{index}]: must be a mapping")
        if entry.get("action", BLOCK) not in (BLOCK, MASK):
            raise ConfigError(f"{key}[{index}].action: must be {BLOCK} or {MASK}")
        yield f"{key}[{index}]", entry


def _pattern_rules(entries: Iterator[tuple[str, Mapping[str, Any]]], tag: str) -> Iterator[Rule]:
    for number, (path, entry) in enumerate(entries, 1):
        if entry.get("pattern_type") == "prebuilt":
            name = str(entry.get("pattern_name"))
            if name not in PREBUILT:
                raise ConfigError(
                    f"{path}.pattern_name: unknown prebuilt expression `{name}`; "
                    f"use one of {', '.join(sorted(PREBUILT))}, or `pattern_type: regex` with your own `pattern`"
                )
            expression = PREBUILT[name]
        else:
            name, expression = str(entry.get("name") or f"regex_{number}"), str(entry.get("pattern") or "")
        mask = tag.replace("{pattern_name}", name.upper()) if entry.get("action") == MASK else None
        yield Rule(name, _compiled(expression, f"{path}.pattern"), mask)


def _word_rules(entries: Iterator[tuple[str, Mapping[str, Any]]], tag: str) -> Iterator[Rule]:
    for path, entry in entries:
        word = str(entry.get("keyword") or "")
        mask = tag if entry.get("action") == MASK else None
        yield Rule("keyword", _compiled(f"(?i){re2.escape(word)}", f"{path}.keyword"), mask)


def _compiled(expression: str, path: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(expression, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ConfigError(f"{path}: the expression is not valid in RE2: {reason}") from None
    if not expression or compiled.search("") is not None:
        raise ConfigError(
            f"{path}: the expression matches an empty text, so it would match every text; "
            "require at least one character"
        )
    return compiled
