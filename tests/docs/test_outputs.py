"""Outputs on the pages equal those of the commands, apart from ids, secrets and times."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.docs.pages import ROOT, blocks
from unisono.access.keys import LOCAL_TENANT
from unisono.api.error_responses import to_body, with_attempts
from unisono.api.usage_report import to_usage
from unisono.cli import main
from unisono.cli.agent_configs import PROGRAMS, GatewayTarget
from unisono.config import imported
from unisono.core.access import Caller
from unisono.core.quotas import Account, LedgerLine, TokenUsage, UsageRecord
from unisono.errors import BackendUnavailable
from unisono.store import open_store

DOCS = ROOT / "docs"
VARIABLE_PARTS = (r"key_[0-9a-f]{24}", r"sk-uni-[\w-]+", r"\.\.\.[\w-]{4}$", r"\d{4}-\d\d-\d\d \d\d:\d\d")
USED = TokenUsage(requests=1, input=66, output=33, reasoning=22)
ENTRY = LedgerLine(Account("search", "key_c7e46162f77a384d2b016206"), "gpt-oss-demo", "2026-11-23", USED)
LITELLM = """
model_list:
  - model_name: gpt-oss
    litellm_params: {model: openai/openai/gpt-oss-120b, api_base: http://gpu-1:8000/v1}
litellm_settings: {success_callback: [langfuse]}
general_settings: {database_url: os.environ/DATABASE_URL}
router_settings: {routing_strategy: latency-based-routing}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with the demo model, and a ledger with one request."""
    url = f"sqlite:///{tmp_path}/state.db"
    models = [{"model_name": "gpt-oss-demo", "litellm_params": {"model": "mlx/demo"}}]
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps({"model_list": models, "general_settings": {"master_key": "sk-master"}, "store": {"url": url}})
    )

    async def settle() -> None:
        store = open_store(url)
        await store.start()
        await store.settle(UsageRecord("a request", ENTRY))
        await store.aclose()

    asyncio.run(settle())
    return path


def commands_with_output(page: str) -> Iterator[tuple[list[str], str]]:
    """Yield the arguments and the output of each `unisono` command with output on a page."""
    for where, text in blocks("sh"):
        if where.startswith(f"{page} ") and text.startswith("$ unisono "):
            command, _, output = text.partition("\n")
            yield shlex.split(command)[2:], output


def masked(output: str) -> str:
    for pattern in VARIABLE_PARTS:
        output = re.sub(pattern, "#", output, flags=re.M)
    return output


@pytest.mark.parametrize(("page", "commands"), [("keys.md", ["create", "list"]), ("usage.md", ["usage"])])
def test_a_command_prints_the_output_on_its_page(page: str, commands: list[str], config: Path) -> None:
    found = list(commands_with_output(page))
    assert [next(word for word in words if word in commands) for words, _ in found] == commands
    for words, output in found:
        result = CliRunner().invoke(main, [str(config) if word == "config.yaml" else word for word in words])
        assert masked(result.output) == masked(output)


def outputs(page: str, beginning: str) -> list[tuple[str, str]]:
    """Return each command on a page that begins with `beginning`, with the output in the next block."""
    text = (DOCS / page).read_text()
    return re.findall(rf"^```sh\n({re.escape(beginning)}[^\n]*)\n```\n\n```\n(.*?)^```$", text, re.M | re.S)


def test_the_keys_of_the_guide_are_created_by_its_commands(config: Path) -> None:
    page = "guides/team-keys.md"
    run = [*outputs(page, "unisono keys create"), *outputs(page, "KEY=$(unisono keys create")]
    for command, output in run:
        words = shlex.split(command.removeprefix("KEY=$(").rstrip(")"))[1:]
        result = CliRunner().invoke(main, [str(config) if word == "config.yaml" else word for word in words])
        printed = result.stderr if command.startswith("KEY=") else result.output
        assert masked(printed) == masked(output)
    [(_, listed)] = outputs(page, "unisono keys list")
    result = CliRunner().invoke(main, ["keys", "list", "--config", str(config)])
    assert sorted(masked(result.output).splitlines()) == sorted(masked(listed).splitlines())


def test_the_first_line_of_the_tool_server_on_the_page_is_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(command, output)] = outputs("tools.md", "unisono mcp serve browser")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("It is 42.")
    monkeypatch.chdir(tmp_path)
    remarks: list[str] = []
    # As an attribute of `unisono.cli`, `mcp` is the command instead of the module.
    monkeypatch.setattr(import_module("unisono.cli.mcp"), "_serve", lambda _server, lines, **_: remarks.extend(lines))
    CliRunner().invoke(main, shlex.split(command)[1:], catch_exceptions=False)
    assert remarks == output.splitlines()[:1]


def test_the_error_in_the_guide_is_current() -> None:
    error = BackendUnavailable("the backend cannot be reached")
    error.attempts = (("vllm-1", error.code),)
    body = json.dumps(to_body(with_attempts(error, Caller(LOCAL_TENANT))), separators=(",", ":"))
    assert body in (DOCS / "guides" / "request-history.md").read_text()


def test_the_usage_on_the_page_is_current() -> None:
    [text] = [text for where, text in blocks("json") if where.startswith("usage.md ")]
    caller = Caller(ENTRY.account.tenant, ENTRY.account.key)
    assert json.loads(text) == to_usage(caller, "2026-11-01", "2026-11-30", (ENTRY,)).model_dump()


def test_the_import_report_on_the_page_is_current(tmp_path: Path) -> None:
    path = tmp_path / "litellm.yaml"
    path.write_text(LITELLM)
    [text] = re.findall(r"^```\n(# .*?)^```$", (DOCS / "migrating-from-litellm.md").read_text(), re.S | re.M)
    assert imported(path).startswith(text)


def logged(package: str) -> Iterator[str]:
    """Yield the log messages of a package."""
    for path in (ROOT / "proxy" / "unisono" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
                texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
                yield from (text for text in texts if isinstance(text, str))


def test_the_routing_page_lists_all_log_messages_of_routing() -> None:
    _, _, rest = (DOCS / "routing.md").read_text().partition("\n### Log messages\n")
    table, _, _ = rest.partition("\n##")
    assert set(re.findall(r"^\| `(.+?)` \|", table, re.M)) == set(logged("routing"))


def test_the_example_log_line_has_an_existing_message() -> None:
    [text] = [text for where, text in blocks("json") if where.startswith("observability.md ")]
    assert json.loads(text)["message"] in set(logged("routing"))


def test_the_page_on_agents_has_the_configuration_of_every_program() -> None:
    target = GatewayTarget("http://localhost:4000", "gpt-oss-120b", 131072, "UNISONO_API_KEY")
    found = {words[-1]: output for words, output in commands_with_output("agents.md")}
    assert found == {name: program.render(target) for name, program in PROGRAMS.items()}
