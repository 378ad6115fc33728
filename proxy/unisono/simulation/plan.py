"""Simulation plan: backends, traffic and gateway settings.

An invalid plan raises ConfigError, whose message starts with the path of the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from unisono.errors import ConfigError

STRATEGIES = ("prefix-aware", "least-busy", "simple-shuffle")
MAX_REQUESTS = 1_000_000
MAX_BACKENDS = 1024
# Maximum for prompt and answer together: the context length of gpt-oss.
MAX_TOKENS = 131_072

T = TypeVar("T")


def _number(default: Any, least: float, most: float = 1e9) -> Any:
    return field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Outage:
    """Failure of a backend, which returns with an empty cache.

    Times are in seconds from the start.
    """

    at_s: float = field(metadata={"least": 0.0, "most": 1e9})
    for_s: float = _number(30.0, 0.001)


@dataclass(frozen=True, slots=True)
class BackendPlan:
    """Configuration of one backend, or of `count` identical ones.

    Speeds are in tokens per second: `prefill_tps` for reading a prompt, `decode_tps` for a single answer, and
    `decode_total_tps` for `max_batch` answers together. The default of `decode_total_tps` assumes that memory bandwidth
    limits the hardware. `cache_tokens` is the memory for active requests and, with `prefix_cache`, for the prefixes of
    earlier requests. A single request always fits.
    """

    name: str
    prefill_tps: float = field(metadata={"least": 1.0, "most": 1e9})
    decode_tps: float = field(metadata={"least": 0.1, "most": 1e9})
    decode_total_tps: float | None = _number(None, 0.1)
    max_batch: int = _number(32, 1, 65_536)
    cache_tokens: int = _number(400_000, 0)
    prefix_cache: bool = field(default=True, metadata={"flag": True})
    count: int = _number(1, 1, MAX_BACKENDS)
    weight: int = _number(1, 1, 1_000_000)
    order: int = _number(0, 0, 1_000_000)
    max_parallel_requests: int | None = _number(None, 1, 1_000_000)
    max_tokens_in_flight: int | None = _number(None, 1)
    rpm: int | None = _number(None, 1)
    tpm: int | None = _number(None, 1)
    down: tuple[Outage, ...] = ()

    @property
    def decode_total(self) -> float:
        """Tokens per second with a full batch."""
        if self.decode_total_tps is not None:
            return self.decode_total_tps
        # A step of a full batch takes about three times as long as a step of a single answer.
        return self.decode_tps * self.max_batch / (1 + 2 * (self.max_batch - 1) / max(self.max_batch, 1))


@dataclass(frozen=True, slots=True)
class Burst:
    """Traffic burst that recurs every `every_s` seconds and lasts `for_s` seconds.

    During the burst, `times` as many new conversations start as otherwise.
    """

    every_s: float = _number(60.0, 0.001)
    for_s: float = _number(5.0, 0.001)
    times: float = _number(4.0, 0.0, 1e6)


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Traffic of random conversations, of which `rate` start per second on average.

    A conversation has turns, and a turn has steps. In a tool loop, the prompt of a step contains everything before it
    and a tool result. Lengths are in tokens and lognormally distributed. Each kind of length has its own mean. `spread`
    is the common standard deviation of the logarithm; if it is 0, every length is its mean.
    """

    rate: float = _number(2.0, 1e-6, 1e6)
    burst: Burst | None = None
    # True if requests name their conversation. Otherwise only their prompts identify it.
    sticky: bool = field(default=False, metadata={"flag": True})
    keys: int = _number(8, 1, 100_000)
    # Number of system prompts, including tools. Each conversation has one of them.
    systems: int = _number(4, 1, 100_000)
    system_tokens: int = _number(1500, 0, MAX_TOKENS)
    user_tokens: int = _number(300, 1, MAX_TOKENS)
    output_tokens: int = _number(400, 1, MAX_TOKENS)
    # Fraction of an answer that later prompts contain. They do not contain the reasoning.
    visible: float = _number(0.5, 0.0, 1.0)
    spread: float = _number(0.8, 0.0, 3.0)
    # Mean number of turns in a conversation.
    turns: float = _number(4.0, 1.0, 1000.0)
    # Mean number of tool calls in a turn.
    tool_steps: float = _number(0.5, 0.0, 100.0)
    tool_tokens: int = _number(500, 1, MAX_TOKENS)
    # Mean time between an answer and the next message, in seconds.
    think_s: float = _number(15.0, 0.0, 1e6)
    tool_s: float = _number(1.0, 0.0, 1e6)


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    backends: tuple[BackendPlan, ...]
    traffic: TrafficPlan = field(default_factory=TrafficPlan)
    requests: int = _number(10_000, 1, MAX_REQUESTS)
    max_queue: int = _number(256, 0, 1_000_000)
    queue_timeout_s: float = _number(30.0, 0.0, 1e6)
    strategies: tuple[str, ...] = STRATEGIES
    seed: int = _number(1, 0, 2**63)


def parse(data: object, path: str = "") -> SimulationPlan:
    """Return the plan described by the parsed contents of a file. Raises ConfigError."""
    plan = _section(SimulationPlan, data, path)
    if not plan.backends:
        raise ConfigError(f"{_at(path, 'backends')}: must have at least one backend")
    if sum(backend.count for backend in plan.backends) > MAX_BACKENDS:
        raise ConfigError(f"{_at(path, 'backends')}: must not exceed {MAX_BACKENDS} backends, including `count`")
    names = [backend.name for backend in plan.backends]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(
                f"{_at(path, f'backends[{index}].name')}: {name!r} is already the name of another backend"
            )
    for index, strategy in enumerate(plan.strategies):
        if strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise ConfigError(
                f"{_at(path, f'strategies[{index}]')}: unknown strategy {strategy!r}; must be one of {known}"
            )
    if not plan.strategies:
        raise ConfigError(f"{_at(path, 'strategies')}: must have at least one strategy")
    return plan


NESTED: Mapping[str, type] = {"traffic": TrafficPlan, "burst": Burst}
LISTS: Mapping[str, type] = {"backends": BackendPlan, "down": Outage}


def _section(kind: type[T], data: object, path: str) -> T:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'plan'}: must be a mapping of names to values")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise ConfigError(f"{_at(path, str(name))}: unknown field; known fields are {', '.join(known)}")
    for name, each in known.items():
        if name not in data and each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"{_at(path, name)}: required field is missing")
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
            raise ConfigError(f"{path}: must be a non-empty string")
        return value
    if value is None and known.default is None:
        return None
    return _amount(known, value, path)


def _amount(known: Field[Any], value: object, path: str) -> float | int:
    least, most = known.metadata["least"], known.metadata["most"]
    whole = str(known.type).startswith("int")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigError(f"{path}: must be a {'whole ' if whole else ''}number, not {value!r}")
    # NaN fails every range check.
    if not least <= value <= most:
        raise ConfigError(f"{path}: must be from {least:g} to {most:g}, not {value!r}")
    return value if whole else float(value)


def _listed(value: object, path: str) -> Sequence[object]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{path}: must be a list")
    return value


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
