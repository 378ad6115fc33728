"""Prompt of a step: render, and continue after generated tokens.

Long texts are processed in a thread: the tokenizer releases the GIL, so other streams continue.
"""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import replace

from unisono.core.conversation import Conversation, Tokens
from unisono.core.frozen import dataclass
from unisono.core.generation import (
    CHANNEL,
    CONSTRAIN,
    END,
    FIRST_SPECIAL,
    START,
    VOCABULARY,
    Capabilities,
    OutputForm,
    Prompt,
)
from unisono.core.route_protocol import blocks_of
from unisono.errors import CannotGoOn
from unisono.harmony.decode import Decoder, decoder_for
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.raw_codec import retokenized
from unisono.harmony.render import PromptPlan, Renderer
from unisono.harmony.tool_declarations import ToolSet

# If more characters than this must be encoded that are not cached, they are encoded in a thread (about 2 ms of work).
OFF_LOOP_CHARS = 8_000

# A prompt of more items than this is assembled in a thread, even if little text is new. A prompt for a text backend is
# checked item by item, which takes about 0.2 ms per item.
OFF_LOOP_ITEMS = 200

# More tokens than this are encoded again or converted to text in a thread, because the work takes a few milliseconds.
OFF_LOOP_TOKENS = 2_000


_HEADER = frozenset({START, CHANNEL, CONSTRAIN})  # after these control tokens, the message header continues


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The rendered prompt of a step.

    `opening` are the tokens of the unfinished message at the prompt's end, from its `<|start|>`; empty if the prompt
    ends with a complete message. `blocks` are the hashes of the prompt's token blocks. The prompt contains its text
    only after `with_text`.
    """

    prompt: Prompt
    opening: Tokens
    blocks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """The prompt with which a step continues, and the decoder for the backend's output.

    `tail_length` is the number of tokens at the prompt's end that were generated or inserted in this step.
    """

    prompt: Prompt
    decoder: Decoder
    tail_length: int = 0


async def render(renderer: Renderer, conversation: Conversation, tools: ToolSet, salt: str = "") -> RenderedPrompt:
    """Render a conversation.

    Prompts with different `salt` share no block hashes. Raises InvalidRequest if a text cannot be tokenized.
    """
    # Making the plan hashes every message, so it is done in the thread if there are many items.
    plan = None if len(conversation.items) > OFF_LOOP_ITEMS else renderer.plan(conversation, tools)
    if plan is None or plan.cold_chars > OFF_LOOP_CHARS:
        return await asyncio.to_thread(render_here, renderer, conversation, tools, salt, plan)
    return render_here(renderer, conversation, tools, salt, plan)


def render_here(
    renderer: Renderer, conversation: Conversation, tools: ToolSet, salt: str, plan: PromptPlan | None = None
) -> RenderedPrompt:
    """Render a conversation in the current thread.

    `plan` is a plan that was made from the same arguments, to avoid repeated cache lookups.
    """
    tokens = renderer.prompt(conversation, tools, plan)
    opening = () if conversation.prefill is None else tuple(tokens[_last_start(tokens) :])
    return RenderedPrompt(Prompt(tokens), opening, blocks_of(tokens, salt))


async def with_text(
    renderer: Renderer, conversation: Conversation, tools: ToolSet, rendered: RenderedPrompt
) -> RenderedPrompt:
    """Return the same prompt with its text, for a backend that does not accept token ids.

    Raises InvalidRequest if such a backend would read different control tokens in the text.
    """
    tokens = rendered.prompt.tokens
    if len(tokens) > OFF_LOOP_TOKENS or len(conversation.items) > OFF_LOOP_ITEMS:
        text = await asyncio.to_thread(renderer.text_prompt, conversation, tools)
    else:
        text = renderer.text_prompt(conversation, tools)
    return replace(rendered, prompt=Prompt(tokens, text))


async def continue_prompt(
    encoding: Encoding,
    rendered: RenderedPrompt,
    tail: Sequence[int],
    capabilities: Capabilities,
    *,
    is_guessed: bool = False,
    has_moved: bool = False,
    is_naming: bool = False,
) -> ContinuedPrompt:
    """Return the prompt that continues a step after the tokens `tail`.

    `tail` is appended unchanged, unless `is_guessed`: then its text is tokenized again, as the model's own tokenizer
    would do. `has_moved`: a different backend generated the tail. `is_naming`: the prompt ends inside the name of a
    tool.

    Raises CannotGoOn if a backend with these `capabilities` would tokenize the prompt differently, or cannot continue
    at its end.
    """
    opening = Header(verbatim=True) if rendered.opening else None
    if not tail:
        return ContinuedPrompt(rendered.prompt, decoder_for(capabilities.output, encoding, opening))
    position = (encoding, rendered, tail, capabilities)
    if has_moved:
        _check_position(*position, is_naming=is_naming)
    if len(tail) > OFF_LOOP_TOKENS:
        return await asyncio.to_thread(_continued, *position, opening, is_guessed)
    return _continued(*position, opening, is_guessed)


def _check_position(
    encoding: Encoding, rendered: RenderedPrompt, tail: Sequence[int], capabilities: Capabilities, *, is_naming: bool
) -> None:
    """Raise CannotGoOn if the backend cannot continue at the end of `tail`.

    Some backends cannot continue an unfinished message. Other backends leave control tokens out of their output, so the
    rest of an unfinished header would look like text.
    """
    start = encoding.encode_marked("<|start|>assistant")
    if tail[-1] == END or list(tail[-len(start) :]) == start:
        return
    if not capabilities.prefill:
        raise CannotGoOn("This backend cannot continue an unfinished message; use a backend that accepts token ids.")
    marks = [token for token in tail if token >= FIRST_SPECIAL]
    # If the tail has no control token, the prompt determines the position. If the prompt leaves a message open, the
    # position is in the body of that message; otherwise, it is in a header.
    in_header = marks[-1] in _HEADER if marks else not rendered.opening
    if capabilities.output is OutputForm.MARKERLESS and in_header and not is_naming:
        raise CannotGoOn(
            "This backend cannot continue inside a message header, because its output does not contain headers; use a "
            "backend that returns token ids."
        )


def _continued(
    encoding: Encoding,
    rendered: RenderedPrompt,
    tail: Sequence[int],
    capabilities: Capabilities,
    opening: Header | None,
    is_guessed: bool,
) -> ContinuedPrompt:
    # An id outside the vocabulary makes a backend reject the prompt or crash, and the backend would be blamed for that.
    if not 0 <= min(tail) <= max(tail) < VOCABULARY:
        raise CannotGoOn(
            "The answer so far contains a token id outside the vocabulary of the model, so no backend can continue it."
        )
    decoder = decoder_for(capabilities.output, encoding, opening, tail)
    exact = retokenized(encoding, tail) if is_guessed else tail
    base = rendered.prompt
    text = None if base.text is None else base.text + _text_of(encoding, base.text, base.tokens, exact)
    return ContinuedPrompt(Prompt([*base.tokens, *exact], text), decoder, len(exact))


def _text_of(encoding: Encoding, before: str, tokens: Sequence[int], tail: Sequence[int]) -> str:
    """Return the text of `tail`.

    `before` and `tokens` are the text and the tokens of the prompt before `tail`.

    Raises CannotGoOn if a server would read different control tokens in the text, or if the text ends inside a
    character.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(encoding.decode_bytes(tail))
    if decoder.getstate()[0]:
        raise CannotGoOn(
            "The answer so far ends inside a character; only a backend that accepts token ids can continue the answer."
        )
    # The check includes the prompt's last message: it may be unfinished and end with the first half of a control
    # token's spelling. The text before this message was checked when the prompt was rendered. That text cannot contain
    # the spelling `<|start|>` except as a control token.
    opening = before[before.rindex("<|start|>") :]
    structure = Encoding.special_ids([*tokens[_last_start(tokens) :], *tail])
    try:
        same = Encoding.special_ids(encoding.encode_as_server(opening + text)) == structure
    except ValueError:
        # The tokenizer rejects some texts, such as a long run of one character.
        same = False
    if not same:
        raise CannotGoOn(
            "The answer so far contains the spelling of a control token as text; only a backend that accepts token ids "
            "can continue the answer."
        )
    return text


def _last_start(tokens: Sequence[int]) -> int:
    return len(tokens) - 1 - tokens[::-1].index(START)
