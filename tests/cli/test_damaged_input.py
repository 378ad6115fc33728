"""Damaged files, addresses and answers of gateways: each command reports them without a traceback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unisono.cli import main
from unisono.cli.compare import chat_prompts
from unisono.evaluation.scorecard import OBJECT, VERSION

HERE = "vllm/x@http://127.0.0.1:9"
# A recording and a scorecard that the commands accept.
RECORDING: dict[str, Any] = json.loads(
    """{
    "object": "unisono.trace", "version": 1, "gateway": "0.1.0", "id": "req_1", "at": 1790000000.0, "tenant": "t",
    "key": "", "surface": "chat", "model": "gpt-oss", "background": false, "resumed": false, "outcome": "completed",
    "error": "", "finish": "stop", "first_s": 0.1, "ended_s": 0.2, "backend": "b", "failovers": 0, "unmet": "",
    "left_out_turns": 0, "recoveries": [], "tries": [], "waits": [], "tools": [], "usage": {}, "left_out": [],
    "asked": {"calls_allowed": true, "parallel_calls": true, "hold_calls": true, "whole": true, "seed": "00",
              "reasoning_budget": null, "stop": [], "unmended": [], "prefill": null, "tools": [], "deferred": [],
              "choice": null, "form": null, "hosting": null},
    "output": [200005, 17196, 200008, 12194, 200002],
    "said": [{"closed": "final", "name": "", "characters": 2, "digest": "00", "tokens": 2, "complete": true}],
    "steps": [{"step": 0, "deployment": "b", "began_s": 0.1, "first_token_s": 0.1, "ended_s": 0.2, "prompt_tokens": 2,
               "cached_tokens": 0, "generated": 5, "finish": "stop", "failure": "",
               "prompt": {"same": 0, "tokens": [200006, 173781], "gap": null}}]
    }"""
)
SCORECARD: dict[str, Any] = {
    "object": OBJECT,
    "version": VERSION,
    "created": "",
    "gateway": "",
    "settings": {},
    "runs": [{"suite": "s", "model": "m", "deployment": "", "effort": "", "results": [{"id": "a", "fault": ""}]}],
}


def invoked(*arguments: str) -> Result:
    """Run a command. Fails the test if the command ends with a traceback."""
    result = CliRunner(env={"UNISONO_API_KEY": "sk-x"}).invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        pytest.fail(f"unisono {' '.join(arguments)[:200]}: {result.exception!r}"[:1000])
    return result


@pytest.fixture
def config(tmp_path: Path) -> str:
    models = [{"model_name": "gpt-oss", "litellm_params": {"model": "vllm/x", "api_base": "http://127.0.0.1:9"}}]
    store = {"url": f"sqlite://{tmp_path}/state.db"}
    general = {"master_key": "sk-master"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_list": models, "general_settings": general, "store": store}))
    return str(path)


FILES: dict[str, bytes] = {
    # PyYAML needs quadratic time for brackets on one line.
    "nested too deeply": b"[\n" * 3_000,
    "objects nested too deeply": b'{"a":' * 3_000,
    "truncated": b'{"keys": [{',
    "null": b"null",
    "a list of numbers": b"[1]",
    "a number of 10,000 digits": b"1" * 10_000,
    "not UTF-8": b"\xff\xfe\x00",
    "an impossible date": b"a: 2026-02-30",
    "half of a surrogate pair": b'{"keys": [{"token": "\\ud800"}], "model_name": "\\ud800"}',
}
READERS: tuple[tuple[str, ...], ...] = (
    ("trace", "FILE"),
    ("trace", "FILE", "--replay"),
    ("trace", "FILE", "--fork-at", "0", "--backend", HERE),
    ("keys", "import", "FILE", "--config", "CONFIG"),
    ("compare", HERE, HERE, "--prompts", "FILE"),
    ("eval", "compare", "FILE", "FILE"),
    ("simulate", "--plan", "FILE"),
    ("models", "add", "--file", "FILE", "--config", "CONFIG"),
    ("models", "--config", "FILE"),
    ("import-litellm", "FILE", "--no-probe"),
    ("check", "--config", "FILE"),
    ("usage", "--config", "FILE"),
    ("mcp", "list", "--config", "FILE"),
)


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_damaged_file_is_reported_by_every_command(content: bytes, config: str, tmp_path: Path) -> None:
    file = tmp_path / "input.json"
    file.write_bytes(content)
    for reader in READERS:
        invoked(*(argument.replace("FILE", str(file)).replace("CONFIG", config) for argument in reader))


READABLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "recording": (json.dumps(RECORDING), ("trace", "FILE")),
    "scorecard": (json.dumps(SCORECARD), ("eval", "compare", "FILE", "FILE")),
    "exported keys as JSON": ('{"keys": []}', ("keys", "import", "FILE", "--config", "CONFIG")),
    "exported keys as CSV": ("token,key_name\n", ("keys", "import", "FILE", "--config", "CONFIG")),
    "plan": ("{}", ("simulate", "--plan", "FILE")),
    "configuration": ('{"model_list": []}', ("import-litellm", "FILE", "--no-probe")),
}


@pytest.mark.parametrize(("content", "reader"), READABLE.values(), ids=READABLE)
def test_every_command_reads_a_file_with_a_byte_order_mark(
    content: str, reader: tuple[str, ...], config: str, tmp_path: Path
) -> None:
    file = tmp_path / "input.json"
    arguments = [argument.replace("FILE", str(file)).replace("CONFIG", config) for argument in reader]
    results = []
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(content, encoding)
        results.append(invoked(*arguments))
    assert (results[0].exit_code, results[0].output) == (results[1].exit_code, results[1].output)
    file.write_text(content, "utf-16")
    refused = invoked(*arguments)
    assert (refused.exit_code, f"{file}: the file is not UTF-8 text; save it as UTF-8" in refused.output) == (1, True)


def test_prompts_are_read_as_utf_8_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"name": "Grüße", "messages": [{"role": "user", "content": "Hi"}]}\n', "utf-8-sig")
    assert [name for name, _ in chat_prompts(file)] == ["Grüße"]


VALUES: tuple[Any, ...] = (None, 1, "x", [1], [None], {}, [{}], float("inf"), 2**70, "\ud800")


def damaged(document: dict[str, Any], *path: str | int) -> Iterator[dict[str, Any]]:
    """Yield copies in which the object at `path` lacks one field, or one field has a different type."""

    def at(copy: Any) -> Any:
        for step in path:
            copy = copy[step]
        return copy

    for field in at(document):
        for value in VALUES:
            copy = deepcopy(document)
            at(copy)[field] = value
            yield copy
        copy = deepcopy(document)
        del at(copy)[field]
        yield copy


@pytest.mark.parametrize("path", [(), ("said", 0)], ids=["recording", "said"])
def test_a_damaged_recording_is_reported(path: tuple[str | int, ...], tmp_path: Path) -> None:
    file = tmp_path / "recording.json"
    file.write_text(json.dumps(RECORDING))
    assert invoked("trace", str(file)).exit_code == 0
    assert invoked("trace", str(file), "--replay").exit_code == 1  # the recorded digest is a different one
    for document in damaged(RECORDING, *path):
        file.write_text(json.dumps(document))
        invoked("trace", str(file))
        invoked("trace", str(file), "--replay")
    file.write_text(json.dumps({**RECORDING, "said": [1]}))
    result = invoked("trace", str(file), "--replay")
    assert (result.exit_code, "this recording is damaged" in result.stderr) == (2, True)


@pytest.mark.parametrize("path", [("runs", 0), ("runs", 0, "results", 0)], ids=["run", "result"])
def test_a_damaged_scorecard_is_reported(path: tuple[str | int, ...], tmp_path: Path) -> None:
    file = tmp_path / "scorecard.json"
    file.write_text(json.dumps(SCORECARD))
    assert invoked("eval", "compare", str(file), str(file)).exit_code == 0
    for document in damaged(SCORECARD, *path):
        file.write_text(json.dumps(document))
        invoked("eval", "compare", str(file), str(file))


ADDRESSES = ("notaurl", "http://", "http://[", "http://a:99999", "http://a b", "http://127.0.0.1:9/\x01")


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_invalid_address_is_reported(address: str, tmp_path: Path) -> None:
    recording = tmp_path / "recording.json"
    recording.write_text(json.dumps(RECORDING))
    backend = f"vllm/x@{address}"
    for arguments in (
        ("trace", str(recording), "--fork-at", "0", "--backend", backend),
        ("compare", backend, HERE),
        ("keys", "list", "--url", address),
        ("models", "remove", "x", "--url", address),
        ("usage", "--url", address),
        ("config", "codex", "--url", address),
        ("eval", "run", "--url", address, "--model", "m", "--output", str(tmp_path / "card.json")),
    ):
        result = invoked(*arguments)
        assert result.exit_code, arguments
        # These commands have no `model_list` that the user could correct.
        assert "model_list" not in result.output


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """Yield a function that sets the answer of a server, and returns the address of the server."""
    answer = (200, b"")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(answer[0])
            self.send_header("content-length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        do_POST = do_GET  # noqa: N815 - the name that the base class calls

        def log_message(self, format: str, *args: Any) -> None:
            pass

    def set_answer(status: int, body: bytes) -> str:
        nonlocal answer
        answer = (status, body)
        return f"http://127.0.0.1:{server.server_port}"

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield set_answer
        server.shutdown()


ANSWERS: dict[str, tuple[int, bytes]] = {
    "nested too deeply": (200, b"[" * 100_000),
    "an error that is nested too deeply": (400, b"[" * 100_000),
    "null": (200, b"null"),
    "an empty object": (200, b"{}"),
    "half of a surrogate pair": (200, b'"\\ud800"'),
    "entries of other types": (200, b'{"keys": [1], "results": [1], "data": [1], "total_pages": 1}'),
    "entries without fields": (200, b'{"keys": [{}], "results": [{}], "data": [{}], "model_info": {}}'),
}
REMOTE: tuple[tuple[str, ...], ...] = (
    ("keys", "list"),
    ("keys", "create"),
    ("keys", "update", "k", "--rpm", "1"),
    ("keys", "rotate", "k"),
    ("keys", "import", "EXPORT"),
    ("models", "add", "m", "vllm/x"),
    ("models", "drain", "x"),
    ("usage",),
    ("config", "codex"),
    ("eval", "run", "--model", "m", "--output", "CARD"),
)


@pytest.mark.parametrize(("status", "body"), ANSWERS.values(), ids=ANSWERS)
def test_an_unexpected_answer_is_reported(
    status: int, body: bytes, answering: Callable[[int, bytes], str], tmp_path: Path
) -> None:
    export = tmp_path / "export.json"
    export.write_text(json.dumps([{"token": "0" * 64}]))
    url = answering(status, body)
    for command in REMOTE:
        files = {"EXPORT": str(export), "CARD": str(tmp_path / "card.json")}
        result = invoked(*(files.get(argument, argument) for argument in command), "--url", url)
        assert result.exit_code, command


@pytest.mark.parametrize("line", [b"null", b"[1]", b"[" * 100_000, b'[["s", {}, {}]]'])
def test_a_damaged_file_of_an_interrupted_run_is_reported(
    line: bytes, answering: Callable[[int, bytes], str], tmp_path: Path
) -> None:
    url = answering(200, b'{"version": "1"}')
    partial = tmp_path / "card.json.partial"
    run = ("eval", "run", "--url", url, "--model", "m", "--limit", "1", "--output", str(tmp_path / "card.json"))
    invoked(*run)
    settings = partial.read_bytes().partition(b"\n")[0]
    for content in (line, settings + b"\n" + line + b"\n"):
        partial.write_bytes(content)
        assert invoked(*run).exit_code
