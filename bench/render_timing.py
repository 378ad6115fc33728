"""Worker process that times the render of a long conversation, without sockets and schemas.

The worker reads one `RenderJob` per line of JSON and answers with milliseconds of CPU time.
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

from bench import prose, wires
from bench.prose import Corpus
from unisono.core.conversation import AssistantMessage, Conversation, Item, Preamble, UserMessage
from unisono.harmony.encoding import load_encoding
from unisono.harmony.library_parser import load_library
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import plan_tools


@dataclass(frozen=True, slots=True)
class RenderJob:
    """Render of a conversation of `words` words; the result is the median of `times`.

    The variant `cold` uses a new renderer, `next` a renderer that rendered the previous turn, and `library` uses
    openai-harmony.
    """

    variant: str
    words: int
    times: int
    seed: int


def conversation(corpus: Corpus, words: int, seed: int) -> Conversation:
    roles = (UserMessage, AssistantMessage)
    texts = (corpus.prompt(wires.MESSAGE_WORDS, hash((seed, i)))[1] for i in range(words // wires.MESSAGE_WORDS))
    items: list[Item] = [roles[i % 2](text) for i, text in enumerate(texts)]
    return Conversation(Preamble(), (*items, UserMessage("And then?")))


def milliseconds(corpus: Corpus, job: RenderJob) -> float:
    durations_ms = []
    for i in range(job.times):
        render = RENDERS[job.variant](corpus, job.words, hash((job.seed, i)))
        started_at = time.process_time()
        render()
        durations_ms.append(1e3 * (time.process_time() - started_at))
    return median(durations_ms)


def _cold(corpus: Corpus, words: int, seed: int) -> Callable[[], object]:
    renderer, tools = Renderer(load_encoding()), plan_tools([])
    chat = conversation(corpus, words, seed)
    return lambda: renderer.prompt(chat, tools)


def _next(corpus: Corpus, words: int, seed: int) -> Callable[[], object]:
    renderer, tools = Renderer(load_encoding()), plan_tools([])
    renderer.prompt(conversation(corpus, words, seed), tools)
    # The next request has equal text in new objects.
    items = conversation(corpus, words, seed).items
    chat = Conversation(Preamble(), (*items, AssistantMessage("Nothing."), UserMessage("Why?")))
    return lambda: renderer.prompt(chat, tools)


def _library(corpus: Corpus, words: int, seed: int) -> Callable[[], object]:
    harmony = load_library()
    messages = [
        Message.from_role_and_content(Role.ASSISTANT, item.text).with_channel("final")
        if isinstance(item, AssistantMessage)
        else Message.from_role_and_content(Role.USER, item.text)
        for item in conversation(corpus, words, seed).items
        if isinstance(item, UserMessage | AssistantMessage)
    ]
    chat = LibraryConversation.from_messages(messages)
    return lambda: harmony.render_conversation_for_completion(chat, Role.ASSISTANT)


RENDERS: dict[str, Callable[[Corpus, int, int], Callable[[], object]]] = {
    "cold": _cold,
    "next": _next,
    "library": _library,
}


def main(path: Path) -> None:
    corpus = prose.load(path)
    for line in sys.stdin:
        print(milliseconds(corpus, RenderJob(**orjson.loads(line))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
