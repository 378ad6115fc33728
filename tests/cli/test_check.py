"""`unisono check` as operators meet it: a table, sentences, JSON, an exit code."""

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
from unisono.cli.check import DeploymentReport, StoreReport, advice, table, to_json
from unisono.core.probe import Check, Finding
from unisono.harmony.encoding import load_encoding

UNISONO = str(Path(sys.executable).with_name("unisono"))
KEY = "sk-planted-canary"
PATIENCE_S = 60.0

Fake = FakeVllm | FakeMlxServer


@contextmanager
def elsewhere(*fakes: Fake) -> Iterator[None]:
    """The fakes run on a thread of their own, for a command in another process."""
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


def checked(
    folder: Path, *deployments: dict[str, Any], arguments: tuple[str, ...] = (), **sections: Any
) -> tuple[int, str, str]:
    config = folder / "config.json"
    config.write_text(json.dumps({"model_list": deployments, "store": {"url": "memory://"}, **sections}))
    return run("check", "--config", str(config), *arguments)


def run(*arguments: str, columns: int = 100) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, without a terminal."""
    done = subprocess.run(
        [UNISONO, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"COLUMNS": str(columns)},
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


def cells(out: str, label: str) -> list[str]:
    """A row of the table, without its label."""
    (row,) = [line for line in out.splitlines() if line.startswith(f"{label} ")]
    return row.removeprefix(label).split()


def test_what_works_is_a_table_and_exit_code_0(tmp_path: Path) -> None:
    vllm, mlx = FakeVllm(), FakeMlxServer()
    with elsewhere(vllm, mlx):
        code, out, err = checked(
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


WRONG: dict[str, tuple[type[Fake], Patient, str, tuple[str, ...]]] = {
    "a wrong tokenizer": (FakeVllm, Patient(encode=other_vocabulary), "tokenizer", ("own tokenizer files",)),
    "markers stripped": (FakeMlxServer, Patient(strips_markers=True), "markers", ("mlx_lm.server 0.32",)),
    "prompts cut": (FakeVllm, Patient(reads_at_most=5), "prompt_kept", ("reports 5 prompt tokens", "truncation off")),
    "no ids": (FakeVllm, Patient(returns_ids=False), "ids_out", ("vLLM to 0.32",)),
    "no stop behind calls": (FakeVllm, Patient(stops_at=[200002]), "stops", ("generation_config.json",)),
    "fails inside": (
        FakeMlxServer,
        Patient(refusal=Refusal(404, b'{"error": "no weights in /srv/m"}', version=0)),
        "generation",
        ("Cause:", "no weights in /srv/m"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "patient", "check", "says"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_exit_code_1_and_a_sentence_that_helps(
    tmp_path: Path, kind: type[Fake], patient: Patient, check: str, says: tuple[str, ...]
) -> None:
    fake = kind()
    fake.patient = patient
    name = "vllm" if kind is FakeVllm else "mlx_server"
    with elsewhere(fake):
        url = fake.url
        code, out, _ = checked(tmp_path, deployment(f"{name}/tiny", url))
    assert code == 1
    assert cells(out, check) == ["FAIL"]
    assert cells(out, "usable") == ["NO"]
    assert f"FAIL {check}: " in out
    assert "-> " in out
    assert url in out
    text = " ".join(out.split())
    assert all(word in text for word in says)


@pytest.mark.slow
def test_one_that_hides_stops_is_usable_with_a_warning(tmp_path: Path) -> None:
    fake = FakeVllm()
    fake.patient = Patient(hides_stops=True)
    with elsewhere(fake):
        code, out, _ = checked(tmp_path, deployment("vllm/tiny", fake.url))
    assert (code, cells(out, "stop_token")) == (0, ["warn"])
    assert "hides the token that ended generation" in out


@pytest.mark.slow
def test_a_model_nobody_serves_is_named_with_those_that_are(tmp_path: Path) -> None:
    fake = FakeVllm(model="openai/gpt-oss-20b")
    with elsewhere(fake):
        code, out, _ = checked(tmp_path, deployment("vllm/gpt-oss-120b", fake.url))
    assert (code, cells(out, "model")) == (1, ["FAIL"])
    assert "openai/gpt-oss-20b" in out
    assert "--served-model-name" in out


@pytest.mark.slow
def test_who_is_not_there_is_told_apart_and_no_key_is_shown(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    fake = FakeVllm(api_key="another")
    with elsewhere(fake):
        code, out, err = checked(
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
def test_json_is_the_same_as_data(tmp_path: Path) -> None:
    good, wrong = FakeVllm(), FakeVllm()
    wrong.patient = Patient(encode=other_vocabulary)
    with elsewhere(good, wrong):
        code, out, _ = checked(
            tmp_path, deployment("vllm/tiny", good.url), deployment("vllm/tiny", wrong.url), arguments=("--json",)
        )
    told = json.loads(out)
    assert (code, told["usable"], [d["usable"] for d in told["deployments"]]) == (1, False, [True, False])
    first, second = told["deployments"]
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
def test_the_store_is_checked_too(tmp_path: Path) -> None:
    vllm = FakeVllm()
    with elsewhere(vllm):
        there = checked(tmp_path, deployment("vllm/tiny", vllm.url), store={"url": f"sqlite://{tmp_path}/state.db"})
        warned = checked(tmp_path, deployment("vllm/tiny", vllm.url))
    assert there[0] == 0
    assert f"store sqlite://{tmp_path}/state.db: ok" in " ".join(there[1].split())
    assert warned[0] == 0
    assert "  warn store: State is stored in memory only and is lost when this process ends." in warned[1]


@pytest.mark.slow
def test_a_store_that_is_not_there_is_exit_code_1_and_its_password_is_not_shown(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    vllm = FakeVllm()
    store = {"url": f"redis://user:{KEY}@127.0.0.1:{port}/0?socket_keepalive=yes"}
    with elsewhere(vllm):
        code, out, err = checked(tmp_path, deployment("vllm/tiny", vllm.url), store=store)
        told = json.loads(checked(tmp_path, deployment("vllm/tiny", vllm.url), arguments=("--json",), store=store)[1])
    assert code == 1
    assert cells(out, "usable") == ["yes"]
    assert f"store redis://127.0.0.1:{port}/0: FAIL" in out
    assert "FAIL store: The store cannot be reached" in out
    assert KEY not in out + err + json.dumps(told)
    assert (told["usable"], told["store"]["usable"], told["deployments"][0]["usable"]) == (False, False, True)


MISTAKES: dict[str, str] = {
    "no YAML": "model_list: [",
    "an unknown key": '{"model_lists": []}',
    "no model": '{"model_list": []}',
    "no store": '{"model_list": [{"model_name": "gpt-oss", "litellm_params": {"model": "replay/demo"}}], '
    '"store": {"url": "postgres://x"}}',
    "no hook": '{"model_list": [{"model_name": "gpt-oss", "litellm_params": {"model": "replay/demo"}}], '
    '"unisono": {"hooks": ["nobody"]}}',
    "no kind": '{"model_list": [{"model_name": "gpt-oss", "litellm_params": {"model": "nokind/gpt-oss"}}]}',
}


@pytest.mark.slow
@pytest.mark.parametrize("content", MISTAKES.values(), ids=MISTAKES)
def test_a_configuration_that_cannot_be_used_is_exit_code_2(tmp_path: Path, content: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(content)
    code, out, err = run("check", "--config", str(config))
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")


@pytest.mark.slow
def test_a_configuration_that_is_not_there_is_exit_code_2(tmp_path: Path) -> None:
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
def test_nothing_is_wider_than_the_screen_and_nobody_is_left_out(width: int) -> None:
    many = reports(9)
    lines = [*table(many, width), *advice(many, width)]
    assert max(map(len, lines)) <= width
    headings = " ".join(line for line in lines if line.startswith("CHECK"))
    assert all(report.name in headings for report in many)


def test_a_name_longer_than_the_screen_is_shown_all_the_same() -> None:
    long = DeploymentReport("x" * 100, "gpt-oss", "vllm", "", [])
    assert "x" * 100 in "\n".join(table([long], 40))


def test_reports_become_json() -> None:
    assert json.loads(json.dumps(to_json(reports(2), StoreReport("memory://"))))["usable"] is False
