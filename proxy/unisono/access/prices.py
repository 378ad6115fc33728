"""Prices of models, from the configuration or from LiteLLM's price list.

All amounts of money are integers in micro-USD. Costs are rounded up, separately for input and output. So the cost that
is reserved for a request is never lower than its actual cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any, Final

from unisono.config import ModelEntry
from unisono.config.price_settings import MODE_UNITS, UNIT_KEYS
from unisono.core.billed_units import NO_UNITS, BilledUnits
from unisono.core.frozen import dataclass
from unisono.core.observer import StepDone
from unisono.core.quotas import MILLION

# LiteLLM's names of prices in USD per token.
PER_TOKEN: Final = ("input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost")


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of a deployment, in micro-USD per million tokens or per million of another unit.

    `cached` is the price of prompt tokens that a backend reads from its cache.
    """

    input: int = 0
    output: int = 0
    cached: int = 0
    queries: int = 0
    images: int = 0
    seconds: int = 0
    characters: int = 0

    def input_cost(self, tokens: int, cached: int = 0) -> int:
        """Return the cost of a prompt in micro-USD. `cached` of its `tokens` were read from a cache."""
        cached = min(cached, tokens)
        return _rounded_up((tokens - cached) * self.input + cached * self.cached)

    def output_cost(self, tokens: int) -> int:
        return _rounded_up(tokens * self.output)

    def unit_cost(self, units: BilledUnits) -> int:
        """Return the cost of all units other than tokens, in micro-USD."""
        amount = (
            self.queries * units.queries
            + self.images * units.images
            + self.seconds * units.seconds
            + self.characters * units.characters
        )
        return _rounded_up(ceil(amount))


FREE: Final = Price()


def _rounded_up(amount: int) -> int:
    return -(-amount // MILLION)


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of deployments, and price ceilings of models.

    `of_deployment` has the prices of each deployment, by its public name. `of_model` has the highest prices of the
    deployments of each model. `ceilings` has, for each requested model, the highest prices of its own deployments and
    of those of its fallback models. The highest price is determined for each unit separately.
    """

    of_deployment: Mapping[str, Price] = field(default_factory=dict)
    of_model: Mapping[str, Price] = field(default_factory=dict)
    ceilings: Mapping[str, Price] = field(default_factory=dict)

    def highest(self, deployments: Iterable[str]) -> Price:
        """Return the highest prices of these deployments, by their public names."""
        # The set contains equal prices only once, which keeps the comparison short.
        return _highest(*{self.of_deployment.get(name, FREE) for name in deployments})

    def settled(self, model: str, deployment: str) -> Price:
        """Return the price of `deployment`, or the ceiling of `model` if that price is unknown."""
        price = self.of_deployment.get(deployment)
        return self.ceilings.get(model, FREE) if price is None else price

    def unit_cost(self, model: str, steps: Iterable[StepDone]) -> int:
        """Return the cost of all units other than tokens, in micro-USD.

        Each step is charged at the prices of its deployment.
        """
        cost = 0
        for step in steps:
            if step.units is not NO_UNITS:
                cost += self.settled(model, step.deployment).unit_cost(step.units)
        return cost


def price_list(
    entries: Sequence[ModelEntry], deployments: Sequence[str], fallbacks: Mapping[str, Sequence[str]]
) -> PriceList:
    """Build the price list.

    `deployments` are the names of `entries` in the same order. `fallbacks` has the fallback models of each model.
    """
    prices = [_price(entry) for entry in entries]
    own: dict[str, Price] = {}
    for entry, price in zip(entries, prices, strict=True):
        own[entry.model_name] = _highest(own.get(entry.model_name, FREE), price)
    ceilings = {
        model: _highest(price, *(own.get(other, FREE) for other in fallbacks.get(model, ())))
        for model, price in own.items()
    }
    return PriceList(dict(zip(deployments, prices, strict=True)), own, ceilings)


def _highest(*prices: Price) -> Price:
    if len(prices) == 1:
        return prices[0]
    return Price(*(max((getattr(price, name) for price in prices), default=0) for name in Price.__slots__))


def _price(entry: ModelEntry) -> Price:
    own, params, info = entry.unisono.price, entry.litellm_params, entry.model_info
    listed = _price_fields(entry)
    units = _unit_prices(entry, listed)
    if any(units.values()):
        # As in LiteLLM, prices of other units replace the prices of tokens in LiteLLM's list. Prices of tokens that the
        # entry itself sets are charged in addition.
        listed = {}
    rates: list[float | None] = []
    for ours, theirs in zip((own.input, own.output, own.cached_input), PER_TOKEN, strict=True):
        if ours is not None:
            rates.append(ours)
            continue
        values = (getattr(params, theirs), getattr(info, theirs), listed.get(theirs))
        rates.append(next((float(Decimal(str(rate)) * MILLION) for rate in values if rate is not None), None))
    per_input, per_output, per_cached = rates
    return Price(
        _micro(per_input or 0.0),
        _micro(per_output or 0.0),
        _micro(per_cached if per_cached is not None else per_input or 0.0),
        **units,
    )


def _unit_prices(entry: ModelEntry, listed: Mapping[str, Any]) -> dict[str, int]:
    """Return the prices of the units by which the `mode` of an entry is billed.

    Prices are in micro-USD per million units. For each unit, the first price applies that is found in `litellm_params`,
    in `model_info` or in LiteLLM's price list, in this order.
    """
    prices: dict[str, int] = {}
    sources = (entry.litellm_params.get_price, entry.model_info.get_price, listed.get)
    for unit in MODE_UNITS.get(entry.model_info.mode, ()):
        rates = (source(key) for source in sources for key in UNIT_KEYS[unit])
        prices[unit] = next((_micro(float(Decimal(str(rate)) * MILLION)) for rate in rates if rate), 0)
    return prices


def _micro(usd: float) -> int:
    return int((Decimal(str(usd)) * MILLION).to_integral_value())


def _price_fields(entry: ModelEntry) -> Mapping[str, Any]:
    prices = litellm_prices()
    return prices.get(entry.litellm_params.model) or prices.get(entry.backend_model) or {}


@cache
def litellm_prices() -> Mapping[str, Mapping[str, Any]]:
    """Return LiteLLM's price list by LiteLLM's model names; empty if litellm is not installed.

    litellm itself is not imported, because that takes seconds.
    """
    spec = find_spec("litellm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "model_prices_and_context_window_backup.json"
        if path.is_file():
            listed: Mapping[str, Mapping[str, Any]] = json.loads(path.read_bytes())
            return listed
    return {}
