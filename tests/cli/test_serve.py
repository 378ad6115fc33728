"""`unisono serve` as its users meet it: a process, a screen, a port, signals."""

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
from unisono.cli.serve import is_loopback
from unisono.harmony.encoding import load_encoding
from unisono.observe.redaction import passwords_of
from unisono.server.startup_screen import curl_line

UNISONO = str(Path(sys.executable).with_name("unisono"))
KEY = "sk-planted-canary"
ANSWER = "<|channel|>final<|message|>" + "word " * 40 + "<|return|>"
PATIENCE_S = 30.0


class Wire:
    """A scripted vLLM on a thread of its own, for a gateway in another process."""

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


class Served:
    """A running `unisono serve`; `screen` is what it printed until it was ready."""

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
        assert found, f"it did not start: {self.screen} {process.stderr.read() if process.stderr else ''}"
        self.url = found[1]

    def ended(self, *, within_s: float) -> tuple[int, str, str]:
        """Exit code, what was printed after the screen, and the log."""
        out, log = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, log


@contextmanager
def serving(tmp_path: Path, url: str, *arguments: str, api_key: str | None = None, **sections: Any) -> Iterator[Served]:
    config = tmp_path / "config.json"
    params = {"model": "vllm/tiny", "api_base": url, "api_key": api_key}
    model = {"model_name": "gpt-oss-test", "litellm_params": params}
    config.write_text(json.dumps({"model_list": [model], **sections}))
    command = [UNISONO, "serve", "--port", "0", "--config", str(config), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Served(process)
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and stderr of a command that ends by itself."""
    done = subprocess.run(
        [UNISONO, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | (environ or {})
    )
    return done.returncode, done.stderr


def ask(url: str, *, stream: bool = False) -> Any:
    body = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    return urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=PATIENCE_S)


@pytest.mark.slow
def test_the_line_on_the_screen_works(tmp_path: Path) -> None:
    with Wire() as fake, serving(tmp_path, fake.url) as served:
        assert "gpt-oss-test" in served.screen
        assert "vllm-1: ready" in served.screen
        (line,) = [line for line in served.lines if line.strip().startswith("curl ")]
        answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"].startswith("word word")


@pytest.mark.slow
def test_the_line_on_the_screen_works_with_a_key_that_is_not_on_it(tmp_path: Path) -> None:
    general = {"master_key": KEY}
    with Wire() as fake, serving(tmp_path, fake.url, general_settings=general) as served:
        assert KEY not in served.screen
        (line,) = [line for line in served.lines if line.strip().startswith("curl ")]
        environ = os.environ | {"UNISONO_MASTER_KEY": KEY}
        answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, env=environ)
        assert json.loads(answer.stdout)["model"] == "gpt-oss-test"


@pytest.mark.engine
def test_without_a_configuration_something_answers() -> None:
    command = [UNISONO, "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        served = Served(process)
        assert served.screen.startswith("No configuration given")
        (line,) = [line for line in served.lines if line.strip().startswith("curl ")]
        answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=120)
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        assert served.ended(within_s=PATIENCE_S)[0] == 0
    finally:
        process.kill()
        process.communicate()


def test_a_model_name_with_quotes_still_makes_one_command() -> None:
    name = """it's "mine" $HOME `id`"""
    *_, body = shlex.split(curl_line("http://x", name, keyed=False))
    assert json.loads(body)["model"] == name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_it_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    with Wire() as fake, serving(tmp_path, fake.url) as served:
        ask(served.url).read()
        served.process.send_signal(number)
        code, out, log = served.ended(within_s=PATIENCE_S)
    assert (code, out.strip()) == (0, "Stopped.")
    assert "Traceback" not in log


WORKERS = pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])


