"""Route table of the admin API: importing a module of routes adds them."""

from unisono.api.admin import audit, customers, key_import, keys, models, spend, teams, users
from unisono.api.admin.administration import ADMIN, Administration
from unisono.api.admin.backends import BackendHealth
from unisono.api.admin.model_changes import ModelAdministration

__all__ = [
    "ADMIN",
    "Administration",
    "BackendHealth",
    "ModelAdministration",
    "audit",
    "customers",
    "key_import",
    "keys",
    "models",
    "spend",
    "teams",
    "users",
]
