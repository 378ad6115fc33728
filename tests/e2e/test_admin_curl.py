"""Lines of LiteLLM's documentation for `curl`, run against the gateway.

They differ from the documented lines in the address, the keys and the names of models.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.e2e.administered import administered

LINES: dict[str, str] = {
    "virtual keys: generate": """curl '$BASE/key/generate' --header 'Authorization: Bearer $MASTER' \
--header 'Content-Type: application/json' \
--data-raw '{"models": ["gpt-oss", "gpt-4"], "metadata": {"user": "ishaan@berri.ai"}}'""",
    "virtual keys: info": "curl '$BASE/key/info?key=$KEY' -X GET -H 'Authorization: Bearer $MASTER'",
    "virtual keys: block": """curl -L -X POST '$BASE/key/block' -H 'Authorization: Bearer $MASTER' \
-H 'Content-Type: application/json' -d '{"key": "$KEY"}'""",
    "virtual keys: unblock": """curl -L -X POST '$BASE/key/unblock' -H 'Authorization: Bearer $MASTER' \
-H 'Content-Type: application/json' -d '{"key": "$KEY"}'""",
    "virtual keys: regenerate": """curl '$BASE/key/$KEY/regenerate' -X POST -H 'Authorization: Bearer $MASTER' \
-H 'Content-Type: application/json' \
-d '{"max_budget": 100, "metadata": {"team": "core-infra"}, "models": ["gpt-4"]}'""",
    "users: new": """curl --location '$BASE/user/new' --header 'Authorization: Bearer $MASTER' \
--header 'Content-Type: application/json' \
--data-raw '{"models": ["gpt-oss"], "max_budget": 0.5, "user_id": "krrish3"}'""",
    "users: key of a user": """curl --location '$BASE/key/generate' --header 'Authorization: Bearer $MASTER' \
--header 'Content-Type: application/json' --data-raw '{"models": ["gpt-oss"], "user_id": "krrish3"}'""",
    "teams: new": """curl --location '$BASE/team/new' --header 'Authorization: Bearer $MASTER' \
--header 'Content-Type: application/json' --data-raw '{"team_alias": "my-new-team_4", "team_id": "$TEAM",
"members_with_roles": [{"role": "admin", "user_id": "5c4a0aa3-a1e1-43dc-bd87-3c2da8382a3a"}], "rpm_limit": 99}'""",
    "teams: budget": """curl -X POST '$BASE/team/new' -H 'Authorization: Bearer $MASTER' \
-H 'Content-Type: application/json' -d '{"team_alias": "QA Prod Bot", "max_budget": 1, "budget_duration": "1d"}'""",
    "teams: member": """curl -X POST '$BASE/team/member_add' -H 'Authorization: Bearer $MASTER' \
-H 'Content-Type: application/json' -d '{"team_id": "$TEAM", "member": {"role": "user", "user_id": "krrish3"}}'""",
    "teams: info": "curl -X GET '$BASE/team/info?team_id=$TEAM' -H 'Authorization: Bearer $MASTER'",
    "budgets: new": """curl -L -X POST '$BASE/budget/new' -H "Authorization: Bearer $MASTER" \
-H 'Content-Type: application/json' -d '{"budget_id": "my-test-tier", "rpm_limit": 0}'""",
    "budgets: key": """curl -L -X POST '$BASE/key/generate' -H "Authorization: Bearer $MASTER" \
-H 'Content-Type: application/json' -d '{"budget_id": "my-test-tier"}'""",
    "customers: new": """curl -X POST '$BASE/customer/new' -H 'Authorization: Bearer $MASTER' \
-H 'Content-Type: application/json' -d '{"user_id": "my-customer-id", "max_budget": 10, "budget_duration": "30d"}'""",
    "customers: info": """curl -X GET '$BASE/customer/info?end_user_id=my-customer-id' \
-H 'Authorization: Bearer $MASTER'""",
    "customers: request": """curl -X POST '$BASE/chat/completions' -H 'Content-Type: application/json' \
-H 'Authorization: Bearer $MASTER' -d '{"model": "gpt-oss", "user": "my-customer-id",
"messages": [{"role": "user", "content": "hello"}]}'""",
    "spend: logs": "curl -X GET '$BASE/spend/logs?user_id=krrish3' -H 'Authorization: Bearer $MASTER'",
    "spend: report": """curl -X GET \
'$BASE/global/spend/report?start_date=2026-04-01&end_date=2026-06-30&group_by=team' \
-H 'Authorization: Bearer $MASTER'""",
    "spend: activity": """curl -L -X GET '$BASE/user/daily/activity?start_date=2026-03-20&end_date=2026-03-27' \
-H 'Authorization: Bearer $MASTER'""",
    "virtual keys: delete": """curl -L -X POST '$BASE/key/delete' -H 'Authorization: Bearer $MASTER' \
-H 'Content-Type: application/json' -d '{"keys": ["$KEY"]}'""",
}


async def run(line: str) -> tuple[int, Any]:
    # The documented lines belong to a shell.
    child = await asyncio.create_subprocess_shell(
        line + " -s -w '\\n%{http_code}'", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await child.communicate()
    body, _, status = output.decode().rpartition("\n")
    return int(status), json.loads(body)


async def test_documented_lines_run_in_order(tmp_path: Path) -> None:
    async with administered(f"sqlite://{tmp_path}/state.db") as admin:
        names = {"$BASE": admin.gateway.url, "$MASTER": admin.key, "$TEAM": "team-4", "$KEY": ""}
        answers: dict[str, Any] = {}
        for name, line in LINES.items():
            for variable, value in names.items():
                line = line.replace(variable, value)
            status, answers[name] = await run(line)
            assert status == 200, (name, answers[name])
            if name in ("virtual keys: generate", "virtual keys: regenerate"):
                names["$KEY"] = answers[name]["key"]
    assert answers["virtual keys: info"]["info"]["metadata"] == {"user": "ishaan@berri.ai"}
    assert answers["virtual keys: block"]["blocked"] is True
    assert answers["virtual keys: regenerate"]["max_budget"] == 100
    assert answers["users: new"]["key"].startswith("sk-")
    assert answers["users: key of a user"]["user_id"] == "krrish3"
    assert answers["teams: info"]["team_info"]["rpm_limit"] == 99
    assert len(answers["teams: info"]["team_info"]["members_with_roles"]) == 2
    assert answers["customers: info"]["litellm_budget_table"]["max_budget"] == 10