@contextmanager
def starting(tmp_path: Path, workers: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that waits for its configuration, and the pipe to write it to."""
    config = tmp_path / "config.json"
    os.mkfifo(config)
    command = [UNISONO, "serve", "--port", "0", "--config", str(config), "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # Opened as soon as the process opens its end.
        pipe = os.open(config, os.O_WRONLY)
        config.unlink()
        yield process, pipe
    finally:
        process.kill()
        process.communicate()


@WORKERS
def test_sigterm_ends_a_start(workers: int, tmp_path: Path) -> None:
    with starting(tmp_path, workers) as (process, pipe):
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE_S) == ("", "")
        assert process.returncode == 0
        os.close(pipe)


@WORKERS
def test_a_configuration_that_changes_during_a_start_is_read_again(workers: int, tmp_path: Path) -> None:
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
        served = Served(process)
        until = time.monotonic() + PATIENCE_S
        while b"gpt-oss-second" not in urlopen(f"{served.url}/v1/models", timeout=PATIENCE_S).read():
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.slow
def test_a_running_answer_finishes_before_the_end(tmp_path: Path) -> None:
    with Wire(delay_s=0.03) as fake, serving(tmp_path, fake.url) as served:
        stream = ask(served.url, stream=True)
        stream.readline()
        served.process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert served.ended(within_s=PATIENCE_S)[0] == 0


@pytest.mark.slow
def test_the_end_is_bounded_whatever_still_runs(tmp_path: Path) -> None:
    settings = {"shutdown_grace_s": 1}
    with Wire(delay_s=10.0) as fake, serving(tmp_path, fake.url, unisono=settings) as served:
        threading.Thread(target=_drained, args=(served.url,), daemon=True).start()
        while not fake.requests:
            time.sleep(0.01)
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        code, _, _ = served.ended(within_s=PATIENCE_S)
    assert code == 0
    assert time.monotonic() - began < 6


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with Wire(delay_s=10.0) as fake, serving(tmp_path, fake.url) as served:
        threading.Thread(target=_drained, args=(served.url,), daemon=True).start()
        while not fake.requests:
            time.sleep(0.01)
        began = time.monotonic()
        for _ in range(2):
            served.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        code, _, _ = served.ended(within_s=PATIENCE_S)
    assert code == 0
    assert time.monotonic() - began < 10


def _drained(url: str) -> None:
    try:
        ask(url, stream=True).read()
    except OSError:
        return


@pytest.mark.slow
def test_no_secret_and_no_prompt_reaches_the_log(tmp_path: Path) -> None:
    sections = {"general_settings": {"master_key": KEY}, "unisono": {"log_level": "debug"}}
    other = "sk-backend-canary"
    with Wire(api_key=other) as fake, serving(tmp_path, fake.url, api_key=other, **sections) as served:
        ask(served.url).read()
        fake.api_key = "sk-changed-canary"
        broken = b'{"model": "gpt-oss-test", "messages": [{"role": "user", "content": "prompt-canary"}]}'
        for content, key in ((b"{", KEY), (broken, KEY), (broken[:40], KEY), (b"{}", "sk-wrong-canary")):
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            with pytest.raises(OSError, match=r"HTTP Error [45]"):
                urlopen(Request(f"{served.url}/v1/chat/completions", content, headers), timeout=PATIENCE_S)
        served.process.send_signal(signal.SIGTERM)
        _, out, log = served.ended(within_s=PATIENCE_S)
    for text in (served.screen, out, log):
        assert "canary" not in text
    lines = [json.loads(line) for line in log.splitlines()]
    assert "backend failed" in [line["message"] for line in lines]


@pytest.mark.slow
def test_the_configured_limits_of_connections_are_in_force(tmp_path: Path) -> None:
    settings = {"header_timeout_s": 0.3, "max_connections": 20}
    with Wire() as fake, serving(tmp_path, fake.url, unisono=settings) as served:
        port = int(served.url.rpartition(":")[2])
        with ExitStack() as held:
            slow = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(25)]
            slow[0].sendall(b"GET / HTTP/1.1\r\nhost: x")
            with pytest.raises(OSError, match="HTTP Error 503"):
                ask(served.url)
            for connection in slow:
                connection.settimeout(5)
                assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
            assert ask(served.url).status == 200


@pytest.mark.slow
def test_unused_keys_are_warned_of_at_start(tmp_path: Path) -> None:
    settings = {"trust_proxy_headers": "canary"}
    with Wire() as fake, serving(tmp_path, fake.url, unisono=settings) as served:
        served.process.send_signal(signal.SIGTERM)
        _, _, log = served.ended(within_s=PATIENCE_S)
    warnings = [json.loads(line) for line in log.splitlines()]
    told = [w["message"] for w in warnings if w["logger"] == "unisono.config"]
    assert told == ["unisono.trust_proxy_headers: this setting is reserved and has no effect in this version"]
    assert "canary" not in log


@pytest.mark.slow
def test_without_its_store_it_serves_what_needs_none_and_says_so_without_the_password(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    address = f"redis://user:planted%2Dcanary@127.0.0.1:{port}/0"
    with Wire() as fake, serving(tmp_path, fake.url, store={"url": address}) as served:
        assert ask(served.url).status == 200
        served.process.send_signal(signal.SIGTERM)
        code, _, log = served.ended(within_s=PATIENCE_S)
    assert code == 0
    (said,) = [json.loads(line) for line in log.splitlines() if '"unisono.store"' in line]
    assert (said["level"], said["reason"]) == ("error", "the store cannot be reached")
    assert "canary" not in log + served.screen


@pytest.mark.slow
def test_a_folder_nobody_can_write_to_does_not_keep_it_from_serving(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch, Wire() as fake:
        patch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
        with serving(tmp_path, fake.url) as served:
            assert ask(served.url).status == 200
            served.process.send_signal(signal.SIGTERM)
            _, _, log = served.ended(within_s=PATIENCE_S)
    (said,) = [json.loads(line) for line in log.splitlines() if '"unisono.store"' in line]
    assert said["level"] == "warning"
    assert f"{tmp_path}/file/unisono/state.db cannot be used" in said["message"]
    assert "state is stored in memory only" in said["message"]


SECRETS: dict[str, tuple[str, set[str]]] = {
    "in its place": ("redis://user:p%40ss-word@host/0", {"p%40ss-word", "p@ss-word"}),
    "without a user": ("redis://:secret@host", {"secret"}),
    "with a colon": ("redis://:sec:ret@host", {"sec:ret"}),
    "for several hosts": ("redis+sentinel://:secret@a,b/name", {"secret"}),
    "as an option": ("redis://host?db=1&password=sec%20ret", {"sec%20ret", "sec ret"}),
    "none": ("sqlite:///var/lib/state.db", set()),
}


@pytest.mark.parametrize(("url", "passwords"), SECRETS.values(), ids=SECRETS)
def test_the_password_of_a_store_is_found_wherever_it_stands(url: str, passwords: set[str]) -> None:
    assert set(passwords_of(url)) == passwords


@pytest.mark.slow
def test_a_port_in_use_is_said_plainly(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run("serve", "--config", str(config), "--port", str(port))
    assert code == 1
    assert said == (
        f"Error: port {port} is in use on 127.0.0.1; another gateway may be running there. Choose another --port\n"
    )


BAD_START: dict[str, tuple[str, Sequence[str], str]] = {
    "open to everybody without a key": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]",
        ["--host", "0.0.0.0"],
        "Error: general_settings.master_key: not set, so everyone who can reach 0.0.0.0 could use your models. Set a "
        "key (`master_key: os.environ/UNISONO_MASTER_KEY`), or listen on 127.0.0.1\n",
    ),
    "an address that is not ours": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]\ngeneral_settings: {master_key: k}",
        ["--host", "192.0.2.1"],
        "Error: cannot listen on 192.0.2.1:0: ",
    ),
    "a mistake in the configuration": (
        "model_lst: []",
        [],
        "Error: model_lst: unknown key `model_lst` (did you mean `model_list`?)\n",
    ),
    "a store that is none": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: replay/demo}}]\nstore: {url: 'postgres://u:p@x'}",
        [],
        "Error: store.url: unknown scheme; use redis://, redis+sentinel:// or redis+cluster://\n",
    ),
    "a backend that does not exist": (
        "model_list: [{model_name: gpt-oss, litellm_params: {model: vlm/gpt-oss}}]",
        [],
        "Error: model_list[0].litellm_params.model: `vlm` is not a backend kind of Unisono",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "arguments", "said"), BAD_START.values(), ids=BAD_START)
def test_what_cannot_start_ends_with_one_sentence(
    text: str, arguments: Sequence[str], said: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    code, error = run("serve", "--config", str(config), "--port", "0", *arguments)
    assert code == 1
    assert error.startswith(said)
    assert error.count("\n") == 1


LOOPBACK = {"127.0.0.1": True, "127.9.9.9": True, "::1": True, "localhost": True}
REACHABLE = {
    "0.0.0.0": False,
    "::": False,
    "10.0.0.1": False,
    "example.com": False,
    "localhost.example": False,
    "": False,
}


@pytest.mark.parametrize(("host", "loopback"), (LOOPBACK | REACHABLE).items())
def test_which_addresses_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_models_of_a_configuration_are_listed_without_asking_anyone(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: gpt-oss\n"
        "    litellm_params: {model: vllm/a, api_base: 'http://192.0.2.1'}\n"
        "    model_info: {id: big}\n"
        "  - {model_name: gpt-oss, litellm_params: {model: replay/demo}}\n"
        "router_settings: {model_group_alias: {gpt-4o: gpt-oss}}\n"
    )
    done = subprocess.run([UNISONO, "models", "--config", str(config)], capture_output=True, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["MODEL", "BACKEND", "KIND", "MODEL", "ON", "THE", "BACKEND"],
        ["gpt-oss", "big", "vllm", "a"],
        ["gpt-oss", "replay-1", "replay", "demo"],
        ["gpt-4o", "is", "an", "alias", "of", "gpt-oss"],
    ]


def test_the_version_is_told() -> None:
    done = subprocess.run([UNISONO, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"unisono, version \d+\.\d+\.\d+\n", done.stdout)
