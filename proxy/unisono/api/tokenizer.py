"""Routes `/tokenize` and `/detokenize` of vLLM, and `/utils/token_counter` of LiteLLM.

Text is counted with the gpt-oss vocabulary. Messages are counted as the prompt that the gateway would render for them.
No backend is called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from unisono.api.answer_types import AnswerModel, Count
from unisono.api.body import off_loop
from unisono.api.dependencies import CurrentCaller, ParsedBody, provided
from unisono.api.field_types import AtMost, ModelName, Text
from unisono.api.route_table import BODY_ERRORS, RouteTable
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.generation import VOCABULARY
from unisono.errors import InvalidRequest

TOKENIZER = RouteTable("gateway", prefixes=("",))
MAX_TOKEN_IDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Vocabulary and models of the gateway.

    `check_model` returns the context window of a model in tokens, None if unknown. It raises an error for a model that
    the caller may not use. `count` returns the number of prompt tokens of a chat request. `encode` raises ValueError
    for text that the tokenizer rejects.
    """

    check_model: Callable[[str, Caller], int | None]
    count: Callable[[dict[str, Any], Caller, str], Awaitable[int]]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


class TokenizerBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)


class TokenizedInput(TokenizerBody):
    """Text (`prompt`), or `messages` with their `tools`."""

    model: ModelName
    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeRequest(TokenizedInput):
    """Body of `/tokenize`. `messages` are refused, because only their token count is available."""

    add_special_tokens: bool = True
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool | None = None


class DetokenizeRequest(TokenizerBody):
    model: ModelName
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], AtMost(MAX_TOKEN_IDS)]


class TokenizedText(AnswerModel):
    count: Count
    max_model_len: Count | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(AnswerModel):
    prompt: str


class TokenCount(AnswerModel):
    total_tokens: Count
    request_model: str
    model_used: str
    tokenizer_type: str


async def _request_id(request: Request) -> str:
    found: str = request.state.request_id
    return found


Source = Annotated[Tokenizer, provided(Tokenizer)]
RequestId = Annotated[str, Depends(_request_id)]


async def _encoded(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    try:
        return await off_loop(lambda: tokenizer.encode(text), len(text))
    except ValueError:
        raise InvalidRequest("Invalid value for 'prompt': the tokenizer rejects this text.", param="prompt") from None


async def _count(tokenizer: Tokenizer, body: TokenizedInput, caller: Caller, request_id: str) -> int:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if body.prompt is not None:
        return len(await _encoded(tokenizer, body.prompt))
    chat = {"model": body.model, "messages": body.messages, "tools": body.tools}
    return await tokenizer.count({name: each for name, each in chat.items() if each is not None}, caller, request_id)


@TOKENIZER.add("POST", "/utils/token_counter", (*BODY_ERRORS, 404), body=TokenizedInput)
async def count_tokens(
    tokenizer: Source, caller: CurrentCaller, request_id: RequestId, body: ParsedBody[TokenizedInput]
) -> TokenCount:
    """Count the tokens of a text, or of the prompt for messages."""
    tokenizer.check_model(body.model, caller)
    total = await _count(tokenizer, body, caller, request_id)
    return TokenCount(
        total_tokens=total, request_model=body.model, model_used=body.model, tokenizer_type="openai_harmony"
    )


@TOKENIZER.add("POST", "/tokenize", (*BODY_ERRORS, 404), body=TokenizeRequest)
async def tokenize(tokenizer: Source, caller: CurrentCaller, body: ParsedBody[TokenizeRequest]) -> TokenizedText:
    """Return the tokens of a text."""
    context = tokenizer.check_model(body.model, caller)
    if body.prompt is None:
        raise InvalidRequest(
            "Missing required field 'prompt'. To count the tokens of messages, use `/utils/token_counter`.",
            param="prompt",
        )
    tokens = [*await _encoded(tokenizer, body.prompt)]
    texts = [tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None
    return TokenizedText(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=texts)


@TOKENIZER.add("POST", "/detokenize", (*BODY_ERRORS, 404), body=DetokenizeRequest)
async def detokenize(tokenizer: Source, caller: CurrentCaller, body: ParsedBody[DetokenizeRequest]) -> DetokenizedText:
    """Return the text of tokens."""
    tokenizer.check_model(body.model, caller)
    if not all(0 <= token < VOCABULARY for token in body.tokens):
        raise InvalidRequest("Invalid value for 'tokens': an id is outside the vocabulary.", param="tokens")
    return DetokenizedText(prompt=tokenizer.decode(body.tokens))
