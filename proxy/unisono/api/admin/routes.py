"""Route table of the admin API: importing a module of routes adds them."""

from unisono.api.admin import audit, keys, teams, users
from unisono.api.admin.administration import ADMIN, Administration

__all__ = ["ADMIN", "Administration", "audit", "keys", "teams", "users"]
