"""Route table of the admin API: importing a module of routes adds them."""

from unisono.api.admin import audit, customers, keys, spend, teams, users
from unisono.api.admin.administration import ADMIN, Administration
from unisono.api.admin.backends import BackendHealth

__all__ = ["ADMIN", "Administration", "BackendHealth", "audit", "customers", "keys", "spend", "teams", "users"]
