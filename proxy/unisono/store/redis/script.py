"""Conditional writes as Lua scripts, which check and write atomically or refuse unchanged.

A script performs all checks before its first write, because Redis does not roll back. It returns `ok` or the name of
its refusal (`unisono.store.write_errors`) and a value. Each may be repeated: data that already exists counts as
written. Scripts use only commands of Redis 6.2, and all keys of a script are in one hash slot.
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
    """Script and whether it only reads. The result of a read needs no copy on a replica."""

    body: str
    is_read: bool = False
    text: str = field(init=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", PRELUDE + self.body)
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())
