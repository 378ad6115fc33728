"""`unisono pull` against a hub on a real socket: download, resumption, checks and errors."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.hub import COMMIT, Hub, running_hub
from unisono_adapters import demo
from unisono_adapters.huggingface_download import SNAPSHOT_FILES

MODEL = "acme/gpt-oss-tiny"
# Bytes that the hub's library collects before it writes them to disk.
WRITE_BUFFER_BYTES = 10 * 1024 * 1024
WEIGHTS = os.urandom(2 * WRITE_BUFFER_BYTES)
CUT_AT = WRITE_BUFFER_BYTES + 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> str:
    """The demo model's tokenizer.json, which is that of gpt-oss."""
    return (demo.expand(demo.default_folder()) / "tokenizer.json").read_text()


@pytest.fixture
def hub(tokenizer: str) -> Iterator[Hub]:
    files = {
        "config.json": b"{}",
        "tokenizer.json": tokenizer.encode(),
        "model.safetensors": WEIGHTS,
        "original/model.bin": b"not for mlx-lm",
    }
    with running_hub(MODEL, files) as running:
        yield running


def start(hub_url: str, home: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    # Without HF_XET, as on every hub that is not Hugging Face's own, downloads are plain HTTP.
    environment = {**os.environ, "HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.Popen(
        [Path(sys.executable).parent / "unisono", "pull", *arguments],
        env={**environment, "NO_PROXY": "*", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(hub_url: str, home: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    process = start(hub_url, home, *arguments, **variables)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_the_engine_finds_a_pulled_model(hub: Hub, tmp_path: Path) -> None:
    code, output, errors = run(hub.url, tmp_path, MODEL)
    assert code == 0, errors
    folder = Path(output.partition(" (")[0])
    assert folder.name == COMMIT
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / "original").exists()
    assert "litellm_params: {model: mlx/acme/gpt-oss-tiny}" in output
    # A second process finds the snapshot without the network, with the patterns that the engine process uses.
    find = (
        "from huggingface_hub import snapshot_download as find\n"
        f"print(find({MODEL!r}, local_files_only=True, allow_patterns={list(SNAPSHOT_FILES)!r}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", find], env={**os.environ, "HF_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()) == folder, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "interruption",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.slow)],
)
def test_an_interrupted_download_continues_from_the_bytes_on_disk(
    hub: Hub, tmp_path: Path, interruption: signal.Signals
) -> None:
    hub.cut_at = CUT_AT
    process = start(hub.url, tmp_path, MODEL)
    wait_for(lambda: [file.stat().st_size for file in tmp_path.rglob("*.unisono-partial")] == [WRITE_BUFFER_BYTES])
    process.send_signal(interruption)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in errors
    hub.cut_at = None
    hub.ranges.clear()
    code, output, errors = run(hub.url, tmp_path, MODEL)
    assert code == 0, errors
    assert (Path(output.partition(" (")[0]) / "model.safetensors").read_bytes() == WEIGHTS
    [requested_range] = [range_header for file, range_header in hub.ranges if file == "model.safetensors"]
    assert int(requested_range.removeprefix("bytes=").partition("-")[0]) == WRITE_BUFFER_BYTES


@pytest.mark.slow
def test_the_progress_is_shown_on_a_terminal(hub: Hub, tmp_path: Path) -> None:
    code, _, errors = run(hub.url, tmp_path, MODEL, TQDM_POSITION="-1")
    assert code == 0
    assert "100%" in errors


@pytest.mark.slow
def test_damaged_weights_are_refused_and_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    damaged = b"x" + WEIGHTS[1:]
    hub.contents = {"model.safetensors": damaged}
    code, _, errors = run(hub.url, tmp_path, MODEL)
    assert code == 1
    assert "model.safetensors was damaged" in errors
    hub.contents = {}
    code, output, _ = run(hub.url, tmp_path, MODEL)
    assert code == 0
    assert (Path(output.partition(" (")[0]) / "model.safetensors").read_bytes() == WEIGHTS


def changed(tokenizer: str, spelling: str, replacement: str) -> bytes:
    document = json.loads(tokenizer)
    for token in document["added_tokens"]:
        if token["content"] == spelling:
            token["content"] = replacement
    return json.dumps(document).encode()


@pytest.mark.slow
def test_a_model_with_another_tokenizer_is_refused(hub: Hub, tokenizer: str, tmp_path: Path) -> None:
    hub.files = {**hub.files, "tokenizer.json": changed(tokenizer, "<|call|>", "<|tool|>")}
    code, _, errors = run(hub.url, tmp_path, MODEL)
    assert code == 1
    assert "this is not a gpt-oss model" in errors
    assert "<|call|> has the id None instead of 200012" in errors


REFUSED = {
    "unknown model": ("acme/none", (), "the hub has no model acme/none, or it is private"),
    "unknown revision": (MODEL, ("--revision", "v9"), "acme/gpt-oss-tiny has no revision 'v9'"),
    "invalid model name": (
        "not a name",
        (),
        "'not a name' is neither a folder nor a model name of the form `owner/name`",
    ),
}


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name != "unknown model"))
        for name, case in REFUSED.items()
    ],
)
def test_an_unavailable_model_is_refused_with_the_reason(
    hub: Hub, tmp_path: Path, model: str, options: tuple[str, ...], reason: str
) -> None:
    code, output, errors = run(hub.url, tmp_path, model, *options)
    assert (code, output) == (1, "")
    assert reason in errors
    assert "Traceback" not in errors


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("content", [b"{", b"{}", None], ids=["not JSON", "no tokenizer", "no file"])
def test_a_folder_with_a_broken_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    code, _, errors = run("http://127.0.0.1:9", tmp_path, str(tmp_path))
    assert code == 1
    assert "Traceback" not in errors
    assert "tokenizer.json" in errors


