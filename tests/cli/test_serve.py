"""`unisono serve` as a process: startup screen, port and signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.fakes import FakeVllm
from unisono.app import build
from unisono.cli.serve import address_of, listen
from unisono.config import parse
from unisono.core.deployments import DeploymentState
from unisono.harmony.encoding import load_encoding
from unisono.observe.redaction import passwords_of
from unisono.server.startup_screen import STATES, curl_line, screen_lines

UNISONO = str(Path(sys.executable).with_name("unisono"))
KEY = "sk-planted-canary"
ANSWER = "<|channel|>final<|message|>" + "word " * 40 + "<|return|>"
TIMEOUT_S = 30.0


class BackendThread:
    """Fake vLLM on a thread of its own, for a gateway in another process."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> FakeVllm:
        self._thread.start()
        self.fake = FakeVllm(tokens=load_encoding().encode_marked(ANSWER), **self._fields)
        asyncio.run_coroutine_threadsafe(self.fake.__aenter__(), self._loop).result(5)
        return self.fake

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self.fake.__aexit__(*error), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class RunningGateway:
    """Running `unisono serve`. `screen` is its output until it was ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("Ctrl-C"):
                break
        self.screen = "\n".join(self.lines)
        found = re.search(r"listens on (http://\S+)/v1", self.screen)
        assert found, f"the gateway did not start: {self.screen} {process.stderr.read() if process.stderr else ''}"
        self.url = found[1]

    def wait(self, *, within_s: float) -> tuple[int, str, str]:
        """Wait for the exit and return exit code, output after the screen, and log."""
        out, log = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, log


@contextmanager
def running_gateway(
    tmp_path: Path, url: str, *arguments: str, api_key: str | None = None, has_shadow: bool = False, **sections: Any
) -> Iterator[RunningGateway]:
    config = tmp_path / "config.json"
    params = {"model": "vllm/tiny", "api_base": url, "api_key": api_key}
    model = {"model_name": "gpt-oss-test", "litellm_params": params}
    shadows = [{**model, "unisono": {"shadow": "vllm-1"}}] if has_shadow else []
    config.write_text(json.dumps({"model_list": [model, *shadows], **sections}))
    command = [UNISONO, "serve", "--port", "0", "--config", str(config), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield RunningGateway(process)
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Return exit code and stderr of a command that ends by itself."""
    completed = subprocess.run(
        [UNISONO, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | (environ or {})
    )
    return completed.returncode, completed.stderr


def send_chat(url: str, *, stream: bool = False) -> Any:
    body = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    return urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=TIMEOUT_S)


def test_the_screen_describes_every_state() -> None:
    assert STATES.keys() == set(DeploymentState)


@pytest.mark.slow
def test_the_curl_command_on_the_screen_works(tmp_path: Path) -> None:
    with BackendThread() as fake, running_gateway(tmp_path, fake.url, has_shadow=True) as gateway:
        assert "gpt-oss-test" in gateway.screen
        assert "vllm-1: ready" in gateway.screen
        assert "vllm-2: shadow" in gateway.screen
        (line,) = [line for line in gateway.lines if line.strip().startswith("curl ")]
        response = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        assert json.loads(response.stdout)["choices"][0]["message"]["content"].startswith("word word")


@pytest.mark.slow
def test_the_curl_command_works_with_a_key_that_it_does_not_show(tmp_path: Path) -> None:
    general = {"master_key": KEY}
    with BackendThread() as fake, running_gateway(tmp_path, fake.url, general_settings=general) as gateway:
        assert KEY not in gateway.screen
        (line,) = [line for line in gateway.lines if line.strip().startswith("curl ")]
        environ = os.environ | {"UNISONO_MASTER_KEY": KEY}
        response = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, env=environ)
        assert json.loads(response.stdout)["model"] == "gpt-oss-test"


@pytest.mark.engine
def test_serve_without_a_configuration_answers_requests() -> None:
    command = [UNISONO, "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        gateway = RunningGateway(process)
        assert gateway.screen.startswith("No configuration given")
        (line,) = [line for line in gateway.lines if line.strip().startswith("curl ")]
        response = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=120)
        assert json.loads(response.stdout)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        assert gateway.wait(within_s=TIMEOUT_S)[0] == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("has_chat", [True, False])
