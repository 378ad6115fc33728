"""Recordings of answers: every case is recorded, replays identically and stays private."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.keyed import MASTER, bearing, keyed, with_keys
from tests.e2e.test_recoveries import BY_NUMBER, ENCODING, TOOL_FIELDS, mlx_script, vllm_script
from tests.e2e.test_responses_websocket import connected
from tests.fakes import FakeMlxServer, FakeVllm
from unisono.cli import main
from unisono.cli.trace import is_as_recorded, read_document
from unisono.core.recordings import StoredTrace
from unisono.core.state_store import Store
from unisono.observe.recording import Document, prompts_of, unpacked

pytestmark = pytest.mark.timeout(120)

MAX_RECORDINGS = len(BY_NUMBER) + 10
CONCURRENCY = 32
MALFORMED = ENCODING.encode_as_server(
    "<|channel|>analysis<|message|>Hm \x1b[31m.<|channel|>final<|message|>Hello <\u200b|<|return|>"
)
RECOVERY_LINE = "^ missing-end: A message began before the previous message ended; the previous message was closed."


def config_with_recording(*deployments: str, **traces: Any) -> dict[str, Any]:
    config = config_of(*deployments, unisono={"traces": {"mode": "all", "keep": MAX_RECORDINGS, **traces}})
    for entry in config["model_list"]:
        rules = ("regenerated-call", "dangling-preamble", "undeclared-tool")
        entry["unisono"] = {"recoveries": dict.fromkeys(rules, False)}
    return config


async def recordings_of(running: Gateway, count: int, tenant: str = "local") -> tuple[StoredTrace, ...]:
    """Return the recordings once there are `count`; they are written after the answers."""
    store = store_of(running)
    for _ in range(500):
        if len(recordings := await store.traces(tenant, MAX_RECORDINGS)) >= count:
            return recordings
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(recordings)} recordings")


def store_of(running: Gateway) -> Store:
    assert running.app is not None
    store: Store = running.app.state.gateway.store
    return store


async def document_of(running: Gateway, response: Answer, tenant: str = "local") -> Document:
    for _ in range(500):
        if (recording := await store_of(running).trace(tenant, response.headers["x-request-id"])) is not None:
            return unpacked(recording.document)
        await asyncio.sleep(0.01)
    raise AssertionError("no recording")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", ["ids", "text"])
async def test_every_recovery_case_is_recorded_and_replays_identically(wire: str, stream: bool) -> None:
    fake = FakeVllm(script=vllm_script) if wire == "ids" else FakeMlxServer(script=mlx_script)
    kind = "vllm" if wire == "ids" else "mlx_server"
    async with fake, gateway(config_with_recording(f"{kind}@{fake.url}")) as running:

        async def ask(number: int) -> Document:
            prompt_text = f"case #{number}#"
            response = await running.chat(
                messages=[{"role": "user", "content": prompt_text}], tools=TOOL_FIELDS, stream=stream
            )
            return await document_of(running, response)

        for first in range(0, len(BY_NUMBER), CONCURRENCY):
            numbers = range(first, min(first + CONCURRENCY, len(BY_NUMBER)))
            for number, document in zip(numbers, await asyncio.gather(*map(ask, numbers)), strict=True):
                case = BY_NUMBER[number]
                rules = [entry["repaired"] for entry in document["said"] if "repaired" in entry]
                # Without special tokens, a text backend cannot show every fault.
                expected = case.rules if wire == "ids" or case.on_text else ()
                assert set(expected) <= set(rules), case.output
                assert document["recoveries"] == list(dict.fromkeys(rules))
                assert is_as_recorded(document, read_document(document)), case.output
                [prompt] = prompts_of(document)
                assert f"case #{number}#" in ENCODING.decode([token for token in prompt if token is not None])


# The command


async def test_the_command_shows_recoveries_and_their_position(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/state.db"
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = {**config_with_recording(f"vllm@{fake.url}"), "store": {"url": store}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        async with gateway(config) as running:
            response = await running.chat(messages=[{"role": "user", "content": "spell <|start|> \x1b[2J"}])
            await recordings_of(running, 1)
    id = response.headers["x-request-id"]
    output = (await run_command("trace", id, "--config", str(path))).stdout
    assert RECOVERY_LINE in output
    assert "<|start|>user<|message|>spell \\<|start|> \\x1b[2J<|end|>" in output
    assert "Hm \\x1b[31m." in output
    assert not {letter for letter in output if not letter.isprintable()} - {"\n"}
    assert id in (await run_command("trace", "--config", str(path))).stdout
    replayed = await run_command("trace", id, "--config", str(path), "--replay")
    assert replayed.stderr == "The same as recorded.\n"
    await check_recording_files(tmp_path, (await run_command("trace", id, "--config", str(path), "--json")).stdout)
    for arguments in ([f"{id}x"], [id, "--tenant", "ann"]):
        missing = await run_command("trace", *arguments, "--config", str(path), code=1)
        assert "there is no recording" in missing.stderr


async def check_recording_files(folder: Path, recording: str) -> None:
    """Check that a recording in a file replays, and that changed ones are detected."""
    document = json.loads(recording)
    files: Mapping[str, tuple[Any, int]] = {
        "unchanged": (document, 0),
        "missing repair": ({**document, "said": document["said"][1:]}, 1),
        "missing tokens": ({**document, "output": document["output"][:-4]}, 1),
        "without output": ({**document, "output": [], "left_out": ["output"]}, 2),
        "damaged": ({**document, "asked": {}}, 2),
        "other version": ({**document, "version": 2}, 1),
        "not a recording": ([], 1),
    }
    for name, (value, code) in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(value))
        await run_command("trace", str(path), "--replay", code=code)
    report = json.loads(
        (await run_command("trace", str(folder / "missing repair.json"), "--replay", "--json", code=1)).stdout
    )
    assert report["same"] is False
    assert len(report["now"]) == len(report["recorded"]) + 1


async def run_command(*arguments: str, code: int = 0) -> Result:
    result = await asyncio.to_thread(CliRunner().invoke, main, list(arguments))
    assert result.exit_code == code, result.output
    return result


# Owners and content of recordings


async def test_a_recording_belongs_to_its_tenant_and_contains_no_keys_or_headers(tmp_path: Path) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = config_with_recording(f"vllm@{fake.url}")
        config["model_list"][0]["litellm_params"]["api_key"] = "sk-of-the-backend"
        async with keyed(config, tmp_path) as (running, keys):
            record, key = await keys.issue("ann")
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            tenant_response = await running.post(
                "/v1/chat/completions", body, **bearing(key), x_of_mine="a header of mine"
            )
            master_response = await running.post("/v1/chat/completions", body, **bearing(MASTER))
            document = await document_of(running, tenant_response, "ann")
            assert (document["tenant"], document["key"]) == ("ann", record.id)
            await document_of(running, master_response, "default")
            for tenant, response in (("default", tenant_response), ("ann", master_response), ("", tenant_response)):
                assert await store_of(running).trace(tenant, response.headers["x-request-id"]) is None
            for secret in (key, MASTER, "sk-of-the-backend", "a header of mine", fake.url):
                assert secret not in json.dumps(document)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(with_keys(config, f"sqlite://{tmp_path}/state.db")))
        id = tenant_response.headers["x-request-id"]
        # The command is the operator's, who needs to know only the id.
        listing = (await run_command("trace", "--config", str(path))).stdout
        assert [line.split()[3] for line in listing.splitlines()] == ["default", "ann"]
        assert id in (await run_command("trace", "--config", str(path), "--tenant", "ann")).stdout
        assert id not in (await run_command("trace", "--config", str(path), "--tenant", "default")).stdout
        assert json.loads((await run_command("trace", id, "--config", str(path), "--json")).stdout)["tenant"] == "ann"


MODES = {"off": 0, "recoveries": 1, "all": 2}


@pytest.mark.parametrize(("mode", "count"), MODES.items(), ids=MODES)
async def test_the_mode_selects_which_answers_are_recorded(mode: str, count: int) -> None:
    plain = ENCODING.encode_marked("<|channel|>final<|message|>Hi<|return|>")
    async with FakeVllm(tokens=MALFORMED) as bad, FakeVllm(tokens=plain) as good:
        config = config_with_recording(f"vllm@{bad.url}", mode=mode)
        config["model_list"].append(
            {**config_with_recording(f"vllm@{good.url}")["model_list"][0], "model_name": "gpt-oss-good"}
        )
        async with gateway(config) as running:
            for model in ("gpt-oss", "gpt-oss-good"):
                assert (await running.chat(model=model)).status == 200
            assert (await running.chat(model="gpt-oss-nowhere")).status == 404
            recordings = await recordings_of(running, count)
            assert len(recordings) == count
            if count:
                await until_metrics_contain(running, f'unisono_traces_total{{outcome="kept"}} {count}.0')


async def test_every_choice_has_a_recording() -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(config_with_recording(f"vllm@{fake.url}")) as running:
        id = (await running.chat(n=2)).headers["x-request-id"]
        assert {recording.id for recording in await recordings_of(running, 2)} == {id, f"{id}-1"}


async def test_every_response_of_a_websocket_has_a_recording(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/state.db"
    lanes = (None, "a", "b", "a", None)
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = {**config_with_recording(f"vllm@{fake.url}"), "store": {"url": store}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        async with gateway(config) as running, connected(running) as client:
            for number, lane in enumerate(lanes, 1):
                # A rejected request has no recording.
                await client.socket.send('{"type":"response.create","stream_id":"?"}')
                await client.send(input=f"This is number {number}.", **({"stream_id": lane} if lane else {}))
            completed = 0
            while completed < len(lanes):
                completed += (await client.event())["type"] == "response.completed"
            recordings = await recordings_of(running, len(lanes))
            assert client.socket.response is not None
            first = client.socket.response.headers["x-request-id"]
    ids = [first, *(f"{first}.{number}" for number in range(2, len(lanes) + 1))]
    assert sorted(recording.id for recording in recordings) == sorted(ids)
    for number, id in enumerate(ids, 1):
        output = (await run_command("trace", id, "--config", str(path))).stdout
        assert f"<|start|>user<|message|>This is number {number}.<|end|>" in output


RESPONSES: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "not stored": {"store": False},
    "background": {"background": True},
    "JSON object": {"text": {"format": {"type": "json_object"}}},
}


@pytest.mark.parametrize("fields", RESPONSES.values(), ids=RESPONSES)
async def test_responses_are_recorded_and_replay_identically(fields: dict[str, Any]) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(config_with_recording(f"vllm@{fake.url}")) as running:
        body = json.dumps({"model": "gpt-oss", "input": "Hi", **fields}).encode()
        response = await running.post("/v1/responses", body)
        assert response.status == 200
        document = await document_of(running, response)
        assert (document["surface"], document["background"]) == ("responses", "background" in fields)
        assert is_as_recorded(document, read_document(document))


async def test_only_the_latest_recordings_are_kept() -> None:
    async with (
        FakeVllm(tokens=MALFORMED) as fake,
        gateway(config_with_recording(f"vllm@{fake.url}", keep=3)) as running,
    ):
        ids = [(await running.chat()).headers["x-request-id"] for _ in range(5)]
        for _ in range(500):
            if [recording.id for recording in await recordings_of(running, 1)] == ids[:1:-1]:
                return
            await asyncio.sleep(0.01)
        pytest.fail("other recordings than the latest three")


@pytest.mark.slow
async def test_a_store_outage_fails_no_answer(tmp_path: Path) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = {**config_with_recording(f"vllm@{fake.url}"), "store": {"url": "redis://127.0.0.1:1/0"}}
        async with gateway(config) as running:
            responses = [await running.chat(stream=stream) for stream in (False, True)]
            assert [response.status for response in responses] == [200, 200]
            await until_metrics_contain(running, 'unisono_traces_total{outcome="failed"} 2.0')


async def until_metrics_contain(running: Gateway, line: str) -> None:
    """Wait until the metrics contain a line; they are updated after the answers."""
    for _ in range(500):
        async with running.session.get(f"{running.url}/metrics") as response:
            if line in await response.text():
                return
        await asyncio.sleep(0.01)
    raise AssertionError(line)
