"""An infrastructure tool on the admin API: it creates, reads, changes and deletes, and a second run changes nothing.

Like Terraform's provider for LiteLLM it knows only what it wrote before, and compares it with what the API returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.e2e.administered import AdminClient

Wanted = dict[str, tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Kind:
    """Routes of a kind of object. `id` is the field that names it, `query` the parameter that reads it."""

    prefix: str
    id: str
    query: str
    delete: str
    inner: str = ""
    new: str = "new"
    # Field of an answer with the id, if it differs from that of a request.
    answer_id: str = ""


KINDS = {
    "budget": Kind("/budget", "budget_id", "budgets", "id"),
    "team": Kind("/team", "team_id", "team_id", "team_ids", "team_info"),
    "user": Kind("/user", "user_id", "user_id", "user_ids", "user_info"),
    "customer": Kind("/customer", "user_id", "end_user_id", "user_ids"),
    "key": Kind("/key", "key", "key", "keys", "info", "generate", "token"),
}


# Fields that are no settings of the object.
CREATE_ONLY = frozenset({"auto_create_key"})


@dataclass
class Tool:
    """Applies wanted objects. `state` has the id of each by name, and `writes` counts changes."""

    admin: AdminClient
    state: dict[str, str] = field(default_factory=dict)
    writes: int = 0

    async def apply(self, wanted: Wanted) -> int:
        """Make the objects equal `wanted`, and return the number of changes."""
        before = self.writes
        for name, (kind, settings) in wanted.items():
            await self._apply(name, KINDS[kind], settings)
        for name in [name for name in reversed(self.state) if name not in wanted]:
            kind = KINDS[name.partition(" ")[0]]
            ids = self.state[name] if kind.delete == "id" else [self.state[name]]
            await self._write(f"{kind.prefix}/delete", {kind.delete: ids})
            del self.state[name]
        return self.writes - before

    async def _apply(self, name: str, kind: Kind, settings: dict[str, Any]) -> None:
        if name not in self.state:
            made = await self._write(f"{kind.prefix}/{kind.new}", settings)
            self.state[name] = made[kind.answer_id or kind.id]
        found = await self.read(name)
        settings = {each: value for each, value in settings.items() if each not in CREATE_ONLY}
        drift = {each: value for each, value in settings.items() if found.get(each) != value}
        if drift:
            await self._write(f"{kind.prefix}/update", {kind.id: self.state[name], **drift})
            found = await self.read(name)
            assert {each: found.get(each) for each in settings} == settings

    async def read(self, name: str) -> dict[str, Any]:
        kind = KINDS[name.partition(" ")[0]]
        if kind.prefix == "/budget":
            (budget,) = await self.admin.made("/budget/info", budgets=[self.state[name]])
            return dict(budget)
        answer = await self.admin.get(f"{kind.prefix}/info?{kind.query}={self.state[name]}")
        assert answer.status == 200, answer.raw
        return dict(answer.body[kind.inner] if kind.inner else answer.body)

    async def _write(self, path: str, body: dict[str, Any]) -> Any:
        self.writes += 1
        return await self.admin.made(path, **body)


def wanted() -> Wanted:
    return {
        "budget free": ("budget", {"budget_id": "free", "max_budget": 1.5, "budget_duration": "1d", "rpm_limit": 10}),
        "team search": (
            "team",
            {
                "team_id": "search",
                "team_alias": "Search",
                "max_budget": 100.0,
                "budget_duration": "30d",
                "tpm_limit": 100_000,
                "models": ["gpt-oss"],
                "metadata": {"cost_centre": "42", "nested": {"a": [1, 2.5, None]}},
                "blocked": False,
            },
        ),
        "user ann": (
            "user",
            {
                "user_id": "ann",
                "user_email": "ann@example.org",
                "user_role": "internal_user",
                "budget_id": "free",
                "auto_create_key": False,
            },
        ),
        "customer acme": ("customer", {"user_id": "acme", "alias": "ACME", "budget_id": "free", "blocked": True}),
        "key ci": (
            "key",
            {
                "key_alias": "ci",
                "team_id": "search",
                "user_id": "ann",
                "models": ["gpt-oss"],
                "max_budget": 5.0,
                "budget_duration": "1mo",
                "rpm_limit": 60,
                "tpm_limit": None,
                "max_parallel_requests": 4,
                "tags": ["nightly"],
                "blocked": False,
            },
        ),
    }


async def test_a_second_run_changes_nothing(admin: AdminClient) -> None:
    tool = Tool(admin)
    assert await tool.apply(wanted()) == 5
    assert await tool.apply(wanted()) == 0
    # A tool that lost its state creates the same objects.
    assert await Tool(admin).apply(wanted()) == 5
    assert (await admin.get("/key/list")).body["keys"] == [tool.state["key ci"]]
    changed = wanted()
    changed["key ci"][1].update(rpm_limit=None, max_budget=6.25, models=[], tags=[], key_alias="nightly", blocked=True)
    changed["team search"][1].update(max_budget=None, metadata={}, models=[], tpm_limit=0)
    changed["user ann"][1].update(user_role="proxy_admin_viewer", budget_id=None)
    changed["customer acme"][1].update(blocked=False, alias=None)
    changed["budget free"][1].update(max_budget=2.0, budget_duration=None)
    assert await tool.apply(changed) == 5
    assert await tool.apply(changed) == 0
    # Somebody changes an object by hand; the tool restores it.
    await admin.made("/key/update", key=tool.state["key ci"], rpm_limit=1)
    assert await tool.apply(changed) == 1
    assert await tool.apply({}) == 5
    assert (await admin.get("/key/list")).body["keys"] == []
    assert (await admin.get("/team/list")).body == (await admin.get("/budget/list")).body == []
    # The same names can be used again.
    assert await tool.apply(wanted()) == 5
    assert await tool.apply(wanted()) == 0
