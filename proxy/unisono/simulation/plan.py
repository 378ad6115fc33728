"""What is simulated: backends, the traffic they get, and how the gateway is set up. A plan that cannot be is a
ConfigError whose message begins with the path of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from unisono.errors import ConfigError

STRATEGIES = ("prefix-aware", "least-busy", "simple-shuffle")
MOST_REQUESTS = 1_000_000
MOST_BACKENDS = 1024
MOST_TOKENS = 131_072
"""Of a prompt and its answer together: what gpt-oss can read."""

T = TypeVar("T")


def _number(default: Any, least: float, most: float = 1e9) -> Any:
    return field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Outage:
    """A backend dies and comes back with nothing in its cache. Seconds from the beginning."""

    at_s: float = field(metadata={"least": 0.0, "most": 1e9})
    for_s: float = _number(30.0, 0.001)


@dataclass(frozen=True, slots=True)
class BackendPlan:
    """One backend, or `count` alike. Speeds are in tokens a second: `prefill_tps` reads a prompt, `decode_tps` writes
    one answer alone, and `decode_total_tps` writes `max_batch` of them together, all counted; left out, it is what
    hardware bound by memory makes of it. `cache_tokens` is the memory for running requests and, with `prefix_cache`,
    for what is left of earlier ones; a single request always fits."""

    name: str
    prefill_tps: float = field(metadata={"least": 1.0, "most": 1e9})
    decode_tps: float = field(metadata={"least": 0.1, "most": 1e9})
    decode_total_tps: float | None = _number(None, 0.1)
    max_batch: int = _number(32, 1, 65_536)
    cache_tokens: int = _number(400_000, 0)
    prefix_cache: bool = field(default=True, metadata={"flag": True})
    count: int = _number(1, 1, MOST_BACKENDS)
    weight: int = _number(1, 1, 1_000_000)
    order: int = _number(0, 0, 1_000_000)
    max_parallel_requests: int | None = _number(None, 1, 1_000_000)
    max_tokens_in_flight: int | None = _number(None, 1)
    rpm: int | None = _number(None, 1)
    tpm: int | None = _number(None, 1)
    down: tuple[Outage, ...] = ()

    @property
    def decode_total(self) -> float:
        """Tokens a second with a full batch."""
        if self.decode_total_tps is not None:
            return self.decode_total_tps
        # A step of a full batch takes about three times as long as one of a single answer.
        return self.decode_tps * self.max_batch / (1 + 2 * (self.max_batch - 1) / max(self.max_batch, 1))


@dataclass(frozen=True, slots=True)
class Burst:
    """Every `every_s` seconds conversations begin `times` as often for `for_s` seconds."""

    every_s: float = _number(60.0, 0.001)
    for_s: float = _number(5.0, 0.001)
    times: float = _number(4.0, 0.0, 1e6)


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Conversations begin at random, `rate` each second on average. Each has turns, a turn has steps: with a tool loop
    the prompt of a step is all that was there before and a tool's result. Lengths are in tokens and lognormal: the
    mean, and one `spread` (the deviation of the logarithm) for all of them; 0 makes every length the mean."""

    rate: float = _number(2.0, 1e-6, 1e6)
    burst: Burst | None = None
    sticky: bool = field(default=False, metadata={"flag": True})
    """Whether requests say which conversation they belong to; else only their prompts show it."""
    keys: int = _number(8, 1, 100_000)
    systems: int = _number(4, 1, 100_000)
    """How many system prompts (with their tools) there are; every conversation has one of them."""
    system_tokens: int = _number(1500, 0, MOST_TOKENS)
    user_tokens: int = _number(300, 1, MOST_TOKENS)
    output_tokens: int = _number(400, 1, MOST_TOKENS)
    visible: float = _number(0.5, 0.0, 1.0)
    """The part of an answer that is in later prompts: reasoning is not."""
    spread: float = _number(0.8, 0.0, 3.0)
    turns: float = _number(4.0, 1.0, 1000.0)
    """On average."""
    tool_steps: float = _number(0.5, 0.0, 100.0)
    """Tool calls in a turn, on average."""
    tool_tokens: int = _number(500, 1, MOST_TOKENS)
    think_s: float = _number(15.0, 0.0, 1e6)
    """Between an answer and the next message, on average."""
    tool_s: float = _number(1.0, 0.0, 1e6)


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    backends: tuple[BackendPlan, ...]
    traffic: TrafficPlan = field(default_factory=TrafficPlan)
    requests: int = _number(10_000, 1, MOST_REQUESTS)
    max_queue: int = _number(256, 0, 1_000_000)
    queue_timeout_s: float = _number(30.0, 0.0, 1e6)
    strategies: tuple[str, ...] = STRATEGIES
    seed: int = _number(1, 0, 2**63)


def parse(data: object, path: str = "") -> SimulationPlan:
    """A plan from what a file holds. Raises ConfigError."""
    plan = _section(SimulationPlan, data, path)
    if not plan.backends:
        raise ConfigError(f"{_at(path, 'backends')}: a plan needs at least one")
    if sum(backend.count for backend in plan.backends) > MOST_BACKENDS:
        raise ConfigError(f"{_at(path, 'backends')}: more than {MOST_BACKENDS}")
    names = [backend.name for backend in plan.backends]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{_at(path, f'backends[{index}].name')}: {name!r} is the name of another one too")
    for index, strategy in enumerate(plan.strategies):
        if strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise ConfigError(f"{_at(path, f'strategies[{index}]')}: {strategy!r} is not one of {known}")
    if not plan.strategies:
        raise ConfigError(f"{_at(path, 'strategies')}: a plan needs at least one")
    return plan


NESTED: Mapping[str, type] = {"traffic": TrafficPlan, "burst": Burst}
LISTS: Mapping[str, type] = {"backends": BackendPlan, "down": Outage}


def _section(kind: type[T], data: object, path: str) -> T:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'plan'}: must hold names and values")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise ConfigError(f"{_at(path, str(name))}: there is no such field; there are {', '.join(known)}")
    for name, each in known.items():
        if name not in data and each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"{_at(path, name)}: is missing")
    return kind(**{str(name): _value(known[name], value, _at(path, name)) for name, value in data.items()})


def _value(known: Field[Any], value: object, path: str) -> object:
    if known.name in NESTED:
        return None if value is None and known.default is None else _section(NESTED[known.name], value, path)
    if known.name in LISTS:
        kind = LISTS[known.name]
        return tuple(_section(kind, each, f"{path}[{index}]") for index, each in enumerate(_listed(value, path)))
    if known.name == "strategies":
        return tuple(str(each) for each in _listed(value, path))
    if "flag" in known.metadata:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: must be true or false")
        return value
    if "least" not in known.metadata:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{path}: must be a name")
        return value
    if value is None and known.default is None:
        return None
    return _amount(known, value, path)


def _amount(known: Field[Any], value: object, path: str) -> float | int:
    least, most = known.metadata["least"], known.metadata["most"]
    whole = str(known.type).startswith("int")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigError(f"{path}: must be a {'whole ' if whole else ''}number, not {value!r}")
    # Not a number is not in any range.
    if not least <= value <= most:
        raise ConfigError(f"{path}: must be from {least:g} to {most:g}, not {value!r}")
    return value if whole else float(value)


def _listed(value: object, path: str) -> Sequence[object]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{path}: must be a list")
    return value


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
