"""A decoded prompt as the scripted model reads it: declared tools, messages, task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

MESSAGE = re.compile(
    r"<\|start\|>([^<]*)(.*?)<\|message\|>(.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)", re.S
)
RECIPIENT = re.compile(r"to=functions\.(\S+?)(?=[\s<]|$)")
# A tool takes an object of parameters, or text.
TOOL = re.compile(r"^type (\S+) = \((?:_: (?:(string)|\{\n(.*?)^\}))?\) => any;", re.M | re.S)
TEXT_INPUT = frozenset({"input"})
PARAMETER = re.compile(r'^"?([\w-]+)"?\??:', re.M)
FOLDER = re.compile(r"<cwd>(.+?)</cwd>|[Ww]orking directory: (\S+)")


@dataclass(frozen=True)
class PromptMessage:
    """`author` is a role or the name of a tool. `tool` is the tool that the message calls, or an empty string."""

    author: str
    tool: str
    text: str


@dataclass(frozen=True)
class PromptView:
    text: str

    @cached_property
    def tools(self) -> Mapping[str, frozenset[str]]:
        """Parameter names of each declared tool; `input` for one that takes text."""
        developer = "\n".join(message.text for message in self.messages if message.author == "developer")
        return {
            name: TEXT_INPUT if text else frozenset(PARAMETER.findall(fields))
            for name, text, fields in TOOL.findall(developer)
        }

    @cached_property
    def messages(self) -> list[PromptMessage]:
        found = []
        for role, rest, text in MESSAGE.findall(self.text):
            author, _, role_rest = role.partition(" ")
            recipient = RECIPIENT.search(role_rest + rest)
            found.append(PromptMessage(author, recipient[1] if recipient else "", text))
        return found

    @cached_property
    def user_texts(self) -> list[str]:
        return [message.text for message in self.messages if message.author == "user"]

    @property
    def last_user_text(self) -> str:
        return self.user_texts[-1] if self.user_texts else ""

    @cached_property
    def folder(self) -> str:
        """Working directory of the agent, as its prompt states it."""
        found = FOLDER.search(self.text)
        return (found[1] or found[2]).rstrip("/") if found else "."

    def has_result(self, text: str) -> bool:
        """Return whether a tool result contains the text."""
        return any(text in message.text for message in self.messages if message.author.startswith("functions."))

    @cached_property
    def conversation(self) -> str:
        """Text of all messages after the instructions, such as tool results and summaries."""
        return "\n".join(message.text for message in self.messages if message.author not in {"system", "developer"})

    @property
    def last_call(self) -> str:
        """Arguments of the last call."""
        return next((message.text for message in reversed(self.messages) if message.tool), "")

    @property
    def last_result(self) -> str:
        results = (message.text for message in reversed(self.messages) if message.author.startswith("functions."))
        return next(results, "")
