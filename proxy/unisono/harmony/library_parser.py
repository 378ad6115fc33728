"""Reader of message bodies that uses openai-harmony's parser.

It is the reference for the gateway's own reader.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import openai_harmony

from unisono.core.generation import END
from unisono.harmony.encoding import VOCABULARY_FOLDER, Encoding

# Header that the parser reads instead of every real header. The header does not change the text of the body, and a
# header token takes as much time as a dozen body tokens.
ANY_HEADER: Final = "<|start|>assistant<|message|>"


@cache
def load_library() -> openai_harmony.HarmonyEncoding:
    """Load the library's encoding from the bundled vocabulary, once per process.

    Never downloads.
    """
    # The library reads the path of its vocabulary folder from this environment variable, and only while it loads.
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(VOCABULARY_FOLDER)
    try:
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        if before is None:
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]
        else:
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


class LibraryBodyText:
    """Reader of bodies by the library's incremental parser."""

    def __init__(self, encoding: Encoding) -> None:
        # The inner parser is used because the public class has properties that copy all of their values.
        self._parser: Any = openai_harmony.StreamableParser(load_library(), None)._inner
        self._any_header = encoding.encode_marked(ANY_HEADER)
        # Open a first message, because `start` always ends the message before the new one.
        for token in self._any_header:
            self._parser.process(token)

    def start(self, body: Sequence[int] = ()) -> None:
        for token in (END, *self._any_header, *body):
            self._parser.process(token)

    def text_of(self, tokens: Sequence[int]) -> str:
        texts: list[str] = []
        for token in tokens:
            self._parser.process(token)
            texts.append(self._parser.last_content_delta or "")
        return "".join(texts)
