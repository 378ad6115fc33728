"""Rendering a long conversation, alone: no sockets and no schema, only the renderer.

A process of its own, driven by lines of JSON: one `Ask` in, the milliseconds of CPU out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import orjson
from openai_harmony import Conversation as LibraryConversation
from openai_harmony import Message, Role

from bench import material, wires
from bench.material import Material
from unisono.core.conversation import AssistantMessage, Conversation, Item, Preamble, UserMessage
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tools import plan_tools


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation of `words` words in messages of the usual length, rendered by a renderer that never saw it
    (`cold`), by one that saw it a turn ago (`next`), or by openai-harmony (`library`). The median of `times`."""

    how: str
    words: int
    times: int
    seed: int


def conversation(stuff: Material, words: int, seed: int) -> Conversation:
    roles = (UserMessage, AssistantMessage)
    texts = (stuff.prompt(wires.TURN_WORDS, hash((seed, i)))[1] for i in range(words // wires.TURN_WORDS))
    items: list[Item] = [roles[i % 2](text) for i, text in enumerate(texts)]
    return Conversation(Preamble(), (*items, UserMessage("And then?")))


def milliseconds(stuff: Material, ask: Ask) -> float:
    taken = []
    for i in range(ask.times):
        render = RENDERS[ask.how](stuff, ask.words, hash((ask.seed, i)))
        begun = time.process_time()
        render()
        taken.append(1e3 * (time.process_time() - begun))
    return median(taken)


def _cold(stuff: Material, words: int, seed: int) -> Callable[[], object]:
    renderer, tools = Renderer(load_encoding()), plan_tools([])
    asked = conversation(stuff, words, seed)
    return lambda: renderer.prompt(asked, tools)


def _next(stuff: Material, words: int, seed: int) -> Callable[[], object]:
    renderer, tools = Renderer(load_encoding()), plan_tools([])
    renderer.prompt(conversation(stuff, words, seed), tools)
    # The next request brings equal text, in objects of its own.
    again = conversation(stuff, words, seed).items
    asked = Conversation(Preamble(), (*again, AssistantMessage("Nothing."), UserMessage("Why?")))
    return lambda: renderer.prompt(asked, tools)


def _library(stuff: Material, words: int, seed: int) -> Callable[[], object]:
    harmony = load_encoding().harmony
    messages = [
        Message.from_role_and_content(Role.ASSISTANT, item.text).with_channel("final")
        if isinstance(item, AssistantMessage)
        else Message.from_role_and_content(Role.USER, item.text)
        for item in conversation(stuff, words, seed).items
        if isinstance(item, UserMessage | AssistantMessage)
    ]
    asked = LibraryConversation.from_messages(messages)
    return lambda: harmony.render_conversation_for_completion(asked, Role.ASSISTANT)


RENDERS: dict[str, Callable[[Material, int, int], Callable[[], object]]] = {
    "cold": _cold,
    "next": _next,
    "library": _library,
}


def main(path: Path) -> None:
    stuff = material.load(path)
    for line in sys.stdin:
        print(milliseconds(stuff, Ask(**orjson.loads(line))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