def test_the_curl_command_names_a_model_that_generates_text(has_chat: bool) -> None:
    entries = [
        {
            "model_name": "bge",
            "litellm_params": {"model": "vllm/bge", "api_base": "http://h"},
            "model_info": {"mode": "embedding"},
        },
        {"model_name": "gpt-oss", "litellm_params": {"model": "replay/demo"}},
    ]
    raw = {"model_list": entries if has_chat else entries[:1], "store": {"url": "memory://"}}
    screen = "\n".join(screen_lines(build(parse(raw, {}).config).state.gateway, "http://x", ()))
    assert ('{"model": "gpt-oss"' in screen, "curl" in screen) == (has_chat, has_chat)


def test_a_model_name_with_quotes_is_escaped_in_the_curl_command() -> None:
    name = """it's "mine" $HOME `id`"""
    *_, body = shlex.split(curl_line("http://x", name, ""))
    assert json.loads(body)["model"] == name


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.slow), pytest.param(signal.SIGTERM, id="SIGTERM")],
)
def test_a_signal_stops_the_gateway_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    with BackendThread() as fake, running_gateway(tmp_path, fake.url) as gateway:
        send_chat(gateway.url).read()
        gateway.process.send_signal(number)
        code, out, log = gateway.wait(within_s=TIMEOUT_S)
    assert (code, out.strip()) == (0, "Stopped.")
    assert "Traceback" not in log


WORKERS = pytest.mark.parametrize("workers", [1, 2])


