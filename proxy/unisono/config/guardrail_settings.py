"""Section `guardrails`: checks of requests and answers, in the same form as in LiteLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from unisono.config.section_base import Name, Section, entries_of

CONTENT_FILTER = "litellm_content_filter"
PRESIDIO = "presidio"
GUARDRAIL_KINDS = (CONTENT_FILTER, PRESIDIO)
"""Values of `guardrail` that Unisono supports."""

Action = Literal["BLOCK", "MASK"]
Mode = Literal["pre_call", "during_call", "post_call"]


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class PatternSettings(Section):
    """Regular expression of a content filter."""

    pattern_type: Literal["prebuilt", "regex"]
    """`prebuilt` for an expression that is part of Unisono, `regex` for your own expression."""
    pattern_name: Name | None = None
    """Name of a prebuilt expression, such as `email` or `us_ssn`.
    [hooks.md](hooks.md#check-content-with-guardrails) lists them."""
    pattern: Annotated[str, Field(min_length=1, max_length=1_000)] | None = None
    """Your own expression, in the syntax of RE2."""
    name: Name | None = None
    """Name of your own expression, which clients see. By default `regex` and its position."""
    action: Action = "BLOCK"
    """`BLOCK` refuses the request or the answer, `MASK` replaces the matching text."""

    @model_validator(mode="after")
    def _is_complete(self) -> PatternSettings:
        field = "pattern_name" if self.pattern_type == "prebuilt" else "pattern"
        if getattr(self, field) is None:
            raise ValueError(f"`pattern_type: {self.pattern_type}` requires `{field}`")
        return self


class BlockedWord(Section):
    """Keyword of a content filter. Upper and lower case are not distinguished."""

    keyword: Annotated[str, Field(min_length=1, max_length=1_000)]
    """The word or phrase. It also matches inside longer words."""
    action: Action = "BLOCK"
    """`BLOCK` refuses the request or the answer, `MASK` replaces the keyword."""
    description: str | None = None
    """Description for people. It has no effect."""


class GuardrailParams(Section):
    """Kind of a guardrail, where it applies, and its rules."""

    guardrail: Literal["litellm_content_filter", "presidio"]
    """`litellm_content_filter` (expressions and keywords) or `presidio` (a Presidio service).
    LiteLLM's other guardrails are not supported."""
    mode: Annotated[tuple[Mode, ...], BeforeValidator(_to_list), Field(min_length=1)]
    """What to check: `pre_call` or `during_call`, `post_call`, or a list of these values.
    `post_call` checks answers. `pre_call` and `during_call` check requests and have the same effect: the request is
    checked before the model gets it. Each item of a streamed answer is held back until it is complete and has been
    checked."""
    default_on: bool = False
    """True applies the guardrail to every request.
    False applies it only to requests that name it in `guardrails`, and to models that list it in
    `litellm_params.guardrails`."""
    patterns: tuple[PatternSettings, ...] = ()
    """Expressions of a content filter."""
    blocked_words: tuple[BlockedWord, ...] = ()
    """Keywords of a content filter."""
    keyword_redaction_tag: str = "[KEYWORD_REDACTED]"
    """Replacement for keywords with the action `MASK`."""
    pattern_redaction_format: str = "[{pattern_name}_REDACTED]"
    """Replacement for a match. `{pattern_name}` becomes the expression's name in upper case."""
    presidio_analyzer_api_base: str | None = None
    """Address of Presidio's analyzer, such as `os.environ/PRESIDIO_ANALYZER_API_BASE`."""
    presidio_anonymizer_api_base: str | None = None
    """Address of Presidio's anonymizer. Required unless all entities are blocked."""
    presidio_language: Annotated[str, Field(min_length=2, max_length=16)] = "en"
    """Language of the texts, as a language code of Presidio such as `en`."""
    presidio_score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Minimum confidence of a finding, from 0 to 1. By default the analyzer's own threshold."""
    pii_entities_config: dict[Name, Action] = Field(default_factory=dict)
    """Action for each type of entity, such as `{CREDIT_CARD: BLOCK, EMAIL_ADDRESS: MASK}`.
    Types that are not listed are ignored. By default all entities are masked."""

    @model_validator(mode="after")
    def _has_rules(self) -> GuardrailParams:
        if self.guardrail == CONTENT_FILTER:
            if not self.patterns and not self.blocked_words:
                raise ValueError(
                    "the content filter has no rules; set `patterns` or `blocked_words`, or remove the guardrail"
                )
            return self
        masks = not self.pii_entities_config or "MASK" in self.pii_entities_config.values()
        needed = ("presidio_analyzer_api_base", *(["presidio_anonymizer_api_base"] if masks else []))
        for field in needed:
            if getattr(self, field) is None:
                raise ValueError(f"`{field}` is missing; write `{field}: os.environ/{field.upper()}` or the address")
        return self


class GuardrailSettings(Section):
    """Check of requests and answers."""

    guardrail_name: Name
    """Name of the guardrail, used in `guardrails` of requests and of `litellm_params`.
    An error message contains the name if the guardrail itself fails."""
    litellm_params: GuardrailParams
    """Kind of the guardrail, where it applies, and its rules."""
    guardrail_info: dict[str, JsonValue] = Field(default_factory=dict)
    """Description for people. It has no effect."""


def unsupported_kind(entry: object) -> str | None:
    """Return the kind of an unsupported guardrail; None for any other entry of `guardrails`."""
    params = entry.get("litellm_params") if isinstance(entry, Mapping) else None
    kind = params.get("guardrail") if isinstance(params, Mapping) else None
    return kind if isinstance(kind, str) and kind not in GUARDRAIL_KINDS else None


def guardrails_of(raw: object) -> dict[str, bool]:
    """Return the names of all guardrails in a file, with True for supported guardrails."""
    found: dict[str, bool] = {}
    for _, entry in entries_of(raw, "guardrails"):
        name, params = entry.get("guardrail_name"), entry.get("litellm_params")
        if isinstance(name, str) and isinstance(params, Mapping):
            found[name] = params.get("guardrail") in GUARDRAIL_KINDS
    return found
