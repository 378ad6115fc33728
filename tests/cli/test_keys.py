"""`unisono keys`: options, output, and keys that are printed only once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unisono.cli import main

UNISONO = str(Path(sys.executable).with_name("unisono"))
FULL = Path("/dev/full")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    write_config(path, {"url": f"sqlite://{tmp_path}/state.db"}, "sk-master")
    return path


def write_config(path: Path, store: dict[str, Any], master_key: str | None) -> None:
    models = [{"model_name": "gpt-oss", "litellm_params": {"model": "vllm/x", "api_base": "http://127.0.0.1:9"}}]
    general = {} if master_key is None else {"master_key": master_key}
    path.write_text(json.dumps({"model_list": models, "general_settings": general, "store": store}))


def run(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", arguments[0], "--config", str(config), *arguments[1:]])


def run_json(config: Path, *arguments: str) -> Any:
    result = run(config, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_new_key_is_printed_once_and_not_stored(config: Path) -> None:
    created = run(config, "create", "--name", "CI")
    assert created.exit_code == 0, created.output
    [key] = created.stdout.splitlines()
    assert key.startswith("sk-uni-")
    listed = run(config, "list")
    assert "CI" in listed.stdout
    assert f"...{key[-4:]}" in listed.stdout
    assert key not in listed.output
    assert key not in run(config, "list", "--json").output
    for path in config.parent.iterdir():
        assert key.encode() not in path.read_bytes()


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [(), ("--json",)], ids=str)
@pytest.mark.parametrize("command", ["create", "rotate"])
def test_a_key_is_not_lost_if_the_output_device_is_full(config: Path, command: str, options: tuple[str, ...]) -> None:
    secrets = {line for line in run(config, "create").stdout.splitlines() if line.startswith("sk-uni-")}
    arguments = ["rotate", run_json(config, "list")[0]["id"]] if command == "rotate" else ["create"]
    with FULL.open("w") as full:
        command_line = [UNISONO, "keys", *arguments, "--config", str(config), *options]
        done = subprocess.run(command_line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    [secret] = [line for line in lines if line.startswith("sk-uni-") and line not in secrets]
    assert lines[-1] == "Error: cannot write the output: No space left on device"
    assert any(secret.endswith(key["ending"]) for key in run_json(config, "list"))


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments", [["--help"], pytest.param(["--version"], marks=pytest.mark.slow), ["openapi"]], ids=str
)
def test_a_full_output_device_is_one_line(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([UNISONO, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: cannot write the output: No space left on device\n")


def test_all_options_are_stored(config: Path) -> None:
    options = (
        *("--tenant", "team", "--models", "gpt-oss", "--mcp-servers", "none", "--expires", "30d"),
        *("--rpm", "60", "--tpm", "100000", "--max-parallel", "4", "--token-budget", "1000000"),
        *("--money-budget", "12.50", "--soft-budget", "10", "--budget-period", "30d"),
        *("--tag", "cost=42", "--raw"),
    )
    created = run_json(config, "create", *options)
    assert created.pop("key").startswith("sk-uni-")
    assert abs(created.pop("expires") - time.time() - 30 * 86_400) < 60
    assert abs(created.pop("created_at") - time.time()) < 60
    assert created.pop("id").startswith("key_")
    assert created.pop("ending")
    assert created == {
        "key_alias": "",
        "team_id": "team",
        "state": "active",
        "revoked_at": None,
        "models": ["gpt-oss"],
        "mcp_servers": [],
        "rpm_limit": 60,
        "tpm_limit": 100_000,
        "max_parallel_requests": 4,
        "token_budget": 1_000_000,
        "max_budget": 12.5,
        "soft_budget": 10.0,
        "budget_duration": "30d",
        "tags": {"cost": "42"},
        "raw": True,
    }
    [listed] = run_json(config, "list")
    assert listed.items() >= created.items()


def test_litellm_option_names_are_accepted(config: Path) -> None:
    args = ("--key-alias", "n", "--team-id", "t", "--max-budget", "1", "--budget-duration", "1mo", "--duration", "1h")
    created = run_json(config, "create", *args, "--rpm-limit", "1", "--tpm-limit", "2", "--max-parallel-requests", "3")
    keys = ("key_alias", "team_id", "max_budget", "budget_duration", "rpm_limit", "tpm_limit", "max_parallel_requests")
    assert [created[name] for name in keys] == ["n", "t", 1.0, "month", 1, 2, 3]


def test_update_changes_only_the_given_options(config: Path) -> None:
    created = run_json(
        config, "create", "--rpm", "5", "--tpm", "7", "--models", "gpt-oss", "--tag", "a=1", "--tag", "b=2"
    )
    updated = run_json(
        config,
        "update",
        created["id"],
        "--rpm",
        "none",
        "--models",
        "all",
        "--expires",
        "never",
        "--tag",
        "a=",
        "--no-raw",
    )
    assert updated["rpm_limit"] is None
    assert updated["models"] is None
    assert updated["tags"] == {"b": "2"}
    assert updated["tpm_limit"] == 7


def test_a_key_is_rotated_and_revoked(config: Path) -> None:
    created = run_json(config, "create")
    rotated = run_json(config, "rotate", created["id"], "--grace", "1h")
    assert rotated["id"] == created["id"]
    assert rotated["key"] != created["key"]
    assert run(config, "revoke", created["id"]).exit_code == 0
    assert run(config, "revoke", created["id"]).exit_code == 0
    for change in (("rotate", created["id"]), ("update", created["id"], "--rpm", "5")):
        refused = run(config, *change)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "revoked" in refused.stderr
    assert [key["state"] for key in run_json(config, "list")] == ["revoked"]


INVALID_OPTIONS = {
    "limit of zero": ("--rpm", "0"),
    "fractional limit": ("--rpm", "1.5"),
    "negative limit": ("--tpm", "-5"),
    "limit too large": ("--tpm", "9" * 16),
    "budget of zero": ("--money-budget", "0"),
    "budget too small": ("--money-budget", "0.0000001"),
    "budget not a number": ("--money-budget", "nan"),
    "infinite budget": ("--money-budget", "inf"),
    "budget exponent too large": ("--money-budget", "1e999999"),
    "budget of a million digits": ("--money-budget", "1e999990"),
    "period of zero": ("--budget-period", "0d"),
    "unknown period": ("--budget-period", "year"),
    "past time": ("--expires", "2020-01-01"),
    "past time in another zone": ("--expires", "2020-01-01T00:00:00+01:00"),
    "duration of zero": ("--expires", "0s"),
    "invalid time": ("--expires", "soon"),
    "time too far in the future": ("--expires", "9999999999w"),
    "time after year 9999 in UTC": ("--expires", "9999-12-31T23:59:59-12:00"),
    "time before year 1 in UTC": ("--expires", "0001-01-01T00:00:00+12:00"),
    "time that rounds beyond year 9999": ("--expires", "9999-12-31T23:59:59.999999"),
    "empty model name": ("--models", "a,,b"),
    "name with a line break": ("--name", "a\nb"),
    "name with a terminal escape": ("--name", "\x1b[2J"),
    "tag without a value": ("--tag", "a"),
    "tag with a line break": ("--tag", "a=b\nc"),
}


@pytest.mark.parametrize("options", INVALID_OPTIONS.values(), ids=INVALID_OPTIONS)
def test_invalid_options_are_refused_and_create_no_key(config: Path, options: tuple[str, ...]) -> None:
    refused = run(config, "create", *options)
    assert refused.exit_code == 2, refused.output
    assert run_json(config, "list") == []


def test_expires_accepts_a_date(config: Path) -> None:
    assert run_json(config, "create", "--expires", "2099-01-01")["expires"] == 4_070_908_800.0
    assert run_json(config, "create", "--expires", "2099-01-01T00:00:00+01:00")["expires"] == 4_070_905_200.0


def test_create_requires_a_master_key_and_a_persistent_store(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_config(path, {"url": f"sqlite://{tmp_path}/state.db"}, None)
    refused = run(path, "create")
    assert refused.exit_code == 1
    assert "master_key" in refused.stderr
    write_config(path, {"url": "memory://"}, "sk-master")
    refused = run(path, "create")
    assert refused.exit_code == 1
    assert "memory" in refused.stderr


def test_unknown_keys_and_an_unreachable_store_are_errors(config: Path, tmp_path: Path) -> None:
    for command in (("revoke", "key_x"), ("rotate", "key_x"), ("update", "key_x", "--rpm", "1")):
        refused = run(config, *command)
        assert refused.exit_code == 1
        assert "unknown key 'key_x'" in refused.stderr
    assert run(config, "update", "key_x").exit_code == 2
    write_config(config, {"url": "redis://user:planted-secret@127.0.0.1:9/0"}, "sk-master")
    refused = run(config, "list")
    assert refused.exit_code == 1
    assert "planted-secret" not in refused.output


def test_unknown_models_and_servers_are_accepted_with_a_warning(config: Path) -> None:
    created = run(config, "create", "--models", "gpt-oss,later", "--mcp-servers", "docs")
    assert created.exit_code == 0
    assert "'later'" in created.stderr
    assert "'docs'" in created.stderr
    assert "'gpt-oss'" not in created.stderr
