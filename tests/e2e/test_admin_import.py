"""Keys imported from LiteLLM: they work with their old secrets, settings and owners."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.e2e.administered import AdminClient
from tests.e2e.keyed import MASTER, with_keys
from tests.e2e.test_admin_keys import becomes, works
from unisono.api.admin.key_import import read_export
from unisono.cli import main

SECRET = "sk-Yq1vJ8m0cXw5kTn2"


def token(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


# A row of /key/list?return_full_object=true of LiteLLM 1.110.
ROW: dict[str, Any] = {
    "token": token(SECRET),
    "key_name": "sk-...kTn2",
    "key_alias": "ci",
    "spend": 1.25,
    "expires": "2099-01-31T00:00:00Z",
    "models": ["gpt-oss"],
    "aliases": {},
    "config": {},
    "user_id": "ann",
    "team_id": "search",
    "max_parallel_requests": None,
    "metadata": {"tags": ["nightly"]},
    "tpm_limit": None,
    "rpm_limit": 30,
    "max_budget": 10.0,
    "budget_duration": "30d",
    "budget_reset_at": "2026-12-01T00:00:00Z",
    "allowed_cache_controls": [],
    "permissions": {},
    "model_spend": {},
    "model_max_budget": {},
    "blocked": None,
    "organization_id": None,
    "created_at": "2026-01-02T03:04:05Z",
    "created_by": "default_user_id",
}


def run(admin: AdminClient, address: str, folder: Path, export: str, *options: str) -> Result:
    """Run the command on the store of the gateway, as an operator does."""
    config = {"model_list": [{"model_name": "gpt-oss", "litellm_params": {"model": "vllm/x", "api_base": "http://a"}}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(with_keys(config, address)))
    (folder / "keys.export").write_text(export)
    arguments = ["keys", "import", "--config", str(folder / "config.yaml"), str(folder / "keys.export"), *options]
    return CliRunner().invoke(main, arguments)


async def imported(admin: AdminClient, address: str, folder: Path, export: str, *options: str) -> Result:
    return await asyncio.to_thread(run, admin, address, folder, export, *options)


async def test_imported_key_keeps_secret_settings_and_owners(
    admin: AdminClient, store_address: str, tmp_path: Path
) -> None:
    assert await works(admin, SECRET) == 401
    export = json.dumps({"keys": [ROW], "total_count": 1})
    refused = await imported(admin, store_address, tmp_path, export)
    assert refused.exit_code == 1
    assert "there is no team 'search'" in refused.output
    result = await imported(admin, store_address, tmp_path, export, "--create-owners")
    assert result.exit_code == 0, result.output
    await becomes(admin, SECRET, 200)
    assert await works(admin, SECRET + "x") == 401
    # LiteLLM's clients name the key by its hash or by its secret.
    for name in (ROW["token"], SECRET):
        info = (await admin.get(f"/key/info?key={name}")).body["info"]
        kept = ("key_alias", "models", "user_id", "team_id", "rpm_limit", "max_budget", "budget_duration", "expires")
        assert {field: info[field] for field in kept} == {field: ROW[field] for field in kept}
        assert (info["tags"], info["key_name"], info["created_at"]) == (["nightly"], "sk-...kTn2", ROW["created_at"])
    assert SECRET not in (await admin.get("/audit")).raw.decode()
    # A repeated import changes nothing.
    again = await imported(admin, store_address, tmp_path, export)
    assert (again.exit_code, "already" in again.output) == (0, True)
    # A rotation gives it a secret of this gateway.
    new = await admin.made("/key/regenerate", key=SECRET)
    assert new["key"].startswith("sk-uni-")
    await becomes(admin, SECRET, 401)


def run_remotely(admin: AdminClient, folder: Path, export: str, *options: str, key: str = MASTER) -> Result:
    """Run the command against the running gateway."""
    (folder / "keys.export").write_text(export)
    arguments = ["keys", "import", "--url", admin.gateway.url, str(folder / "keys.export"), *options]
    return CliRunner(env={"UNISONO_API_KEY": key}).invoke(main, arguments)


async def test_keys_are_imported_over_http(admin: AdminClient, tmp_path: Path) -> None:
    rows = [
        {**ROW, "team_id": None, "user_id": None, "token": token(f"sk-{n}"), "key_alias": f"k{n}"} for n in range(130)
    ]
    rows[7]["organization_id"] = "org"
    export = json.dumps(rows)
    result = await asyncio.to_thread(run_remotely, admin, tmp_path, export)
    assert result.exit_code == 1
    assert "k7: 'organization_id'" in result.output
    assert "1 of 130 keys were not imported" in result.output
    await becomes(admin, "sk-129", 200)
    assert await works(admin, "sk-7") == 401
    again = await asyncio.to_thread(run_remotely, admin, tmp_path, export, "--ignore", "organization_id")
    assert (again.exit_code, again.output.count("already")) == (0, 129)
    await becomes(admin, "sk-7", 200)
    owners = await asyncio.to_thread(run_remotely, admin, tmp_path, json.dumps([ROW]), "--create-owners")
    assert owners.exit_code == 0, owners.output
    info = (await admin.get(f"/key/info?key={ROW['token']}")).body["info"]
    assert (info["team_id"], info["rpm_limit"]) == ("search", 30)
    # Keys without a role may not.
    refused = await asyncio.to_thread(run_remotely, admin, tmp_path, json.dumps([ROW]), key="sk-129")
    assert refused.exit_code == 1
    # No answer repeats the secret of a key, and a deleted key stays deleted.
    shown = await admin.get("/key/info?key=sk-129")
    deleted = await admin.made("/key/delete", keys=["sk-129"])
    assert (shown.body["key"], deleted) == (shown.body["info"]["token"], {"deleted_keys": ["sk-..."]})
    (again_row,) = (await admin.made("/key/import", keys=[rows[129]]))["keys"]
    assert "deleted" in again_row["error"]
    invalid = await admin.post("/key/import", keys=[])
    assert (invalid.status, invalid.body["error"]["param"]) == (400, "keys")


async def test_import_creates_no_team_in_the_tenant_of_other_requests(
    admin: AdminClient, store_address: str, tmp_path: Path
) -> None:
    key = await admin.made("/key/generate")
    ids = (key["token"], "default", "local")
    rows = [{"token": token(f"sk-{id}"), "key_alias": f"of {id}", "team_id": id, "user_id": f"user {id}"} for id in ids]
    results = (await admin.made("/key/import", keys=rows, create_owners=True))["keys"]
    result = await imported(admin, store_address, tmp_path, json.dumps(rows), "--create-owners")
    assert result.exit_code == 1
    for id, found in zip(ids, results, strict=True):
        problem = f"'team_id': '{id}' is reserved"
        assert (found["created"], found["error"].startswith(problem)) == (False, True)
        assert f"of {id}: {problem}" in result.output
    assert (await admin.get("/team/list")).body == []
    assert (await admin.get("/user/list")).body["users"] == []


async def test_settings_without_effect_here_refuse_their_key_alone(
    admin: AdminClient, store_address: str, tmp_path: Path
) -> None:
    plain = {"token": token("sk-plain"), "key_alias": "plain", "models": []}
    rows = [
        {"token": token("sk-a"), "key_alias": "a", "organization_id": "org"},
        {"token": token("sk-b"), "key_alias": "b", "allowed_routes": ["/v1/models"]},
        {"token": "no hash", "key_alias": "c"},
        {"token": token("sk-d"), "key_alias": "d", "rpm_limit": "many"},
        {"token": token("sk-e"), "key_alias": "e", "expires": "soon"},
        {"token": token("sk-f"), "key_alias": "plain"},
        {"token": token("sk-g"), "key_alias": "g", "expires": "0001-01-01T00:00:00+14:00"},
        {"token": token("sk-h"), "key_alias": "h", "created_at": "9999-12-31T23:59:59-12:00"},
        plain,
    ]
    result = await imported(admin, store_address, tmp_path, json.dumps([plain, *rows]))
    assert result.exit_code == 1
    for field in ("organization_id", "allowed_routes", "token", "rpm_limit", "expires", "key_alias", "created_at"):
        assert f"'{field}'" in result.output, result.output
    await becomes(admin, "sk-plain", 200)
    assert await works(admin, "sk-b") == 401
    ignoring = await imported(admin, store_address, tmp_path, json.dumps(rows[:1]), "--ignore", "organization_id")
    assert ignoring.exit_code == 0, ignoring.output
    await becomes(admin, "sk-a", 200)


# Settings that LiteLLM stores in the metadata of a key, or in its permissions, and their fields in errors.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    **{
        f"metadata.{field}": {"metadata": {field: value}}
        for field, value in {
            "guardrails": ["pii"],
            "policies": ["strict"],
            "model_rpm_limit": {"gpt-oss": 1},
            "model_tpm_limit": {"gpt-oss": 1},
            "model_itpm_limit": {"gpt-oss": 1},
            "tag_rpm_limit": {"a": 1},
            "rpm_limit_type": "guaranteed_throughput",
            "enforced_params": ["user"],
            "temp_budget_increase": 5,
            "allowed_passthrough_routes": ["/x"],
            "logging": [{"callback_name": "langfuse"}],
        }.items()
    },
    "object_permission.vector_stores": {"object_permission": {"vector_stores": ["v"]}},
    "object_permission.mcp_tool_permissions": {"object_permission": {"mcp_tool_permissions": {"docs": ["read"]}}},
    "object_permission.blocked_tools": {"object_permission": {"mcp_servers": ["docs"], "blocked_tools": ["rm"]}},
    "object_permission_id": {"object_permission_id": "id"},
}


async def test_nested_settings_without_effect_here_refuse_their_key(admin: AdminClient) -> None:
    rows = [{"token": token(f"sk-{field}"), **row} for field, row in UNSUPPORTED.items()]
    results = (await admin.made("/key/import", keys=rows))["keys"]
    for field, result in zip(UNSUPPORTED, results, strict=True):
        assert result["created"] is False, field
        assert f"'{field}'" in result["error"]
    ignoring = await admin.made("/key/import", keys=rows, ignore=[*UNSUPPORTED])
    assert all(result["created"] for result in ignoring["keys"]), ignoring
    # Requests that create a key, a team or a user refuse such settings too.
    for path in ("/key/generate", "/team/new", "/user/new"):
        refused = await admin.post(path, metadata={"guardrails": ["pii"]})
        assert (refused.status, refused.body["error"]["param"]) == (400, "metadata.guardrails"), refused.raw


async def test_neutral_permissions_and_metadata_are_accepted(admin: AdminClient) -> None:
    empty = ["mcp_access_groups", "vector_stores", "agents", "agent_access_groups", "models"]
    empty += ["blocked_tools", "search_tools"]
    missing = ["mcp_tool_permissions", "mcp_toolsets", "mcp_tool_search_enabled", "skills"]
    permission = {"object_permission_id": "id", "mcp_servers": ["docs"], **dict.fromkeys(missing)}
    permission |= {field: [] for field in empty}
    row = {
        "token": token(SECRET),
        "object_permission_id": "id",
        "object_permission": permission,
        "metadata": {"tags": ["nightly"], "guardrails": [], "logging": None, "project": "x"},
        "total_spend": 2.5,
        "settings_updated_at": "2026-01-02T03:04:05Z",
    }
    (result,) = (await admin.made("/key/import", keys=[row]))["keys"]
    assert result["error"] is None
    info = (await admin.get(f"/key/info?key={row['token']}")).body["info"]
    assert info["object_permission"]["mcp_servers"] == ["docs"]
    assert (info["tags"], info["metadata"]) == (["nightly"], {"tags": ["nightly"], "project": "x"})
    # A client may send the permissions of an answer back.
    await admin.made("/key/update", key=row["token"], object_permission=info["object_permission"])
    # An empty list permits no tool servers.
    row = {"token": token("sk-empty"), "object_permission": permission | {"mcp_servers": []}}
    await admin.made("/key/import", keys=[row])
    info = (await admin.get(f"/key/info?key={row['token']}")).body["info"]
    assert info["object_permission"]["mcp_servers"] == []


def test_the_table_is_read_as_postgresql_writes_it() -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["token", "models", "metadata", "max_budget", "rpm_limit", "blocked", "user_id"])
    writer.writeheader()
    writer.writerow(
        {
            "token": ROW["token"],
            "models": '{gpt-oss,"a b"}',
            "metadata": '{"tags": ["x"]}',
            "max_budget": "2.5",
            "rpm_limit": "7",
            "blocked": "f",
        }
    )
    (row,) = read_export(text.getvalue())
    assert row == {
        "token": ROW["token"],
        "models": ["gpt-oss", "a b"],
        "metadata": {"tags": ["x"]},
        "max_budget": 2.5,
        "rpm_limit": 7,
        "blocked": False,
        "user_id": None,
    }


@pytest.mark.parametrize("text", ['{"keys": ["abc"]}', "{", "[1]", "a,b\n1,2", "", "token,rpm_limit\nx,many\n"])
def test_other_texts_are_no_export(text: str) -> None:
    with pytest.raises(ValueError, match=r"is |has "):
        read_export(text)


async def test_reports_find_an_imported_key_by_its_hash(admin: AdminClient) -> None:
    row = ROW | {"user_id": None, "team_id": None}
    (made,) = (await admin.made("/key/import", keys=[row]))["keys"]
    await becomes(admin, SECRET, 200)
    hash = token(SECRET)
    lists = ("/spend/logs?", "/spend/logs?summarize=false&", "/global/spend/report?group_by=api_key&")
    for name in (hash, made["token"]):
        assert (await admin.get(f"/key/list?key_hash={name}")).body["keys"] == [made["token"]]
        while not (await admin.get(f"/v1/requests?key={name}")).body["data"]:
            await asyncio.sleep(0.05)
        for path in lists:
            assert (await admin.get(f"{path}api_key={name}")).body, path
        assert (await admin.get(f"/user/daily/activity?api_key={name}")).body["results"]
        assert (await admin.get(f"/v1/requests/stats?key={name}")).body["data"]
    assert (await admin.get(f"/key/list?key_hash={token('sk-other')}")).body["keys"] == []
