"""`unisono check` as a command: table, messages, JSON and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeMlxServer, FakeVllm, Patient, Refusal
from unisono.cli.check import DeploymentReport, StoreReport, advice, check_commands, table, to_json
from unisono.config import parse
from unisono.core.probe import Check, Finding
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding

UNISONO = str(Path(sys.executable).with_name("unisono"))
KEY = "sk-planted-canary"
TIMEOUT_S = 60.0

Fake = FakeVllm | FakeMlxServer


@contextmanager
def running_fakes(*fakes: Fake) -> Iterator[None]:
    """Run the fakes on a thread of their own, for a command in another process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for fake in fakes:
            asyncio.run_coroutine_threadsafe(fake.__aenter__(), loop).result(5)
        yield
        for fake in fakes:
            asyncio.run_coroutine_threadsafe(fake.__aexit__(None, None, None), loop).result(5)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def deployment(model: str, base: str, **params: Any) -> dict[str, Any]:
    return {"model_name": "gpt-oss-test", "litellm_params": {"model": model, "api_base": base, **params}}


def run_check(
    folder: Path, *deployments: dict[str, Any], arguments: tuple[str, ...] = (), **sections: Any
) -> tuple[int, str, str]:
    config = folder / "config.json"
    config.write_text(json.dumps({"model_list": deployments, "store": {"url": "memory://"}, **sections}))
    return run("check", "--config", str(config), *arguments)


