"""Who is measured: how each is started in front of the fake backend, and which wire its clients speak.

A row is all it takes to measure something else, another gateway for instance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import litellm_env, vllm_wire
from bench.team import PRICE, PROGRAM, Team, sections

KEY = "sk-bench-4b1d6f0c9a7e42538d"
"""What gateways are told to ask for, and clients to send."""


@dataclass(frozen=True, slots=True)
class ContenderSetup:
    """Where a contender works: a folder for its files, the fake backend's port, its own, and those of the run's Redis,
    tool server and second backend, of its metrics and of whoever takes its spans; 0 for contenders that need none."""

    folder: Path
    upstream: int
    port: int
    redis: int = 0
    tools: int = 0
    second: int = 0
    metrics: int = 0
    spans: int = 0

    @property
    def config(self) -> Path:
        """The file of a gateway that is configured by one."""
        return self.folder / f"gateway-{self.port}.yaml"


@dataclass(frozen=True, slots=True)
class Contender:
    """`command` None is the direct connection; it may raise DidNotStart. `ready` is the path that answers 200 once it
    serves, empty for listening; `redis` says that it keeps its state in one."""

    wire: str
    command: Callable[[ContenderSetup], list[str]] | None
    ready: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    has_redis: bool = False
    has_tools: bool = False
    """Whether a tool server and a model that calls it are behind it."""
    has_backend_pair: bool = False
    """Whether two backends that break off are behind it."""
    team: Team | None = None
    """What of keys and of watching it was told to have on or off; its clients send a key accordingly."""
    has_all_cpus: bool = False
    """Whether it may use every CPU there is, and shares them with the rest of the run."""


def gateway_config(
    upstream: int, store: str = "memory://", tools: int = 0, second: int = 0, *, price: str = "", team: str = ""
) -> str:
    """`price` is the model's, `team` further sections."""
    server = f"""\
mcp_servers:
  bench:
    url: http://127.0.0.1:{tools}/mcp
    require_approval: never
    max_concurrent_requests: 100
"""
    models = "".join(
        f"""\
  - model_name: {vllm_wire.MODEL}
    litellm_params:
      model: vllm/{vllm_wire.MODEL}
      api_base: http://127.0.0.1:{port}
"""
        for port in (upstream, second)
        if port
    )
    # Backends that break off each of their answers are to get the next one all the same.
    router_settings = "router_settings:\n  allowed_fails: 1000000\n"
    return f"""\
model_list:
{models}{price}general_settings:
  master_key: {KEY}
store:
  url: {store}
{server if tools else ""}{router_settings if second else ""}{team}"""


def litellm_config(upstream: int) -> str:
    """The same model as plain chat, and what LiteLLM's guide advises for production."""
    return f"""\
model_list:
  - model_name: {vllm_wire.MODEL}
    litellm_params:
      model: openai/{vllm_wire.MODEL}
      api_base: http://127.0.0.1:{upstream}/v1
      api_key: none
litellm_settings:
  set_verbose: false
general_settings:
  master_key: {KEY}
"""


LITELLM_ENV = {
    # Prices from the package and not from the network.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
}


def _unisono(setup: ContenderSetup, workers: int = 1, team: Team | None = None) -> list[str]:
    store = f"redis://127.0.0.1:{setup.redis}/0" if setup.redis else "memory://"
    extra = {}
    if team is not None:
        # What answers cost is measured, and not what becomes of them where Redis has no CPU for a moment.
        store += "\n  deadline_s: 5"
        extra = {"price": PRICE, "team": sections(team, setup.metrics, setup.spans)}
    setup.config.write_text(gateway_config(setup.upstream, store, setup.tools, setup.second, **extra))
    serve = ["serve", "--config", str(setup.config), "--port", str(setup.port), "--workers", str(workers)]
    return [str(PROGRAM), *serve]


def _team(*, has_redis: bool = True, has_key: bool = False, has_traces: bool = False) -> Contender:
    team = Team(has_key, has_traces)
    return Contender("chat", partial(_unisono, team=team), ready="/health/readiness", has_redis=has_redis, team=team)


def _litellm(setup: ContenderSetup) -> list[str]:
    config = setup.folder / "litellm.yaml"
    config.write_text(litellm_config(setup.upstream))
    serve = ["--config", str(config), "--host", "127.0.0.1", "--port", str(setup.port), "--num_workers", "1"]
    return [str(litellm_env.program()), *serve, "--telemetry", "False"]


def _module(name: str) -> Callable[[ContenderSetup], list[str]]:
    return lambda setup: [sys.executable, "-m", f"bench.{name}", str(setup.port), str(setup.upstream)]


CONTENDERS: dict[str, Contender] = {
    "direct": Contender("vllm", None),
    "direct chat": Contender("chat", None),
    "relay": Contender("vllm", _module("relay")),
    "aiohttp": Contender("vllm", _module("aiohttp_relay"), ready="/health"),
    "unisono": Contender("chat", _unisono, ready="/health/readiness"),
    "unisono+redis": Contender("chat", _unisono, ready="/health/readiness", has_redis=True),
    "unisono+tools": Contender("chat", _unisono, ready="/health/readiness", has_tools=True),
    "unisono+pair": Contender("chat", _unisono, ready="/health/readiness", has_backend_pair=True),
    "unisono+one": Contender("chat", _unisono, ready="/health/readiness", has_redis=True, has_all_cpus=True),
    "unisono+two": Contender(
        "chat", partial(_unisono, workers=2), ready="/health/readiness", has_redis=True, has_all_cpus=True
    ),
    "team+bare": _team(has_redis=False),
    "team+store": _team(),
    "team+keys": _team(has_key=True),
    "team+all": _team(has_key=True, has_traces=True),
    "litellm": Contender("chat", _litellm, ready="/health/readiness", env=LITELLM_ENV),
}
