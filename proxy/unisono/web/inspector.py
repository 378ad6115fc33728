"""Inspection of a recording, Harmony text or token ids, all returned in the same format.

Text and ids pass through the same parser as answers. Every input yields an inspection or an InvalidRequest that
describes the error.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Final

from pydantic import Field

from unisono.api.field_types import OpenModel
from unisono.core.conversation import FunctionTool
from unisono.core.events import Closed, Event, HostedCall, Listing, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import START, Chunk, FinishReason, OutputForm
from unisono.engine.journal import mended
from unisono.errors import InvalidRequest, well_formed
from unisono.harmony.builtin_tools import FUNCTIONS_OF
from unisono.harmony.channel_router import HarmonyRouter
from unisono.harmony.decode import decoder_for
from unisono.harmony.encoding import Encoding, load_encoding
from unisono.harmony.tool_declarations import ToolSet, plan_tools
from unisono.observe.recording import checked
from unisono.web.recording_view import recounted
from unisono.web.segments import Segments

MAX_CHARACTERS: Final = 500_000
MAX_TOKENS: Final = 200_000
MAX_TOOLS: Final = 64
# Largest integer that all JSON parsers represent exactly.
LARGEST: Final = 2**53 - 1

# Any integer: the response marks the numbers that are not token ids.
TokenNumber = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
WireName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class InspectRequest(OpenModel):
    """Input of an inspection: exactly one of `id`, `trace`, `text` and `tokens`.

    `id` is the id of a recording, and `trace` a recording itself. In text and token ids, everything before the model's
    output is the prompt, unless `all_output` is true. `tools` names the tools that the model may call, by default every
    tool that it calls.
    """

    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    trace: dict[str, Any] | None = None
    text: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    tokens: Annotated[list[TokenNumber], Field(max_length=MAX_TOKENS)] | None = None
    all_output: bool = False
    tools: Annotated[list[WireName], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    def check(self) -> None:
        """Raise InvalidRequest unless exactly one source is given."""
        if sum(source is not None for source in (self.id, self.trace, self.text, self.tokens)) != 1:
            raise InvalidRequest("Set exactly one of 'id', 'trace', 'text' and 'tokens'.")


OBJECT: Final = "unisono.inspection"
# Maximum characters of an item's text in an inspection.
MAX_ITEM_LENGTH: Final = 20_000

_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_-]{1,64})(?![A-Za-z0-9_.-])")
_FOREIGN = re.compile(r"<\|start\|>(?!assistant)")
_ASSISTANT = "<|start|>assistant"


def inspected(request: InspectRequest) -> dict[str, Any]:
    """Inspect a `trace`, `text` or `tokens`.

    Raises InvalidRequest for a trace that is damaged or has a different version, and for text that cannot be tokenized.
    """
    request.check()
    encoding = load_encoding()
    if request.trace is not None:
        try:
            document = checked(request.trace)
        except ValueError as error:
            raise InvalidRequest(f"'trace': {error}.", param="trace") from None
        return {"object": OBJECT, **recounted(document, encoding)}
    return {"object": OBJECT, **_read(request, encoding)}


def _read(request: InspectRequest, encoding: Encoding) -> dict[str, Any]:
    """Parse token ids, or text as if it came from a backend that sends no token ids."""
    if request.tokens is not None:
        prompt, output = _cut_ids(request.tokens, encoding, request.all_output)
        named = encoding.decode([token for token in request.tokens if _is_token(token)])
    else:
        named = well_formed(request.text or "")
        before, rest = _cut_text(named, request.all_output)
        prompt, output = _encoded(before, encoding), _decoded(rest, encoding)
    tools = _toolset(list(dict.fromkeys(request.tools or _RECIPIENT.findall(named)))[:MAX_TOOLS])
    events = _routed(encoding, tools, output)
    segments = Segments(encoding)
    segments.add(prompt)
    prompt_segments = segments.pop_new()
    # Each repair is displayed at its position between the tokens. A repair at the end of the output follows the last
    # token.
    waiting = deque(one for one in events if isinstance(one, Repaired))
    for piece in (*mended(output, waiting), *waiting):
        if isinstance(piece, Repaired):
            segments.repair(piece)
        else:
            segments.add(piece)
    step = {
        "step": 0,
        "generations": [],
        "prompts": [{"behind": 0, "segments": prompt_segments}] if prompt_segments else [],
        "output": segments.pop_new(),
        "generated": len(output),
    }
    items = [_item(event) for event in events if isinstance(event, Closed)]
    return {"about": None, "steps": [step], "items": items, "tools": [], "left_out": []}


def _is_token(token: int) -> bool:
    return 0 <= token < 201_088


def _cut_text(text: str, all_output: bool) -> tuple[str, str]:
    """Split text into the prompt, which ends with `<|start|>assistant`, and the output.

    The output begins with the first assistant message that is followed by assistant messages only. With `all_output`,
    the prompt is empty.
    """
    if all_output:
        return "", text
    # All assistant messages after the last message of a different role belong to the same answer.
    foreign = [found.end() for found in _FOREIGN.finditer(text)]
    begin = text.find(_ASSISTANT, foreign[-1] if foreign else 0)
    if begin < 0:
        return (text, "") if foreign else ("", text)
    if not foreign and text[:begin].strip():
        return "", text
    return text[: begin + len(_ASSISTANT)], text[begin + len(_ASSISTANT) :]


def _cut_ids(tokens: Sequence[int], encoding: Encoding, all_output: bool) -> tuple[Sequence[int], Sequence[int]]:
    if all_output:
        return (), tokens
    start = encoding.encode_marked(_ASSISTANT)
    begins = [at for at, token in enumerate(tokens) if token == START]
    foreign = [at for at in begins if list(tokens[at : at + len(start)]) != start]
    own = [at for at in begins if at > (foreign[-1] if foreign else -1)]
    if not own:
        return (tokens, ()) if foreign else ((), tokens)
    if not foreign and own[0] > 0:
        return (), tokens
    cut = own[0] + len(start)
    return tokens[:cut], tokens[cut:]


def _encoded(text: str, encoding: Encoding) -> list[int]:
    try:
        return encoding.encode_marked(text)
    except ValueError:
        raise InvalidRequest("The text cannot be tokenized.", param="text") from None


def _decoded(text: str, encoding: Encoding) -> list[int]:
    # Pasted text is treated like the output of a text backend: spelled markers become special tokens.
    decoder = decoder_for(OutputForm.TEXT, encoding)
    return [*decoder.feed(Chunk(text=text)), *decoder.end()]


def _toolset(names: Sequence[str]) -> ToolSet:
    return plan_tools([FunctionTool(name) for name in names]).with_builtins(FUNCTIONS_OF)


def _routed(encoding: Encoding, tools: ToolSet, tokens: Sequence[int]) -> list[Event]:
    # The inspection has no request from which ids could be derived.
    ids = count(1)
    router = HarmonyRouter(encoding, tools, lambda: f"call_{next(ids)}", hold_calls=False)
    return [*router.feed(tokens), *router.end(FinishReason.STOP)]


def _item(closed: Closed) -> dict[str, Any]:
    """Return an item in the format that clients receive."""
    name, text = "", closed.text
    match closed.item:
        case Reasoning():
            kind = "analysis"
        case Text(phase=phase):
            kind = phase.value
        case ToolCall(name=name):
            kind = "call"
        case HostedCall(name=name):
            kind = "hosted_call"
        case Listing(server=name):
            kind = "listing"
    return {
        "kind": kind,
        "name": well_formed(name),
        "characters": len(text),
        "complete": closed.complete,
        "text": well_formed(text[:MAX_ITEM_LENGTH]),
    }
