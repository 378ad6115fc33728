"""The name of a tool, where one of several has to be called and the model says which.

The prompt ends in the beginning of the recipient, at a token's end whichever tool it is: ` to=functions` without its
dot, since `.get` is one token. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from unisono.core.conversation import Tokens
from unisono.core.generation import FIRST_SPECIAL, OneOf
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import COMMENTARY
from unisono.harmony.recipients import FUNCTIONS, read_recipient

MOST_TOKENS: Final = 48
"""So many tokens are read as a name."""
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class ToolNaming:
    """`recipients` are those to choose from, as headers name them."""

    def __init__(self, encoding: Encoding, recipients: Sequence[str]) -> None:
        self._encoding = encoding
        self._recipients = tuple(recipients)
        functions = all(recipient.startswith(FUNCTIONS) for recipient in recipients)
        self._stem = " to=functions" if functions else " to="
        self._tails = {f" to={recipient}".removeprefix(self._stem): recipient for recipient in recipients}
        self._said: list[int] = []

    @property
    def header(self) -> Tokens:
        """What the prompt ends in, behind `<|start|>assistant`."""
        return tuple(self._encoding.encode_marked(f"<|channel|>{COMMENTARY}{self._stem}"))

    @property
    def choices(self) -> OneOf:
        """What may be generated behind it."""
        return OneOf(tuple(self._tails))

    @property
    def text(self) -> str:
        """Text of the name so far."""
        return self._encoding.decode(self._said)

    def begin(self) -> None:
        self._said = []

    def read(self, token: int) -> tuple[str | None, bool]:
        """The tool that is meant, None while it is not known; and whether nothing more tells."""
        if token < FIRST_SPECIAL:
            self._said.append(token)
        return self.found(over=token >= FIRST_SPECIAL or len(self._said) >= MOST_TOKENS)

    def found(self, *, over: bool) -> tuple[str | None, bool]:
        """The same of what was read so far. `over`: nothing more of the name comes."""
        said = self.text
        name = (_NAME.match(said) or [""])[0]
        begun = [recipient for tail, recipient in self._tails.items() if tail.startswith(name)]
        only = begun[0] if len(begun) == 1 and name.strip(".") else None
        if over or len(name) < len(said):
            return self._tails.get(name) or only or self._mended(name), True
        return only, only is not None

    def _mended(self, name: str) -> str | None:
        declared = frozenset(each.removeprefix(FUNCTIONS) for each in self._recipients if each.startswith(FUNCTIONS))
        word = f"{self._stem}{name}".removeprefix(" to=")
        meant = f"{FUNCTIONS}{read_recipient(word, declared).name}"
        return meant if meant in self._recipients else None
