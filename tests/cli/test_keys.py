"""`unisono keys`: what it takes, what it says, and that a key is said once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unisono.cli import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    write(path, {"url": f"sqlite://{tmp_path}/state.db"}, "sk-master")
    return path


def write(path: Path, store: dict[str, Any], master_key: str | None) -> None:
    served = [{"model_name": "gpt-oss", "litellm_params": {"model": "vllm/x", "api_base": "http://127.0.0.1:9"}}]
    general = {} if master_key is None else {"master_key": master_key}
    path.write_text(json.dumps({"model_list": served, "general_settings": general, "store": store}))


def run(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", arguments[0], "--config", str(config), *arguments[1:]])


def read(config: Path, *arguments: str) -> Any:
    result = run(config, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_key_is_printed_alone_and_never_again(config: Path) -> None:
    made = run(config, "create", "--name", "CI")
    assert made.exit_code == 0, made.output
    [key] = made.stdout.splitlines()
    assert key.startswith("sk-uni-")
    listed = run(config, "list")
    assert "CI" in listed.stdout
    assert f"...{key[-4:]}" in listed.stdout
    assert key not in listed.output
    assert key not in run(config, "list", "--json").output
    for path in config.parent.iterdir():
        assert key.encode() not in path.read_bytes()


def test_what_was_asked_for_is_kept(config: Path) -> None:
    asked = (
        *("--tenant", "team", "--models", "gpt-oss", "--mcp-servers", "none", "--expires", "30d"),
        *("--rpm", "60", "--tpm", "100000", "--max-parallel", "4", "--token-budget", "1000000"),
        *("--money-budget", "12.50", "--budget-period", "30d", "--tag", "cost=42", "--raw"),
    )
    made = read(config, "create", *asked)
    assert made.pop("key").startswith("sk-uni-")
    assert abs(made.pop("expires") - time.time() - 30 * 86_400) < 60
    assert abs(made.pop("created_at") - time.time()) < 60
    assert made.pop("id").startswith("key_")
    assert made.pop("ending")
    assert made == {
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
        "budget_duration": "30d",
        "tags": {"cost": "42"},
        "raw": True,
    }
    [listed] = read(config, "list")
    assert listed.items() >= made.items()


def test_litellms_spellings_are_understood(config: Path) -> None:
    asked = ("--key-alias", "n", "--team-id", "t", "--max-budget", "1", "--budget-duration", "1mo", "--duration", "1h")
    made = read(config, "create", *asked, "--rpm-limit", "1", "--tpm-limit", "2", "--max-parallel-requests", "3")
    shown = ("key_alias", "team_id", "max_budget", "budget_duration", "rpm_limit", "tpm_limit", "max_parallel_requests")
    assert [made[name] for name in shown] == ["n", "t", 1.0, "month", 1, 2, 3]


def test_what_is_not_named_stays_as_it_is(config: Path) -> None:
    made = read(config, "create", "--rpm", "5", "--tpm", "7", "--models", "gpt-oss", "--tag", "a=1", "--tag", "b=2")
    changed = read(
        config,
        "update",
        made["id"],
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
    assert changed["rpm_limit"] is None
    assert changed["models"] is None
    assert changed["tags"] == {"b": "2"}
    assert changed["tpm_limit"] == 7


def test_a_key_is_rotated_and_revoked(config: Path) -> None:
    made = read(config, "create")
    turned = read(config, "rotate", made["id"], "--grace", "1h")
    assert turned["id"] == made["id"]
    assert turned["key"] != made["key"]
    assert run(config, "revoke", made["id"]).exit_code == 0
    assert run(config, "revoke", made["id"]).exit_code == 0
    refused = run(config, "rotate", made["id"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "revoked" in refused.stderr
    assert [key["state"] for key in read(config, "list")] == ["revoked"]


WRONG = {
    "no such limit": ("--rpm", "0"),
    "a fraction": ("--rpm", "1.5"),
    "less than nothing": ("--tpm", "-5"),
    "more than can be counted": ("--tpm", "9" * 16),
    "no money": ("--money-budget", "0"),
    "money too small to count": ("--money-budget", "0.0000001"),
    "no number of money": ("--money-budget", "nan"),
    "endless money": ("--money-budget", "inf"),
    "money no number has room for": ("--money-budget", "1e999999"),
    "money of a million digits": ("--money-budget", "1e999990"),
    "no period": ("--budget-period", "0d"),
    "an unknown period": ("--budget-period", "year"),
    "no time": ("--expires", "soon"),
    "a time too far": ("--expires", "9999999999w"),
    "a time behind the last year there is": ("--expires", "9999-12-31T23:59:59-12:00"),
    "a time before the first one": ("--expires", "0001-01-01T00:00:00+12:00"),
    "a time that is rounded out of the calendar": ("--expires", "9999-12-31T23:59:59.999999"),
    "an empty name": ("--models", "a,,b"),
    "a name of two lines": ("--name", "a\nb"),
    "a name that steers a terminal": ("--name", "\x1b[2J"),
    "a tag without a value": ("--tag", "a"),
    "a tag of two lines": ("--tag", "a=b\nc"),
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_refused_and_nothing_is_made(config: Path, options: tuple[str, ...]) -> None:
    refused = run(config, "create", *options)
    assert refused.exit_code == 2, refused.output
    assert read(config, "list") == []


def test_a_date_is_a_time_too(config: Path) -> None:
    assert read(config, "create", "--expires", "2099-01-01")["expires"] == 4_070_908_800.0
    assert read(config, "create", "--expires", "2020-01-01T00:00:00+01:00")["state"] == "expired"


def test_keys_that_nobody_would_ask_for_are_not_made(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, {"url": f"sqlite://{tmp_path}/state.db"}, None)
    refused = run(path, "create")
    assert refused.exit_code == 1
    assert "master_key" in refused.stderr
    write(path, {"url": "memory://"}, "sk-master")
    refused = run(path, "create")
    assert refused.exit_code == 1
    assert "memory" in refused.stderr


def test_a_key_that_is_not_there_and_a_store_that_is_not_there_are_said(config: Path, tmp_path: Path) -> None:
    for command in (("revoke", "key_x"), ("rotate", "key_x"), ("update", "key_x", "--rpm", "1")):
        refused = run(config, *command)
        assert refused.exit_code == 1
        assert "unknown key 'key_x'" in refused.stderr
    assert run(config, "update", "key_x").exit_code == 2
    write(config, {"url": "redis://user:planted-secret@127.0.0.1:9/0"}, "sk-master")
    refused = run(config, "list")
    assert refused.exit_code == 1
    assert "planted-secret" not in refused.output


def test_names_the_configuration_does_not_have_are_taken_and_told(config: Path) -> None:
    made = run(config, "create", "--models", "gpt-oss,later", "--mcp-servers", "docs")
    assert made.exit_code == 0
    assert "'later'" in made.stderr
    assert "'docs'" in made.stderr
    assert "'gpt-oss'" not in made.stderr