@contextmanager
def starting(tmp_path: Path, workers: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a process that waits for its configuration, and the pipe to write it to."""
    config = tmp_path / "config.json"
    os.mkfifo(config)
    command = [UNISONO, "serve", "--port", "0", "--config", str(config), "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # Blocks until the process opens its end.
        pipe = os.open(config, os.O_WRONLY)
        config.unlink()
        yield process, pipe
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@WORKERS
def test_sigterm_stops_a_gateway_during_its_start(workers: int, tmp_path: Path) -> None:
    with starting(tmp_path, workers) as (process, pipe):
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=TIMEOUT_S) == ("", "")
        assert process.returncode == 0
        os.close(pipe)


@pytest.mark.slow
@WORKERS
def test_sighup_during_the_start_reloads_the_configuration(workers: int, tmp_path: Path) -> None:
    first, second = (
        {
            "model_list": [{"model_name": name, "litellm_params": {"model": "replay/demo"}}],
            "store": {"url": f"sqlite://{tmp_path}/s.db"},
        }
        for name in ("gpt-oss-first", "gpt-oss-second")
    )
    with starting(tmp_path, workers) as (process, pipe):
        (tmp_path / "config.json").write_text(json.dumps(second))
        process.send_signal(signal.SIGHUP)
        os.write(pipe, json.dumps(first).encode())
        os.close(pipe)
        gateway = RunningGateway(process)
        until = time.monotonic() + TIMEOUT_S
        while b"gpt-oss-second" not in urlopen(f"{gateway.url}/v1/models", timeout=TIMEOUT_S).read():
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.slow
def test_a_running_response_finishes_before_shutdown(tmp_path: Path) -> None:
    with BackendThread(delay_s=0.03) as fake, running_gateway(tmp_path, fake.url) as gateway:
        stream = send_chat(gateway.url, stream=True)
        stream.readline()
        gateway.process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert gateway.wait(within_s=TIMEOUT_S)[0] == 0


@pytest.mark.slow
def test_shutdown_ends_after_the_grace_period(tmp_path: Path) -> None:
    settings = {"shutdown_grace_s": 1}
    with BackendThread(delay_s=10.0) as fake, running_gateway(tmp_path, fake.url, unisono=settings) as gateway:
        threading.Thread(target=_read_stream, args=(gateway.url,), daemon=True).start()
        while not fake.requests:
            time.sleep(0.01)
        started = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        code, _, _ = gateway.wait(within_s=TIMEOUT_S)
    assert code == 0
    assert time.monotonic() - started < 6


@pytest.mark.slow
def test_a_second_signal_ends_shutdown_without_waiting(tmp_path: Path) -> None:
    with BackendThread(delay_s=10.0) as fake, running_gateway(tmp_path, fake.url) as gateway:
        threading.Thread(target=_read_stream, args=(gateway.url,), daemon=True).start()
        while not fake.requests:
            time.sleep(0.01)
        started = time.monotonic()
        for _ in range(2):
            gateway.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        code, _, _ = gateway.wait(within_s=TIMEOUT_S)
    assert code == 0
    assert time.monotonic() - started < 10


def _read_stream(url: str) -> None:
    try:
        send_chat(url, stream=True).read()
    except OSError:
        return


@pytest.mark.slow
def test_no_secret_and_no_prompt_reaches_the_log(tmp_path: Path) -> None:
    sections = {"general_settings": {"master_key": KEY}, "unisono": {"log_level": "debug"}}
    backend_key = "sk-backend-canary"
    with (
        BackendThread(api_key=backend_key) as fake,
        running_gateway(tmp_path, fake.url, api_key=backend_key, **sections) as gateway,
    ):
        send_chat(gateway.url).read()
        fake.api_key = "sk-changed-canary"
        broken = b'{"model": "gpt-oss-test", "messages": [{"role": "user", "content": "prompt-canary"}]}'
        for content, key in ((b"{", KEY), (broken, KEY), (broken[:40], KEY), (b"{}", "sk-wrong-canary")):
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            with pytest.raises(OSError, match=r"HTTP Error [45]"):
                urlopen(Request(f"{gateway.url}/v1/chat/completions", content, headers), timeout=TIMEOUT_S)
        gateway.process.send_signal(signal.SIGTERM)
        _, out, log = gateway.wait(within_s=TIMEOUT_S)
    for text in (gateway.screen, out, log):
        assert "canary" not in text
    lines = [json.loads(line) for line in log.splitlines()]
    assert "backend failed" in [line["message"] for line in lines]


@pytest.mark.slow
def test_the_configured_connection_limits_apply(tmp_path: Path) -> None:
    settings = {"header_timeout_s": 0.3, "max_connections": 20}
    with BackendThread() as fake, running_gateway(tmp_path, fake.url, unisono=settings) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with ExitStack() as sockets:
            slow = [sockets.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(25)]
            slow[0].sendall(b"GET / HTTP/1.1\r\nhost: x")
            with pytest.raises(OSError, match="HTTP Error 503"):
                send_chat(gateway.url)
            for connection in slow:
                connection.settimeout(5)
                assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
            assert send_chat(gateway.url).status == 200


@pytest.mark.slow
def test_reserved_settings_are_logged_at_the_start(tmp_path: Path) -> None:
    settings = {"trust_proxy_headers": "canary"}
    with BackendThread() as fake, running_gateway(tmp_path, fake.url, unisono=settings) as gateway:
        gateway.process.send_signal(signal.SIGTERM)
        _, _, log = gateway.wait(within_s=TIMEOUT_S)
    warnings = [json.loads(line) for line in log.splitlines()]
    messages = [w["message"] for w in warnings if w["logger"] == "unisono.config"]
    assert messages == ["unisono.trust_proxy_headers: this setting is reserved and has no effect in this version"]
    assert "canary" not in log


@pytest.mark.slow
def test_chat_works_with_an_unreachable_store_logged_without_its_password(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    address = f"redis://user:planted%2Dcanary@127.0.0.1:{port}/0"
    with BackendThread() as fake, running_gateway(tmp_path, fake.url, store={"url": address}) as gateway:
        assert send_chat(gateway.url).status == 200
        gateway.process.send_signal(signal.SIGTERM)
        code, _, log = gateway.wait(within_s=TIMEOUT_S)
    assert code == 0
    (entry,) = [json.loads(line) for line in log.splitlines() if '"unisono.store"' in line]
    assert (entry["level"], entry["reason"]) == ("error", "the store cannot be reached")
    assert "canary" not in log + gateway.screen


@pytest.mark.slow
def test_without_a_usable_data_folder_state_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch, BackendThread() as fake:
        patch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
        with running_gateway(tmp_path, fake.url) as gateway:
            assert send_chat(gateway.url).status == 200
            gateway.process.send_signal(signal.SIGTERM)
            _, _, log = gateway.wait(within_s=TIMEOUT_S)
    (entry,) = [json.loads(line) for line in log.splitlines() if '"unisono.store"' in line]
    assert entry["level"] == "warning"
    assert f"{tmp_path}/file/unisono/state.db cannot be used" in entry["message"]
    assert "state is stored in memory only" in entry["message"]


STORE_URLS: dict[str, tuple[str, set[str]]] = {
    "with a user": ("redis://user:p%40ss-word@host/0", {"p%40ss-word", "p@ss-word"}),
    "without a user": ("redis://:secret@host", {"secret"}),
    "with a colon": ("redis://:sec:ret@host", {"sec:ret"}),
    "for several hosts": ("redis+sentinel://:secret@a,b/name", {"secret"}),
    "as an option": ("redis://host?db=1&password=sec%20ret", {"sec%20ret", "sec ret"}),
    "without a password": ("sqlite:///var/lib/state.db", set()),
}


@pytest.mark.parametrize(("url", "passwords"), STORE_URLS.values(), ids=STORE_URLS)
def test_store_passwords_are_found_in_every_url_form(url: str, passwords: set[str]) -> None:
    assert set(passwords_of(url)) == passwords


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gateway_without_standard_error_serves(workers: int, tmp_path: Path) -> None:
    with BackendThread() as fake:
        config = tmp_path / "config.json"
        params = {"model": "vllm/tiny", "api_base": fake.url}
        store = {"url": f"sqlite://{tmp_path}/state.db"}
        config.write_text(
            json.dumps({"model_list": [{"model_name": "gpt-oss-test", "litellm_params": params}], "store": store})
        )
        command = f"exec {UNISONO} serve --port 0 --config {config} --workers {workers} 2>&-"
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
        try:
            gateway = RunningGateway(process)
            with send_chat(gateway.url) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert gateway.wait(within_s=TIMEOUT_S)[0] == 0
        finally:
            process.kill()
            process.communicate()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "name", "others"),
    [
        ("::", "127.0.0.1", ("127.0.0.1", "::1")),
        ("::0", "127.0.0.1", ("127.0.0.1", "::1")),
        ("0.0.0.0", "127.0.0.1", ("127.0.0.1",)),
        ("::1", "[::1]", ("::1",)),
        ("localhost", "localhost", ("127.0.0.1",)),
    ],
)
def test_the_printed_address_leads_to_the_listener(host: str, name: str, others: Sequence[str]) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener, host) == f"http://{name}:{port}"
        for address in (name.strip("[]"), *others):
            socket.create_connection((address, port), timeout=TIMEOUT_S).close()


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, error = run("serve", "--config", str(config), "--port", str(port))
    assert code == 1
    assert error == (
        f"Error: port {port} is in use on 127.0.0.1; another gateway may be running there. Choose another --port\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_metrics_port_in_use_is_a_clear_error(workers: int, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        config.write_text(
            "model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]\n"
            f"unisono: {{metrics_listen: '{address}'}}\nstore: {{url: 'sqlite:///{tmp_path}/state.db'}}\n"
        )
        code, error = run("serve", "--config", str(config), "--port", "0", "--workers", str(workers))
    assert code != 0
    assert f"unisono.metrics_listen: cannot listen on {address}: Address already in use; choose another" in error
    assert "Traceback" not in error


BAD_START: dict[str, tuple[str, Sequence[str], str]] = {
    "public address without a key": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]",
        ["--host", "0.0.0.0"],
        "Error: general_settings.master_key: not set, so anyone who can reach 0.0.0.0 could use your models. Set a "
        "key (`master_key: os.environ/UNISONO_MASTER_KEY`), or listen on 127.0.0.1\n",
    ),
    "address of another machine": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]\ngeneral_settings: {master_key: k}",
        ["--host", "192.0.2.1"],
        "Error: cannot listen on 192.0.2.1:0: ",
    ),
    "unknown key": (
        "model_lst: []",
        [],
        "Error: model_lst: unknown key `model_lst` (did you mean `model_list`?)\n",
    ),
    "unknown store scheme": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]\nstore: {url: 'postgres://u:p@x'}",
        [],
        "Error: store.url: `postgres` is not a supported URL scheme; use one of sqlite:///path",
    ),
    "unknown backend kind": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: vlm/gpt-oss}}]",
        [],
        "Error: model_list[0].litellm_params.model: `vlm` is not a backend kind of Unisono",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "arguments", "message"), BAD_START.values(), ids=BAD_START)
def test_a_failed_start_prints_a_one_line_error(
    text: str, arguments: Sequence[str], message: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    code, error = run("serve", "--config", str(config), "--port", "0", *arguments)
    assert code == 1
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_models_are_listed_without_contacting_backends(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: gpt-oss\n"
        "    litellm_params: {model: vllm/a, api_base: 'http://192.0.2.1'}\n"
        "    model_info: {id: big}\n"
        "  - {model_name: gpt-oss, litellm_params: {model: replay/demo}}\n"
        "router_settings: {model_group_alias: {gpt-4o: gpt-oss}}\n"
    )
    completed = subprocess.run([UNISONO, "models", "--config", str(config)], capture_output=True, text=True, check=True)
    assert [line.split() for line in completed.stdout.splitlines()] == [
        ["MODEL", "BACKEND", "KIND", "MODEL", "ON", "THE", "BACKEND"],
        ["gpt-oss", "big", "vllm", "a"],
        ["gpt-oss", "replay-1", "replay", "demo"],
        ["gpt-4o", "is", "an", "alias", "of", "gpt-oss"],
    ]


def test_the_version_is_printed() -> None:
    completed = subprocess.run([UNISONO, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"unisono, version \d+\.\d+\.\d+\n", completed.stdout)
