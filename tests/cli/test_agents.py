"""`unisono config` and `unisono launch` with a scripted gateway and scripted agents."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
import pytest_asyncio
import yaml

from tests.fakes import Close, Refusal, Seen, Step, WireServer
from unisono.cli import main
from unisono.cli.agent_configs import LAUNCHES, PROGRAMS

PROGRAM = Path(sys.executable).parent / "unisono"
MODEL = "gpt-oss-120b"
NAMES = {"plain": MODEL, "with a path": "openai/gpt-oss", "with every quote": "a \"b\" 'c' $d `e` \\f {g}"}
# An agent that prints its arguments and environment.
AGENT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


@dataclass
class Site:
    """A scripted gateway: `listed` is its model list, or a whole response; `keys` are those of the requests."""

    server: WireServer
    listed: Any
    keys: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    def respond(self, seen: Seen) -> list[Step]:
        self.keys.append(seen.headers["authorization"])
        if isinstance(self.listed, Refusal):
            return self.listed.steps()
        return Refusal(200, json.dumps({"object": "list", "data": self.listed}).encode()).steps()


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    site = Site(WireServer(lambda seen: site.respond(seen)), [{"id": MODEL, "context_length": 65536}, {"id": "other"}])
    async with site.server:
        yield site


async def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run the command in a process with a small environment."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables}
    process = await asyncio.create_subprocess_exec(
        PROGRAM, *arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


def variables_of(text: str) -> dict[str, str]:
    """Return the variables after the lines of a shell script."""
    dump = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    script = f"{text}\n{shlex.join(dump)}"
    environment = {"PATH": os.environ["PATH"], "ANTHROPIC_API_KEY": "sk-own"}
    done = subprocess.run(["sh", "-ec", script], env=environment, capture_output=True, text=True, check=True)
    parsed: dict[str, str] = json.loads(done.stdout)
    return parsed


def codex(text: str, name: str, url: str) -> None:
    config = tomllib.loads(text)
    provider = config["model_providers"][config["model_provider"]]
    assert config["model"] == name
    assert (provider["base_url"], provider["model_catalog_url"]) == (f"{url}/v1", f"{url}/v1/models")
    assert provider["env_key"] == "UNISONO_API_KEY"


def claude(text: str, name: str, url: str) -> None:
    variables = variables_of(text)
    assert variables["ANTHROPIC_BASE_URL"] == url
    models = {value for key, value in variables.items() if re.fullmatch(r"ANTHROPIC_(\w+_)?MODEL", key)}
    assert models == {name}
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert "ANTHROPIC_API_KEY" not in variables


def opencode(text: str, name: str, url: str) -> None:
    config = json.loads("".join(line for line in text.splitlines() if not line.startswith("//")))
    provider = config["provider"]["unisono"]
    assert config["model"] == config["small_model"] == f"unisono/{name}"
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "{env:UNISONO_API_KEY}"}
    assert provider["models"][name]["limit"] == {"context": 65536, "output": 16384}


def open_webui(text: str, name: str, url: str) -> None:
    variables = variables_of(text)
    assert (variables["OPENAI_API_BASE_URL"], variables["OPENAI_API_KEY"]) == (f"{url}/v1", "none")
    assert variables["DEFAULT_MODELS"] == name


def continue_(text: str, name: str, url: str) -> None:
    (model,) = yaml.safe_load(text)["models"]
    assert (model["model"], model["apiBase"]) == (name, f"{url}/v1")
    assert model["apiKey"] == "${{ secrets.UNISONO_API_KEY }}"
    assert model["defaultCompletionOptions"] == {"contextLength": 65536, "maxTokens": 16384}


CHECKS: dict[str, Callable[[str, str, str], None]] = {
    "codex": codex,
    "claude": claude,
    "opencode": opencode,
    "open-webui": open_webui,
    "continue": continue_,
}


def choices(command: str) -> list[str]:
    parameter = main.commands[command].params[0]
    assert isinstance(parameter.type, click.Choice)
    return [*parameter.type.choices]


def test_the_tables_have_the_programs_of_the_commands() -> None:
    assert choices("config") == [*PROGRAMS] == [*CHECKS]
    assert choices("launch") == [*LAUNCHES]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("program", CHECKS)
async def test_a_configuration_names_the_model_and_address_of_the_gateway(program: str, name: str, site: Site) -> None:
    site.listed = [{"id": name, "context_length": 65536}]
    code, output, errors = await run("config", program, "--url", f"{site.url}/v1/")
    assert (code, errors) == (0, "")
    assert output.startswith(PROGRAMS[program].comment)
    CHECKS[program](output, name, site.url)


async def test_the_first_model_is_the_default_and_the_others_are_named(site: Site) -> None:
    code, output, errors = await run("config", "codex", "--url", site.url, UNISONO_API_KEY="sk-1")
    assert (code, errors) == (0, "Other models of this gateway, for --model: other\n")
    codex(output, MODEL, site.url)
    assert site.keys == ["Bearer sk-1"]


async def test_a_model_without_a_window_has_that_of_gpt_oss(site: Site) -> None:
    _, output, errors = await run("config", "claude", "--url", site.url, "--model", "other")
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072" in output
    assert errors == ""


async def test_the_key_is_read_from_the_named_variable(site: Site) -> None:
    _, output, _ = await run("config", "codex", "--url", site.url, "--key-env", "TEAM_KEY", TEAM_KEY="sk-2")
    assert 'env_key = "TEAM_KEY"' in output
    assert "sk-2" not in output
    assert site.keys == ["Bearer sk-2"]


async def test_a_configuration_can_be_printed_without_a_gateway() -> None:
    code, output, errors = await run("config", "codex", "--url", "http://127.0.0.1:9", "--model", MODEL)
    assert code == 0
    codex(output, MODEL, "http://127.0.0.1:9")
    assert errors.startswith("Warning: no gateway answers at http://127.0.0.1:9")


async def test_a_password_in_the_address_is_not_printed() -> None:
    code, _, errors = await run("config", "codex", "--url", "http://ann:secret/@127.0.0.1:9")
    assert (code, "secret" in errors) == (1, False)
    assert "no gateway answers at http://127.0.0.1:9;" in errors


async def test_a_name_that_the_gateway_does_not_list_is_kept_with_a_warning(site: Site) -> None:
    code, output, errors = await run("config", "codex", "--url", site.url, "--model", "hidden")
    assert code == 0
    codex(output, "hidden", site.url)
    assert errors == "Warning: the gateway does not list the model `hidden`.\n"


ERRORS: dict[str, tuple[Any, str]] = {
    "wrong key": (Refusal(401, b"{}"), r"rejects the key; set UNISONO_API_KEY to a valid key"),
    "no such path": (Refusal(404, b"{}"), r"/v1/models answers with status 404; check --url"),
    "another server": (Refusal(200, b"<html>"), r"is not a gateway: its model list is invalid; check --url"),
    "a list": (Refusal(200, b"[]"), r"is not a gateway"),
    "no models": ([], r"has no model for this key"),
    "a list without names": ([{}, 7, {"id": None}], r"has no model for this key"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("listed", "message"), ERRORS.values(), ids=ERRORS)
async def test_a_wrong_answer_is_a_clear_error(listed: Any, message: str, site: Site) -> None:
    site.listed = listed
    code, output, errors = await run("config", "codex", "--url", site.url)
    assert (code, output) == (1, "")
    assert re.search(message, errors), errors
    assert errors.count("\n") == 1


async def test_no_answer_is_a_clear_error() -> None:
    async with WireServer(lambda seen: [Close()]) as server:
        for url in (server.url, "http://127.0.0.1:9"):
            code, _, errors = await run("config", "codex", "--url", url)
            assert code == 1
            assert f"no gateway answers at {url}; start one with `unisono serve`, or pass its URL with --url" in errors


BAD_OPTIONS = {
    "no scheme": ("--url", "localhost:4000"),
    "a file": ("--url", "file:///etc/passwd"),
    "no host": ("--url", "http://"),
    "a shell command": ("--key-env", "A;ls"),
    "an empty name": ("--key-env", ""),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
async def test_a_wrong_option_is_rejected(option: str, value: str) -> None:
    code, _, errors = await run("config", "codex", option, value)
    assert (code, f"Invalid value for {option}" in errors) == (2, True)


def installed(folder: Path, agent: str) -> str:
    """Install an agent that prints how it was started, and return the search path."""
    script = folder / agent
    script.write_text(f"#!{sys.executable}\n{AGENT}\n")
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


async def started(site: Site, folder: Path, agent: str, *arguments: str, **variables: str) -> Any:
    path = installed(folder, agent)
    code, output, errors = await run("launch", agent, "--url", site.url, *arguments, **{"PATH": path, **variables})
    assert code == 0, errors
    return json.loads(output)


async def test_codex_is_started_with_overrides(site: Site, tmp_path: Path) -> None:
    arguments, environment = await started(site, tmp_path, "codex", "--", "exec", "--json", "Hi")
    assert arguments[-3:] == ["exec", "--json", "Hi"]
    assert arguments[0:-3:2] == ["-c"] * (len(arguments[:-3]) // 2)
    codex("\n".join(arguments[1:-3:2]), MODEL, site.url)
    assert environment["UNISONO_API_KEY"] == "none"


async def test_claude_code_is_started_with_variables(site: Site, tmp_path: Path) -> None:
    own = {"ANTHROPIC_API_KEY": "sk-own", "ANTHROPIC_MODEL": "claude", "UNISONO_API_KEY": "sk-1"}
    arguments, environment = await started(site, tmp_path, "claude", "--", "-p", "Hi", **own)
    assert arguments == ["-p", "Hi"]
    assert (environment["ANTHROPIC_MODEL"], environment["ANTHROPIC_AUTH_TOKEN"]) == (MODEL, "sk-1")
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert "ANTHROPIC_API_KEY" not in environment


async def test_opencode_is_started_with_its_configuration(site: Site, tmp_path: Path) -> None:
    arguments, environment = await started(site, tmp_path, "opencode")
    assert arguments == []
    opencode(environment["OPENCODE_CONFIG_CONTENT"], MODEL, site.url)


async def test_an_agent_gets_its_exit_code_and_the_wanted_model(site: Site, tmp_path: Path) -> None:
    arguments, _ = await started(site, tmp_path, "codex", "--model", "other")
    assert 'model="other"' in arguments
    (tmp_path / "codex").write_text("#!/bin/sh\nexit 7\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert (await run("launch", "codex", "--url", site.url, PATH=path))[0] == 7


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("agent", LAUNCHES)
async def test_an_agent_that_is_not_installed_is_a_clear_error(agent: str, site: Site, tmp_path: Path) -> None:
    code, _, errors = await run("launch", agent, "--url", site.url, PATH=str(tmp_path))
    assert code == 1
    assert f"`{agent}` is not installed; run `npm install -g {LAUNCHES[agent].package}`" in errors
    assert site.keys == []


async def test_an_agent_without_a_program_header_is_a_clear_error(site: Site, tmp_path: Path) -> None:
    path = installed(tmp_path, "claude")
    (tmp_path / "claude").write_text("echo 'run the postinstall'\n")
    code, _, errors = await run("launch", "claude", "--url", site.url, PATH=path)
    assert (code, "Traceback" in errors) == (1, False)
    assert "cannot be run (Exec format error); install it again with `npm install -g" in errors


async def test_an_agent_is_not_started_without_a_gateway(tmp_path: Path) -> None:
    path = installed(tmp_path, "codex")
    code, output, errors = await run("launch", "codex", "--url", "http://127.0.0.1:9", PATH=path)
    assert (code, output) == (1, "")
    assert "no gateway answers" in errors


def test_the_commands_import_nothing_before_they_run() -> None:
    script = "import sys, unisono.cli; print({'urllib.request', 'pydantic', 'aiohttp'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
