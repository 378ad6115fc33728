"""Complete route table of the admin API. Each imported module adds its routes to the table."""

from unisono.api.admin import audit, budget_routes, customers, key_import, keys, models, spend, teams, users
from unisono.api.admin.administration import ADMIN, Administration
from unisono.api.admin.deployment_health import BackendHealth
from unisono.api.admin.model_changes import ModelAdministration

__all__ = [
    "ADMIN",
    "Administration",
    "BackendHealth",
    "ModelAdministration",
    "audit",
    "budget_routes",
    "customers",
    "key_import",
    "keys",
    "models",
    "spend",
    "teams",
    "users",
]
