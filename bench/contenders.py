"""Contenders: the command that starts each one, and the wire of its clients.

A new row is enough to measure another gateway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import peer_env, vllm_wire
from bench.team import PRICE, PROGRAM, Team, sections

# Master key of the gateways, sent by the clients.
KEY = "sk-bench-4b1d6f0c9a7e42538d"


@dataclass(frozen=True, slots=True)
class ContenderSetup:
    """Folder and ports for one contender; a port that it does not use is 0.

    `upstream` is the fake backend and `second` the second one. `redis`, `tools` and `spans` belong to other processes
    of the run; `metrics` and `port` belong to the contender.
    """

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
        """Path of the configuration file of a gateway."""
        return self.folder / f"gateway-{self.port}.yaml"


@dataclass(frozen=True, slots=True)
class Contender:
    """Command, wire and needs of a contender.

    `command` is None for the direct connection, and may raise StartError. `ready` is the path that returns 200 once the
    contender serves; if it is empty, an open port is enough. `has_redis` contenders store their state in Redis.
    """

    wire: str
    command: Callable[[ContenderSetup], list[str]] | None
    ready: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    has_redis: bool = False
    # It uses a tool server and a model that calls tools.
    has_tools: bool = False
    # It uses two backends that break off their answers.
    has_backend_pair: bool = False
    # Enabled features of a team. Its clients send a virtual key if the team has one.
    team: Team | None = None
    # It may use every CPU, and shares them with the rest of the run.
    has_all_cpus: bool = False


def gateway_config(
    upstream: int, store: str = "memory://", tools: int = 0, second: int = 0, *, price: str = "", team: str = ""
) -> str:
    """Return a gateway configuration with the YAML of a `price` and of `team` sections."""
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
    # Circuits must stay closed although each answer breaks off.
    router_settings = "router_settings:\n  allowed_fails: 1000000\n"
    return f"""\
model_list:
{models}{price}general_settings:
  master_key: {KEY}
store:
  url: {store}
{server if tools else ""}{router_settings if second else ""}{team}"""


def litellm_config(upstream: int) -> str:
    """Return a LiteLLM configuration for the same model as plain chat.

    The settings are those that LiteLLM's guide recommends for production.
    """
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
    # Read prices from the package and not from the network.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
}


def _unisono(
    setup: ContenderSetup,
    workers: int = 1,
    team: Team | None = None,
    settings: str = "",
    *,
    has_second_name: bool = False,
) -> list[str]:
    """Write the configuration, with the YAML of `settings` at its end, and return the command.

    With `has_second_name`, the backend is two deployments of the same address.
    """
    second = setup.upstream if has_second_name else setup.second
    store = f"redis://127.0.0.1:{setup.redis}/0" if setup.redis else "memory://"
    extra = {}
    if team is not None:
        # A long deadline: the measurement is the cost of answers, not of errors when Redis has no CPU.
        store += "\n  deadline_s: 5"
        extra = {"price": PRICE, "team": sections(team, setup.metrics, setup.spans)}
    setup.config.write_text(gateway_config(setup.upstream, store, setup.tools, second, **extra) + settings)
    serve = ["serve", "--config", str(setup.config), "--port", str(setup.port), "--workers", str(workers)]
    return [str(PROGRAM), *serve]


def _fidelity(sample: float) -> Contender:
    """Return a contender that scores this share of its answers while the backends are idle."""
    settings = f"""\
unisono:
  fidelity:
    {vllm_wire.MODEL}: {{reference: vllm-2, sample: {sample}, budget: 1000000000}}
"""
    command = partial(_unisono, settings=settings, has_second_name=True)
    return Contender("chat", command, ready="/health/readiness")


def _team(*, has_redis: bool = True, has_key: bool = False, has_traces: bool = False) -> Contender:
    team = Team(has_key, has_traces)
    return Contender("chat", partial(_unisono, team=team), ready="/health/readiness", has_redis=has_redis, team=team)


def _litellm(setup: ContenderSetup) -> list[str]:
    config = setup.folder / "litellm.yaml"
    config.write_text(litellm_config(setup.upstream))
    serve = ["--config", str(config), "--host", "127.0.0.1", "--port", str(setup.port), "--num_workers", "1"]
    return [str(peer_env.program("litellm")), *serve, "--telemetry", "False"]


def _smg(setup: ContenderSetup) -> list[str]:
    backend = f"http://127.0.0.1:{setup.upstream}"
    serve = ["--host", "127.0.0.1", "--port", str(setup.port), "--worker-urls", backend, "--policy", "round_robin"]
    return [str(peer_env.program("smg")), "launch", *serve, "--log-level", "warn"]


def _module(name: str) -> Callable[[ContenderSetup], list[str]]:
    return lambda setup: [sys.executable, "-m", f"bench.{name}", str(setup.port), str(setup.upstream)]


CONTENDERS: dict[str, Contender] = {
    "direct": Contender("vllm", None),
    "direct chat": Contender("chat", None),
    "relay": Contender("vllm", _module("relay")),
    "aiohttp": Contender("vllm", _module("aiohttp_relay"), ready="/health"),
    # Shepherd Model Gateway, written in Rust: relays chat without parsing it.
    "smg": Contender("chat", _smg, ready="/readiness"),
    # Only the Harmony work of an answer; see `floor.py`.
    "floor": Contender("chat", _module("floor"), ready="/health"),
    "unisono": Contender("chat", _unisono, ready="/health/readiness"),
    "unisono+redis": Contender("chat", _unisono, ready="/health/readiness", has_redis=True),
    "unisono-records": Contender(
        "chat",
        partial(_unisono, settings="unisono:\n  request_records: {keep: 0}\n"),
        ready="/health/readiness",
        has_redis=True,
    ),
    # Ten times the share in the guide, and everything.
    "unisono+fidelity": _fidelity(0.1),
    "unisono+fidelity-all": _fidelity(1.0),
    "unisono-fidelity": Contender("chat", partial(_unisono, has_second_name=True), ready="/health/readiness"),
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
