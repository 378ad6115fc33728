"""Who is measured: how each is started in front of the fake backend, and which wire its clients speak.

A row is all it takes to measure something else, another gateway for instance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import vllm_wire


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a contender works: a folder for its files, the fake backend's port, its own."""

    folder: Path
    upstream: int
    port: int


@dataclass(frozen=True, slots=True)
class Contender:
    """`command` None is the direct connection. `ready` is the path that answers 200 once it serves, empty for
    listening."""

    wire: str
    command: Callable[[Setting], list[str]] | None
    ready: str = ""


def gateway_config(upstream: int) -> str:
    return f"""\
model_list:
  - model_name: {vllm_wire.MODEL}
    litellm_params:
      model: vllm/{vllm_wire.MODEL}
      api_base: http://127.0.0.1:{upstream}
"""


def _unisono(setting: Setting) -> list[str]:
    config = setting.folder / "gateway.yaml"
    config.write_text(gateway_config(setting.upstream))
    program = Path(sys.executable).parent / "unisono"
    return [str(program), "serve", "--config", str(config), "--port", str(setting.port)]


def _module(name: str) -> Callable[[Setting], list[str]]:
    return lambda setting: [sys.executable, "-m", f"bench.{name}", str(setting.port), str(setting.upstream)]


CONTENDERS: dict[str, Contender] = {
    "direct": Contender("vllm", None),
    "relay": Contender("vllm", _module("relay")),
    "aiohttp": Contender("vllm", _module("aiohttp_relay"), ready="/health"),
    "unisono": Contender("chat", _unisono, ready="/health/readiness"),
}
