"""Names of tools in headers, and the model's choice among several tools.

The prompt of a choice ends in the beginning of the recipient, at a token boundary for every tool: ` to=functions`
without its dot, since `.get` is one token. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from unisono.core.conversation import Tokens
from unisono.core.generation import FIRST_SPECIAL, OneOf
from unisono.harmony.builtin_tools import is_builtin
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import COMMENTARY, Header
from unisono.harmony.recipients import FUNCTIONS, Recipient, RecipientKind, read_recipient

MAX_NAME_TOKENS: Final = 48
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class ToolNaming:
    """The name of one of several tools.

    `recipients` are the possible tools, as named in headers.
    """

    def __init__(self, encoding: Encoding, recipients: Sequence[str]) -> None:
        self._encoding = encoding
        self._recipients = tuple(recipients)
        functions = all(recipient.startswith(FUNCTIONS) for recipient in recipients)
        self._stem = " to=functions" if functions else " to="
        self._tails = {f" to={recipient}".removeprefix(self._stem): recipient for recipient in recipients}
        self._tokens: list[int] = []

    @property
    def header(self) -> Tokens:
        """Return the prompt's last tokens, after `<|start|>assistant`."""
        return tuple(self._encoding.encode_marked(f"<|channel|>{COMMENTARY}{self._stem}"))

    @property
    def choices(self) -> OneOf:
        """Return the constraint for the text that follows the header."""
        return OneOf(tuple(self._tails))

    @property
    def text(self) -> str:
        """Return the text of the name so far."""
        return self._encoding.decode(self._tokens)

    def reset(self) -> None:
        self._tokens = []

    def read(self, token: int) -> tuple[str | None, bool]:
        """Read a token; return the tool, None if it is unknown, and whether the name is decided."""
        if token < FIRST_SPECIAL:
            self._tokens.append(token)
        return self.found(is_complete=token >= FIRST_SPECIAL or len(self._tokens) >= MAX_NAME_TOKENS)

    def found(self, *, is_complete: bool) -> tuple[str | None, bool]:
        """Return the same for the tokens so far. `is_complete`: the name has ended."""
        text = self.text
        name = (_NAME.match(text) or [""])[0]
        begun = [recipient for tail, recipient in self._tails.items() if tail.startswith(name)]
        only = begun[0] if len(begun) == 1 and name.strip(".") else None
        # A character that no tool name contains ends the name too.
        if is_complete or len(name) < len(text):
            return self._tails.get(name) or only or self._repaired(name), True
        return only, only is not None

    def _repaired(self, name: str) -> str | None:
        declared = frozenset(each.removeprefix(FUNCTIONS) for each in self._recipients if each.startswith(FUNCTIONS))
        # The name is read as in a header that the model wrote, with the same repairs of its spelling.
        word = f"{self._stem}{name}".removeprefix(" to=")
        meant = f"{FUNCTIONS}{read_recipient(word, declared).name}"
        return meant if meant in self._recipients else None


def header_for(recipient: str, *, is_text: bool = False) -> Header:
    """Return the header of a call to `recipient`; `is_text` means that it takes no JSON."""
    if is_builtin(recipient):
        return Header("analysis", Recipient(RecipientKind.HOSTED, recipient))
    return Header(
        COMMENTARY, Recipient(RecipientKind.FUNCTION, recipient.removeprefix(FUNCTIONS)), None if is_text else "json"
    )
