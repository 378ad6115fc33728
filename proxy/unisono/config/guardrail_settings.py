"""Section `guardrails`: checks of requests and answers, in LiteLLM's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from unisono.config.section import Name, Section

CONTENT_FILTER = "litellm_content_filter"
PRESIDIO = "presidio"
GUARDRAILS = (CONTENT_FILTER, PRESIDIO)
"""Values of `guardrail` that Unisono supports."""

Action = Literal["BLOCK", "MASK"]
Mode = Literal["pre_call", "during_call", "post_call"]


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class PatternSettings(Section):
    """Regular expression of a content filter."""

    pattern_type: Literal["prebuilt", "regex"]
    """`prebuilt` for an expression of Unisono, `regex` for your own."""
    pattern_name: Name | None = None
    """Name of a prebuilt expression, such as `email` or `us_ssn`."""
    pattern: Annotated[str, Field(min_length=1, max_length=1_000)] | None = None
    """Your own expression, in the syntax of RE2."""
    name: Name | None = None
    """Name of your own expression, for clients. By default `regex` and its position."""
    action: Action = "BLOCK"
    """`BLOCK` refuses the request or the answer, `MASK` replaces what matches."""

    @model_validator(mode="after")
    def _is_complete(self) -> PatternSettings:
        field = "pattern_name" if self.pattern_type == "prebuilt" else "pattern"
        if getattr(self, field) is None:
            raise ValueError(f"`pattern_type: {self.pattern_type}` needs `{field}`")
        return self


class BlockedWord(Section):
    """Keyword of a content filter, in upper or lower case."""

    keyword: Annotated[str, Field(min_length=1, max_length=1_000)]
    """The word or phrase. It also matches inside of longer words."""
    action: Action = "BLOCK"
    """`BLOCK` refuses the request or the answer, `MASK` replaces the keyword."""
    description: str | None = None
    """Description for people; no effect."""


class GuardrailParams(Section):
    """Kind of a guardrail, where it applies, and its rules."""

    guardrail: Literal["litellm_content_filter", "presidio"]
    """`litellm_content_filter` (expressions and keywords) or `presidio` (a Presidio service).
    LiteLLM's other guardrails are not supported."""
    mode: Annotated[tuple[Mode, ...], BeforeValidator(_to_list), Field(min_length=1)]
    """What is checked: requests (`pre_call`, `during_call`), answers (`post_call`), or a list.
    Both modes for requests have the same effect: the request is checked before the model gets it. An item of a
    streamed answer is held until it is complete and checked."""
    default_on: bool = False
    """True checks every request. With false, the guardrail applies to requests that name it.
    They name it in `guardrails`, or their model does in `litellm_params.guardrails`."""
    patterns: tuple[PatternSettings, ...] = ()
    """Expressions of a content filter."""
    blocked_words: tuple[BlockedWord, ...] = ()
    """Keywords of a content filter."""
    keyword_redaction_tag: str = "[KEYWORD_REDACTED]"
    """Replacement for keywords."""
    pattern_redaction_format: str = "[{pattern_name}_REDACTED]"
    """Replacement for what an expression matches; `{pattern_name}` is its name in upper case."""
    presidio_analyzer_api_base: str | None = None
    """Address of Presidio's analyzer, such as `os.environ/PRESIDIO_ANALYZER_API_BASE`."""
    presidio_anonymizer_api_base: str | None = None
    """Address of Presidio's anonymizer. Needed to mask."""
    presidio_language: Annotated[str, Field(min_length=2, max_length=16)] = "en"
    """Language of the texts, as Presidio names it."""
    presidio_score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Minimum score of a finding. By default that of the analyzer."""
    pii_entities_config: dict[Name, Action] = Field(default_factory=dict)
    """Entities of Presidio, each with `BLOCK` or `MASK`. By default all entities are masked."""

    @model_validator(mode="after")
    def _has_rules(self) -> GuardrailParams:
        if self.guardrail == CONTENT_FILTER:
            if not self.patterns and not self.blocked_words:
                raise ValueError("the content filter has no rules; add `patterns` or `blocked_words`")
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
    """Name for `guardrails` in requests and in `litellm_params`.
    Clients see it if a check fails."""
    litellm_params: GuardrailParams
    """Kind of the guardrail, where it applies, and its rules."""
    guardrail_info: dict[str, JsonValue] = Field(default_factory=dict)
    """Description for people; no effect."""
