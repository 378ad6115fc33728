"""Construction of the price list, and of budgets for the gateway and for providers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.access.prices import FREE, PriceList, price_list
from unisono.bootstrap.deployments import deployment_names, tag_rules
from unisono.config import KIND_ALIASES, Config, ModelRegistry
from unisono.config.budget_settings import to_period
from unisono.core.budget_period import NO_PERIOD
from unisono.core.quotas import MILLION, KeyLimits
from unisono.core.route_protocol import RequestedRouting
from unisono.errors import ConfigError
from unisono.middleware.quota import Metering
from unisono.middleware.shared_budgets import EligibleDeployments, SharedBudget, SharedBudgets

GATEWAY_BUDGET = "litellm_settings.max_budget"
PROVIDER_BUDGETS = "router_settings.provider_budget_config"


def build_prices(config: Config, catalogue: ModelRegistry) -> PriceList:
    fallbacks = {model: (*others.fallbacks, *others.larger) for model, others in catalogue.fallback_models.items()}
    return price_list(config.model_list, deployment_names(config.model_list), fallbacks)


def build_eligible(config: Config, catalogue: ModelRegistry) -> EligibleDeployments:
    of_model: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for entry, name in zip(config.model_list, deployment_names(config.model_list), strict=True):
        of_model.setdefault(entry.model_name, []).append((name, entry.litellm_params.tags))
    rules = tag_rules(config.router_settings)

    def deployments(model: str, requested: RequestedRouting) -> frozenset[str]:
        own = of_model.get(model, [])
        if rules is None or requested.deployment:
            # A deployment that is selected by name may have any tags.
            return frozenset(name for name, _ in own if requested.deployment in ("", name))
        return frozenset(rules.select(own, requested.tags))

    return EligibleDeployments(deployments, catalogue.fallback_models)


def build_budgets(config: Config, metering: Metering) -> SharedBudgets | None:
    """Return the shared budgets, or None if no budget is configured.

    Raises ConfigError if a budget could have no effect.
    """
    budgets = [*_budgets(config, metering.prices)]
    return SharedBudgets(metering, budgets) if budgets else None


def _budgets(config: Config, prices: PriceList) -> Iterator[SharedBudget]:
    names = deployment_names(config.model_list)
    # As in LiteLLM, 0 means no limit for the gateway.
    if limit := config.litellm_settings.max_budget:
        _check_prices(names, prices, GATEWAY_BUDGET)
        limits = _limits(limit, config.litellm_settings.budget_duration)
        yield SharedBudget("gateway", "this gateway", limits, frozenset(names))
    for provider, budget in config.router_settings.provider_budget_config.items():
        path = f"{PROVIDER_BUDGETS}.{provider}"
        for index, entry in enumerate(config.model_list):
            if not entry.kind:
                raise ConfigError(
                    f"model_list[{index}].litellm_params.model: the provider of `{entry.litellm_params.model}` is "
                    f"unknown, so {PROVIDER_BUDGETS} cannot be applied; write `<provider>/{entry.litellm_params.model}`"
                )
        own = _deployments_of(provider, config, names)
        if not own:
            raise ConfigError(f"{path}: no entry of `model_list` has this provider; remove this budget")
        _check_prices(own, prices, path)
        amount = budget.budget_limit if budget.budget_limit is not None else budget.max_budget
        assert amount is not None
        period = budget.time_period or budget.budget_duration
        account = _account_of(provider, config)
        yield SharedBudget(account, f"the provider `{provider}`", _limits(amount, period), frozenset(own))


def _account_of(provider: str, config: Config) -> str:
    """Return the name of the account to which the budget of a provider is charged.

    It contains the kind, so that the spend is kept if a file changes to another name of the kind. If several names of
    a kind have budgets, each has an account of its own.
    """
    kind = KIND_ALIASES.get(provider, provider)
    budgets = config.router_settings.provider_budget_config
    is_only_one = [KIND_ALIASES.get(name, name) for name in budgets].count(kind) == 1
    return f"provider {kind if is_only_one else provider}"


def _deployments_of(provider: str, config: Config, names: Sequence[str]) -> list[str]:
    """Return the deployments to which the budget of a provider applies.

    If no entry has this provider, the budget applies to the entries of the same kind that have no budget of their own.
    """
    entries = list(zip(config.model_list, names, strict=True))
    own = [name for entry, name in entries if entry.provider == provider]
    budgets, kind = config.router_settings.provider_budget_config, KIND_ALIASES.get(provider, provider)
    return own or [name for entry, name in entries if entry.kind == kind and entry.provider not in budgets]


def _limits(amount: float, period: str | None) -> KeyLimits:
    return KeyLimits(
        money_budget=round(amount * MILLION), budget_period=NO_PERIOD if period is None else to_period(period)
    )


def _check_prices(deployments: list[str], prices: PriceList, path: str) -> None:
    """Raise ConfigError if no deployment has a price, because the budget would have no effect."""
    if all(prices.of_deployment.get(name, FREE) == FREE for name in deployments):
        raise ConfigError(
            f"{path}: the models have no prices, so the budget has no effect; add `unisono.price` to them"
        )