def run(*arguments: str, columns: int = 100) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command without a terminal."""
    completed = subprocess.run(
        [UNISONO, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"COLUMNS": str(columns)},
        stdin=subprocess.DEVNULL,
    )
    return completed.returncode, completed.stdout, completed.stderr


def cells(out: str, label: str) -> list[str]:
    """Return the cells of the table row with this label."""
    (row,) = [line for line in out.splitlines() if line.startswith(f"{label} ")]
    return row.removeprefix(label).split()


def test_working_deployments_give_a_table_and_exit_code_0(tmp_path: Path) -> None:
    vllm, mlx = FakeVllm(), FakeMlxServer()
    with running_fakes(vllm, mlx):
        code, out, err = run_check(
            tmp_path, deployment("vllm/tiny", vllm.url), deployment("mlx_server/tiny", mlx.url + "/v1")
        )
    assert (code, err) == (0, "")
    assert cells(out, "CHECK") == ["vllm-1", "mlx_server-1"]
    assert cells(out, "tokenizer") == ["ok", "ok"]
    assert cells(out, "ids_out") == ["ok", "-"]
    assert cells(out, "stop_token") == ["ok", "no"]
    assert cells(out, "typed_markers") == ["-", "warn"]
    assert cells(out, "context") == ["ok", "warn"]
    assert cells(out, "window") == ["131072", "-"]
    assert cells(out, "usable") == ["yes", "yes"]
    assert out.isascii()
    assert vllm.requests == mlx.requests == []


def other_vocabulary(text: str) -> list[int]:
    return [token for piece in text for token in load_encoding().encode_text(piece)]


FAILURES: dict[str, tuple[type[Fake], Patient, str, tuple[str, ...]]] = {
    "wrong tokenizer": (FakeVllm, Patient(encode=other_vocabulary), "tokenizer", ("own tokenizer files",)),
    "markers stripped": (FakeMlxServer, Patient(strips_markers=True), "markers", ("mlx_lm.server 0.32",)),
    "prompts truncated": (
        FakeVllm,
        Patient(reads_at_most=5),
        "prompt_kept",
        ("reports 5 prompt tokens", "truncation off"),
    ),
    "no token ids": (FakeVllm, Patient(returns_ids=False), "ids_out", ("vLLM to 0.32",)),
    "no stop after calls": (FakeVllm, Patient(stops_at=[200002]), "stops", ("generation_config.json",)),
    "generation fails": (
        FakeMlxServer,
        Patient(refusal=Refusal(404, b'{"error": "no weights in /srv/m"}', version=0)),
        "generation",
        ("Cause:", "no weights in /srv/m"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "patient", "check", "messages"), FAILURES.values(), ids=FAILURES)
def test_a_failed_check_gives_exit_code_1_and_a_remedy(
    tmp_path: Path, kind: type[Fake], patient: Patient, check: str, messages: tuple[str, ...]
) -> None:
    fake = kind()
    fake.patient = patient
    name = "vllm" if kind is FakeVllm else "mlx_server"
    with running_fakes(fake):
        url = fake.url
        code, out, _ = run_check(tmp_path, deployment(f"{name}/tiny", url))
    assert code == 1
    assert cells(out, check) == ["FAIL"]
    assert cells(out, "usable") == ["NO"]
    assert f"FAIL {check}: " in out
    assert "-> " in out
    assert url in out
    text = " ".join(out.split())
    assert all(word in text for word in messages)


@pytest.mark.slow
def test_a_backend_that_hides_stop_tokens_is_usable_with_a_warning(tmp_path: Path) -> None:
    fake = FakeVllm()
    fake.patient = Patient(hides_stops=True)
    with running_fakes(fake):
        code, out, _ = run_check(tmp_path, deployment("vllm/tiny", fake.url))
    assert (code, cells(out, "stop_token")) == (0, ["warn"])
    assert "hides the token that ended generation" in out


@pytest.mark.slow
def test_an_unserved_model_is_reported_with_the_served_ones(tmp_path: Path) -> None:
    fake = FakeVllm(model="openai/gpt-oss-20b")
    with running_fakes(fake):
        code, out, _ = run_check(tmp_path, deployment("vllm/gpt-oss-120b", fake.url))
    assert (code, cells(out, "model")) == (1, ["FAIL"])
    assert "openai/gpt-oss-20b" in out
    assert "--served-model-name" in out


@pytest.mark.slow
def test_connection_and_key_failures_differ_and_show_no_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    fake = FakeVllm(api_key="another")
    with running_fakes(fake):
        code, out, err = run_check(
            tmp_path,
            deployment("vllm/tiny", f"http://user:{KEY}@127.0.0.1:{port}"),
            deployment("vllm/tiny", fake.url, api_key=KEY),
        )
    assert code == 1
    assert cells(out, "reachable") == ["FAIL", "FAIL"]
    assert "cannot be reached" in out
    assert "api_key" in out
    assert KEY not in out + err


@pytest.mark.slow
def test_json_output_has_the_same_findings(tmp_path: Path) -> None:
    good, wrong = FakeVllm(), FakeVllm()
    wrong.patient = Patient(encode=other_vocabulary)
    with running_fakes(good, wrong):
        code, out, _ = run_check(
            tmp_path, deployment("vllm/tiny", good.url), deployment("vllm/tiny", wrong.url), arguments=("--json",)
        )
    report = json.loads(out)
    assert (code, report["usable"], [d["usable"] for d in report["deployments"]]) == (1, False, [True, False])
    first, second = report["deployments"]
    assert (first["name"], first["kind"], first["model"], first["context"]) == (
        "vllm-1",
        "vllm",
        "gpt-oss-test",
        131072,
    )
    assert first["first_token_s"] > 0
    assert {finding["result"] for finding in first["findings"]} == {"ok"}
    (fatal,) = [finding for finding in second["findings"] if finding["result"] == "fatal"]
    assert fatal["check"] == "tokenizer"
    assert fatal["detail"]
    assert fatal["remedy"]


@pytest.mark.slow
def test_the_store_is_checked(tmp_path: Path) -> None:
    vllm = FakeVllm()
    with running_fakes(vllm):
        sqlite = run_check(tmp_path, deployment("vllm/tiny", vllm.url), store={"url": f"sqlite://{tmp_path}/state.db"})
        memory = run_check(tmp_path, deployment("vllm/tiny", vllm.url))
    assert sqlite[0] == 0
    assert f"store sqlite://{tmp_path}/state.db: ok" in " ".join(sqlite[1].split())
    assert memory[0] == 0
    assert "  warn store: State is stored in memory only and is lost when this process ends." in memory[1]


@pytest.mark.slow
def test_an_unreachable_store_gives_exit_code_1_without_its_password(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    vllm = FakeVllm()
    store = {"url": f"redis://user:{KEY}@127.0.0.1:{port}/0?socket_keepalive=yes"}
    with running_fakes(vllm):
        code, out, err = run_check(tmp_path, deployment("vllm/tiny", vllm.url), store=store)
        report = json.loads(
            run_check(tmp_path, deployment("vllm/tiny", vllm.url), arguments=("--json",), store=store)[1]
        )
    assert code == 1
    assert cells(out, "usable") == ["yes"]
    assert f"store redis://127.0.0.1:{port}/0: FAIL" in out
    assert "FAIL store: The store cannot be reached" in out
    assert KEY not in out + err + json.dumps(report)
    assert (report["usable"], report["store"]["usable"], report["deployments"][0]["usable"]) == (False, False, True)


INVALID_CONFIGS: dict[str, str] = {
    "invalid YAML": "model_list: [",
    "unknown key": '{"model_lists": []}',
    "no models": '{"model_list": []}',
    "unknown store scheme": '{"model_list": [{"model_name": "gpt-oss", "litellm_params": {"model": "replay/demo"}}], '
    '"store": {"url": "postgres://x"}}',
    "unknown hook": '{"model_list": [{"model_name": "gpt-oss", "litellm_params": {"model": "replay/demo"}}], '
    '"unisono": {"hooks": ["nobody"]}}',
    "unknown kind": '{"model_list": [{"model_name": "gpt-oss", "litellm_params": {"model": "nokind/gpt-oss"}}]}',
}


@pytest.mark.slow
@pytest.mark.parametrize("content", INVALID_CONFIGS.values(), ids=INVALID_CONFIGS)
def test_an_invalid_configuration_gives_exit_code_2(tmp_path: Path, content: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(content)
    code, out, err = run("check", "--config", str(config))
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")


def test_a_missing_program_of_a_tool_server_is_an_error() -> None:
    present = {"transport": "stdio", "command": sys.executable}
    missing = {"transport": "stdio", "command": "no-such-program"}
    elsewhere = {"transport": "stdio", "command": "sh", "env": {"PATH": "/nowhere"}}
    config = parse({"mcp_servers": {"a": present, "b": missing, "c": elsewhere}}, {}).config
    with pytest.raises(ConfigError) as error:
        check_commands(config)
    assert [message.partition(":")[0] for message in error.value.messages] == [
        "mcp_servers.b.command",
        "mcp_servers.c.command",
    ]


@pytest.mark.slow
def test_a_missing_configuration_gives_exit_code_2(tmp_path: Path) -> None:
    assert run("check", "--config", str(tmp_path / "none.yaml"))[0] == 2


@pytest.mark.slow
@pytest.mark.engine
def test_without_a_configuration_the_demo_model_passes() -> None:
    code, out, err = run("check")
    assert code == 0
    assert "No configuration given" in err
    assert cells(out, "usable") == ["yes"]


# The table


def reports(count: int) -> list[DeploymentReport]:
    wrong = Finding(Check.TOKENIZER, ok=False, detail="words " * 30)
    return [DeploymentReport(f"deployment-{i}", "gpt-oss", "vllm", "http://gpu:8000", [wrong]) for i in range(count)]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_fits_the_screen_and_has_all_deployments(width: int) -> None:
    many = reports(9)
    lines = [*table(many, width), *advice(many, width)]
    assert max(map(len, lines)) <= width
    headings = " ".join(line for line in lines if line.startswith("CHECK"))
    assert all(report.name in headings for report in many)


def test_a_name_longer_than_the_screen_is_shown_in_full() -> None:
    long = DeploymentReport("x" * 100, "gpt-oss", "vllm", "", [])
    assert "x" * 100 in "\n".join(table([long], 40))


def test_reports_become_json() -> None:
    assert json.loads(json.dumps(to_json(reports(2), StoreReport("memory://"))))["usable"] is False