@pytest.mark.slow
def test_an_unreachable_hub_is_a_one_line_error(tmp_path: Path) -> None:
    code, _, errors = run("http://127.0.0.1:9", tmp_path, MODEL)
    assert code == 1
    assert "the hub cannot be reached" in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_checksum_that_is_a_path_writes_nothing_outside_of_the_cache(hub: Hub, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    hub.checksums = {"model.safetensors": str(outside / hashlib.sha256(WEIGHTS).hexdigest())}
    code, output, errors = run(hub.url, tmp_path / "home", MODEL)
    assert (code, output) == (1, "")
    assert "the hub's checksum of 'model.safetensors' is not a SHA-256" in errors
    assert not outside.exists()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["../../../outside.json", "{root}/outside.json"])
def test_a_file_name_that_leaves_the_snapshot_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.files = {**hub.files, name.format(root=tmp_path): b"{}"}
    code, output, errors = run(hub.url, tmp_path / "home", MODEL)
    assert (code, output) == (1, "")
    assert "Traceback" not in errors
    assert not list(tmp_path.rglob("outside.json"))


@pytest.mark.slow
@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("more", [b"more", os.urandom(WRITE_BUFFER_BYTES)], ids=["a few bytes", "many bytes"])
def test_more_bytes_than_the_file_has_are_refused(hub: Hub, tmp_path: Path, more: bytes) -> None:
    hub.contents = {"model.safetensors": WEIGHTS + more}
    code, _, errors = run(hub.url, tmp_path, MODEL)
    assert code == 1
    assert "the hub sent more bytes than the file's size" in errors
    [partial] = tmp_path.rglob("*.unisono-partial")
    assert partial.stat().st_size <= len(WEIGHTS)
    hub.contents = {}
    code, output, errors = run(hub.url, tmp_path, MODEL)
    assert code == 0, errors
    assert (Path(output.partition(" (")[0]) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_a_truncated_file_of_the_cache_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    blob = blob_of(tmp_path)
    blob.write_bytes(WEIGHTS[:1000])
    partial = blob.with_name(f"{blob.name}.unisono-partial")
    partial.write_bytes(WEIGHTS + b"more")
    code, output, errors = run(hub.url, tmp_path, MODEL)
    assert code == 0, errors
    assert (Path(output.partition(" (")[0]) / "model.safetensors").read_bytes() == WEIGHTS
    assert not partial.exists()


@pytest.mark.slow
def test_a_symbolic_link_is_not_written_through(hub: Hub, tmp_path: Path) -> None:
    blob, outside = blob_of(tmp_path), tmp_path / "outside"
    outside.write_bytes(b"mine")
    blob.with_name(f"{blob.name}.unisono-partial").symlink_to(outside)
    code, _, errors = run(hub.url, tmp_path, MODEL)
    assert code == 1
    assert "Traceback" not in errors
    assert outside.read_bytes() == b"mine"


def blob_of(home: Path) -> Path:
    """Create the cache folder of the weights and return their path in it."""
    folder = home / "hub" / f"models--{MODEL.replace('/', '--')}" / "blobs"
    folder.mkdir(parents=True)
    return folder / hashlib.sha256(WEIGHTS).hexdigest()


@pytest.mark.slow
def test_a_deeply_nested_file_list_is_a_one_line_error(hub: Hub, tmp_path: Path) -> None:
    hub.listing = b"[" * 1_000_000
    code, output, errors = run(hub.url, tmp_path, MODEL)
    assert (code, output) == (1, "")
    assert "the hub returned an invalid list of files" in errors
    assert len(errors.strip().splitlines()) == 1
