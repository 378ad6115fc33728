"""Schema of a raw completion request: OpenAI's legacy fields and supported fields of vLLM.

Each field has an effect, or is accepted without effect and reported in a note, or is rejected by name. A field with its
neutral value is always accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from unisono.api.field_types import (
    AtMost,
    Count,
    FieldInput,
    ModelName,
    OpenModel,
    StopStrings,
    Text,
    invalid_field,
    refused,
)
from unisono.api.logprobs import MAX_TOP_LOGPROBS
from unisono.api.request_options import SamplingFields
from unisono.core.generation import VOCABULARY

MAX_STOP_TOKENS: Final = 256
# Maximum number of choices of a request: prompts times `n`.
MAX_CHOICES: Final = 128

Ids = tuple[int, ...]

NOT_CONSTRAINED: Final = "the format of a raw completion cannot be constrained"
CONSTRAINED_ELSEWHERE: Final = f"{NOT_CONSTRAINED}; use /v1/chat/completions"

# Unsupported fields, with their neutral values and the reason.
NEUTRAL: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "prompt_logprobs": (
        (None, False),
        "use 'echo' with 'logprobs' for log probabilities of the prompt; omit this field",
    ),
    "suffix": ((None, ""), "gpt-oss cannot fill in the middle of a text; omit this field"),
    "use_beam_search": ((None, False), "beam search is not supported; omit this field"),
    "prompt_embeds": ((None, []), "embeddings are not supported; send text or token ids in 'prompt'"),
    "response_format": ((None, {"type": "text"}), CONSTRAINED_ELSEWHERE),
    "structured_outputs": ((None, {}), CONSTRAINED_ELSEWHERE),
    "guided_json": ((None,), CONSTRAINED_ELSEWHERE),
    "guided_regex": ((None,), NOT_CONSTRAINED),
    "guided_choice": ((None,), NOT_CONSTRAINED),
    "guided_grammar": ((None,), NOT_CONSTRAINED),
    "truncate_prompt_tokens": ((None,), "prompts are never truncated; shorten the prompt"),
    "ignore_eos": ((None, False), "generation always ends at a stop token; omit this field"),
    "min_tokens": ((None, 0), "generation always ends at a stop token; omit this field"),
}


def _to_logprobs(value: Any) -> Any:
    # Some clients send a boolean, as in Chat Completions.
    return {True: 0, False: None}[value] if isinstance(value, bool) else value


_SOME: Final = Field(min_length=1)


def _to_prompts(value: Any) -> Any:
    """Convert `prompt` to a list of prompts: texts and tuples of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid_field("must be a string, or a non-empty list of strings, of token ids, or of lists of token ids")
    if all(type(element) is int for element in value):
        return [_to_ids(value)]
    if all(isinstance(element, str) for element in value):
        return value
    if all(isinstance(element, list) for element in value):
        return [_to_ids(element) for element in value]
    raise invalid_field("must contain only strings, only token ids, or only lists of token ids")


def _to_ids(value: list[Any]) -> Ids:
    if not all(type(element) is int and 0 <= element < VOCABULARY for element in value):
        raise invalid_field(f"must contain only token ids from 0 to {VOCABULARY - 1}")
    return tuple(value)


def _not_empty(prompts: list[str | Ids]) -> list[str | Ids]:
    if not all(prompts):
        raise invalid_field("must not be empty")
    return prompts


Token = Annotated[int, Field(ge=0, lt=VOCABULARY)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Written = Annotated[Text, Field(min_length=1)]
# Accepted types of a prompt.
Prompts = Written | Annotated[list[Written] | list[Token] | list[Annotated[list[Token], _SOME]], _SOME]


def _only_neutral(name: str) -> Any:
    return Field(None, json_schema_extra={"enum": [*NEUTRAL[name][0]]})


class CompletionStreamOptions(OpenModel):
    include_usage: bool | None = None


class CompletionRequest(SamplingFields):
    """Body of a completion request. A text prompt may contain special tokens as text."""

    model: ModelName
    prompt: Annotated[list[Text | Ids], BeforeValidator(_to_prompts), FieldInput(Prompts)]
    # 0 requires `echo`.
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Count | None = None
    echo: bool | None = None
    stop: StopStrings = Field(default_factory=list)
    stream: bool | None = None
    stream_options: CompletionStreamOptions | None = None
    user: Text | None = None
    stop_token_ids: Annotated[list[Token], AtMost(MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # No effect: the tokenizer of gpt-oss adds no special tokens.
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    logprobs: Annotated[TopLogprobs | None, BeforeValidator(_to_logprobs), FieldInput(TopLogprobs | bool | None)] = None
    prompt_logprobs: Any = _only_neutral("prompt_logprobs")
    suffix: Any = _only_neutral("suffix")
    use_beam_search: Any = _only_neutral("use_beam_search")
    prompt_embeds: Any = _only_neutral("prompt_embeds")
    response_format: Any = _only_neutral("response_format")
    structured_outputs: Any = _only_neutral("structured_outputs")
    guided_json: Any = _only_neutral("guided_json")
    guided_regex: Any = _only_neutral("guided_regex")
    guided_choice: Any = _only_neutral("guided_choice")
    guided_grammar: Any = _only_neutral("guided_grammar")
    truncate_prompt_tokens: Any = _only_neutral("truncate_prompt_tokens")
    ignore_eos: Any = _only_neutral("ignore_eos")
    min_tokens: Any = _only_neutral("min_tokens")

    _whole = field_validator("prompt")(_not_empty)

    @field_validator(*NEUTRAL, mode="before")
    @classmethod
    def _neutral(cls, value: Any, info: ValidationInfo) -> None:
        assert info.field_name is not None
        neutral, reason = NEUTRAL[info.field_name]
        # Values that are equal in Python may differ in JSON: 0 is not false.
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            raise refused(reason)
