"""Mistakes in a configuration, and where the commands look for one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.e2e.gateway import config_of, gateway
from unisono.cli import main
from unisono.cli.discover import DiscoveredBackend
from unisono.cli.open_gateway_check import is_known_key, refuse_to_be_open
from unisono.config import load, parse
from unisono.errors import ConfigError
from unisono.server.startup_screen import curl_line
from unisono.store import open_store


def models_of(name: str) -> dict[str, Any]:
    return {"model_list": [{"model_name": name, "litellm_params": {"model": "vllm/x", "api_base": "http://h"}}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a configuration, and another configuration beside it."""
    (tmp_path / "config.yaml").write_text(json.dumps(models_of("of-the-folder")))
    (tmp_path / "other.yaml").write_text(json.dumps(models_of("of-the-variable")))
    (tmp_path / "third.yaml").write_text(json.dumps(models_of("of-the-option")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNISONO_CONFIG", raising=False)
    return tmp_path


@pytest.mark.parametrize("command", [["usage"], ["keys", "list"], ["models", "drain", "x"]], ids=" ".join)
def test_an_unused_configuration_is_not_reported(folder: Path, command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--url", "http://127.0.0.1:9"], env={"UNISONO_API_KEY": "sk-x"})
    assert result.exit_code == 1
    assert "working directory" not in result.stderr


MISTAKES = {
    "two forms of output": (["usage", "--csv", "--json"], "Options '--csv' and '--json' cannot be used together."),
    "empty host": (
        ["serve", "--host", ""],
        "Invalid value for '--host': must not be empty;",
    ),
    "no backends to compare": (
        ["compare", "vllm/x@http://127.0.0.1:9", "vllm/x@http://127.0.0.1:10"],
        "Error: vllm/x@http://127.0.0.1:9: ",
    ),
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_command_is_named(folder: Path, command: list[str], message: str) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_configuration_of_the_working_directory_is_used_and_reported(folder: Path) -> None:
    result = CliRunner().invoke(main, ["models"])
    assert "of-the-folder" in result.stdout
    assert result.stderr == "Using the configuration config.yaml of the working directory.\n"


def test_the_variable_wins_over_the_working_directory_and_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_CONFIG", "other.yaml")
    result = CliRunner().invoke(main, ["models"])
    assert "of-the-variable" in result.stdout
    assert result.stderr == "Using the configuration other.yaml (from UNISONO_CONFIG).\n"


def test_the_option_wins_over_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CONFIG", "other.yaml")
    result = CliRunner().invoke(main, ["models", "--config", "third.yaml"])
    assert "of-the-option" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("command", [["models"], ["usage"], ["keys", "list"], ["mcp", "list"]], ids=" ".join)
def test_commands_without_any_configuration_name_the_option(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNISONO_CONFIG", raising=False)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "--config" in result.stderr


@pytest.mark.parametrize("command", [["models"], ["usage"], ["keys", "list"], ["check"]], ids=" ".join)
def test_commands_find_the_configuration_in_the_same_way(command: list[str], folder: Path) -> None:
    (folder / "config.yaml").write_text("model_list: 7\nrouter_settings: {cooldown_tme: 1}\n")
    result = CliRunner().invoke(main, command)
    assert result.exit_code in (1, 2)
    assert "the configuration has 2 errors:" in result.output


KNOWN = ["sk-1234", "SK-1234", "changeme", "UNISONO_MASTER_KEY", "os.environ/LITELLM_MASTER_KEY", "${MASTER_KEY}"]


@pytest.mark.parametrize("key", KNOWN)
def test_a_key_that_others_know_is_refused_beyond_this_machine(key: str, caplog: pytest.LogCaptureFixture) -> None:
    config = parse({**models_of("m"), "general_settings": {"master_key": key}}, {key.rpartition("/")[2]: key}).config
    with pytest.raises(ConfigError, match=r"general_settings.master_key: the key is publicly known"):
        refuse_to_be_open(config, "0.0.0.0")
    with caplog.at_level(logging.WARNING):
        refuse_to_be_open(config, "127.0.0.1")
    assert "publicly known" in caplog.text


@pytest.mark.parametrize("key", ["sk-7Qe9-real-key", "0f3c9a51c2", "SECRETS", "Correct_Horse"])
def test_other_keys_are_accepted(key: str) -> None:
    assert not is_known_key(key)


ADDRESSES = {
    "http://h:8000/v1/chat/completions": ("http://h:8000", "/v1/chat/completions"),
    "http://h:8000/v1/completions/": ("http://h:8000", "/v1/completions"),
    "http://h:8000/completions": ("http://h:8000", "/completions"),
    "http://h:11434/api/generate": ("http://h:11434", "/api/generate"),
    "http://h:8000/v1": ("http://h:8000/v1", ""),
    "http://h:8000/gpt": ("http://h:8000/gpt", ""),
    " http://h:8000/v1/Embeddings ": ("http://h:8000", "/v1/embeddings"),
}


@pytest.mark.parametrize("given", ADDRESSES)
def test_a_route_at_the_end_of_an_address_is_ignored_with_a_warning(given: str) -> None:
    address, route = ADDRESSES[given]
    raw = models_of("m")
    raw["model_list"][0]["litellm_params"]["api_base"] = given
    loaded = parse(raw, {})
    assert loaded.config.model_list[0].litellm_params.api_base == address
    expected = f"model_list[0].litellm_params.api_base: the API route `{route}` at the end was ignored"
    assert [warning.partition(";")[0] for warning in loaded.warnings] == ([expected] if route else [])


@pytest.mark.parametrize("url", ["postgres://h/db", "postgresql://h/db", "mysql://h/db", "redis+magic://h"])
def test_an_unsupported_store_is_refused_and_the_supported_ones_are_named(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not a supported URL scheme; use one of sqlite:///path, memory://, redis://"
    ):
        open_store(url)


def test_a_store_as_text_is_refused_with_the_right_form() -> None:
    with pytest.raises(ConfigError, match=r"store: must be a mapping, .*`store: .url: ADDRESS.` with one of sqlite:"):
        parse({"store": "postgres://h/db"}, {})


def test_the_command_on_the_screen_names_the_variable_of_the_file() -> None:
    loaded = parse({**models_of("m"), "general_settings": {"master_key": "os.environ/TEAM_KEY"}}, {"TEAM_KEY": "sk-9x"})
    assert loaded.master_key_variable == "TEAM_KEY"
    assert '"Authorization: Bearer $TEAM_KEY"' in curl_line("http://h", "m", loaded.master_key_variable)


async def test_the_operator_reads_which_deployments_were_tried() -> None:
    config = config_of(
        "vllm@http://127.0.0.1:9", "vllm@http://127.0.0.1:10", general_settings={"master_key": "sk-op-1x"}
    )
    body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    async with gateway(config) as server:
        for path in ("/v1/chat/completions", "/v1/responses"):
            sent = body if "chat" in path else json.dumps({"model": "gpt-oss", "input": "Hi"}).encode()
            answer = await server.post(path, sent, authorization="Bearer sk-op-1x")
            assert answer.status == 503
            message = answer.body["error"]["message"]
            for deployment in ("vllm-1", "vllm-2"):
                assert f"{deployment} (backend_unavailable)" in message.partition(". Tried: ")[2]


def test_init_writes_a_file_for_the_backends_found_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [DiscoveredBackend("vllm", "openai/gpt-oss-20b", "http://127.0.0.1:8000")]

    async def discovered() -> list[DiscoveredBackend]:
        return found

    monkeypatch.setattr("unisono.cli.new_config.discover", discovered)
    target = tmp_path / "config.yaml"
    result = CliRunner().invoke(main, ["init", "-o", str(target)])
    assert result.exit_code == 0, result.output
    assert target.stat().st_mode & 0o077 == 0
    entry = load(target, {}).config.model_list[0]
    assert (entry.model_name, entry.kind, entry.harmony) == ("gpt-oss-20b", "vllm", True)
    assert f"unisono serve --config {target}" in result.output
    again = CliRunner().invoke(main, ["init", "-o", str(target)])
    assert (again.exit_code, "replace it with --force" in again.output) == (1, True)
    assert CliRunner().invoke(main, ["init", "-o", str(target), "--force"]).exit_code == 0


BROKEN = {
    "model_list": [
        {
            "model_name": "a",
            "litellm_params": {"model": "vllm/x", "api_base": "http://h"},
            "model_info": {"blocked": True},
        },
        {"model_name": "a", "litellm_params": {"model": "vllm/x", "api_base": "ftp://h"}},
        {"model_name": "a", "litellm_params": {"model": "vllm/x"}},
    ],
    "general_settings": {"master_key": "sk-1234"},
    "unisono": {"hooks": ["missing"]},
    "store": {"url": "postgres://h/db"},
}


@pytest.mark.parametrize("command", ["serve", "check"])
def test_all_errors_of_building_the_gateway_are_reported_at_once(command: str, folder: Path) -> None:
    (folder / "more.yaml").write_text(json.dumps({"router_settings": {"fallbacks": [{"a": ["b"]}]}}))
    (folder / "config.yaml").write_text(json.dumps({**BROKEN, "include": ["more.yaml"]}))
    options = ["--host", "0.0.0.0"] if command == "serve" else []
    result = CliRunner().invoke(main, [command, *options])
    lines = [line.strip() for line in result.output.splitlines() if line.startswith("  ")]
    assert {line.partition(":")[0] for line in lines} == {
        *(["general_settings.master_key"] if command == "serve" else []),
        "store.url",
        "unisono.hooks[0]",
        "router_settings.fallbacks[0].a[0]",
    }
    assert "more.yaml)" in next(line for line in lines if line.startswith("router_settings"))
    (folder / "config.yaml").write_text(json.dumps(BROKEN))
    result = CliRunner().invoke(main, [command])
    # The positions are those in the file.
    for index in (1, 2):
        assert f"model_list[{index}].litellm_params.api_base: " in result.output
