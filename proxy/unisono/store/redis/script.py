"""Conditional writes as Lua scripts, which are atomic and change nothing if they refuse.

A script performs all checks before its first write, because Redis does not roll back. It returns `ok` and a value, or
the name of a refusal from the table in `unisono.store.write_errors`. Each script may be repeated: a repetition finds
its data stored and returns `ok`. Scripts use only commands of Redis 6.2, and all keys of a script are in one hash slot.
"""

from __future__ import annotations

import hashlib
from dataclasses import field

from unisono.core.frozen import dataclass

# Functions for all scripts.
PRELUDE = """
local next_arg = 1
local function arg()
  next_arg = next_arg + 1
  return ARGV[next_arg - 1]
end

local function clock()
  local now = redis.call('TIME')
  return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """Lua script. `is_read` is True if it only reads, so that no replica has to acknowledge it."""

    body: str
    is_read: bool = False
    text: str = field(init=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", PRELUDE + self.body)
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())
