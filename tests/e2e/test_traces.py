"""Recordings of answers over real sockets: every shape is recorded and read again alike, and nobody else reads them."""

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

MANY = len(BY_NUMBER) + 10
AT_ONCE = 32
MALFORMED = ENCODING.encode_as_server(
    "<|channel|>analysis<|message|>Hm \x1b[31m.<|channel|>final<|message|>Hello <\u200b|<|return|>"
)
MENDED = "^ missing-end: A message began inside another; the first was closed."


def recorded(*deployments: str, **traces: Any) -> dict[str, Any]:
    config = config_of(*deployments, unisono={"traces": {"mode": "all", "keep": MANY, **traces}})
    for entry in config["model_list"]:
        entry["unisono"] = {"recoveries": {"regenerated-call": False}}
    return config


async def kept(running: Gateway, count: int, tenant: str = "local") -> tuple[StoredTrace, ...]:
    """The last recordings, once so many are there: they are written behind the answers."""
    store = store_of(running)
    for _ in range(500):
        if len(found := await store.traces(tenant, MANY)) >= count:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(found)} recordings")


def store_of(running: Gateway) -> Store:
    assert running.app is not None
    store: Store = running.app.state.gateway.store
    return store


async def document_of(running: Gateway, answer: Answer, tenant: str = "local") -> Document:
    for _ in range(500):
        if (found := await store_of(running).trace(tenant, answer.headers["x-request-id"])) is not None:
            return unpacked(found.document)
        await asyncio.sleep(0.01)
    raise AssertionError("no recording")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", ["ids", "text"])
async def test_every_shape_is_recorded_and_read_again_to_the_same(wire: str, stream: bool) -> None:
    fake = FakeVllm(script=vllm_script) if wire == "ids" else FakeMlxServer(script=mlx_script)
    kind = "vllm" if wire == "ids" else "mlx_server"
    async with fake, gateway(recorded(f"{kind}@{fake.url}")) as running:

        async def ask(number: int) -> Document:
            said = f"case #{number}#"
            answer = await running.chat(messages=[{"role": "user", "content": said}], tools=TOOL_FIELDS, stream=stream)
            return await document_of(running, answer)

        for first in range(0, len(BY_NUMBER), AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, len(BY_NUMBER)))
            for number, document in zip(numbers, await asyncio.gather(*map(ask, numbers)), strict=True):
                case = BY_NUMBER[number]
                rules = [one["repaired"] for one in document["said"] if "repaired" in one]
                # Text without special tokens does not show every fault.
                expected = case.rules if wire == "ids" or case.on_text else ()
                assert set(expected) <= set(rules), case.output
                assert document["recoveries"] == list(dict.fromkeys(rules))
                assert is_as_recorded(document, read_document(document)), case.output
                [prompt] = prompts_of(document)
                assert f"case #{number}#" in ENCODING.decode([token for token in prompt if token is not None])


# -- the command


async def test_the_command_shows_what_was_mended_and_where(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/state.db"
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = {**recorded(f"vllm@{fake.url}"), "store": {"url": store}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        async with gateway(config) as running:
            answer = await running.chat(messages=[{"role": "user", "content": "spell <|start|> \x1b[2J"}])
            await kept(running, 1)
    id = answer.headers["x-request-id"]
    shown = (await printed("trace", id, "--config", str(path))).stdout
    assert MENDED in shown
    assert "<|start|>user<|message|>spell \\<|start|> \\x1b[2J<|end|>" in shown
    assert "Hm \\x1b[31m." in shown
    assert not {letter for letter in shown if not letter.isprintable()} - {"\n"}
    assert id in (await printed("trace", "--config", str(path))).stdout
    replayed = await printed("trace", id, "--config", str(path), "--replay")
    assert replayed.stderr == "The same as recorded.\n"
    await check_files(tmp_path, (await printed("trace", id, "--config", str(path), "--json")).stdout)
    for arguments in ([f"{id}x"], [id, "--tenant", "ann"]):
        missing = await printed("trace", *arguments, "--config", str(path), code=1)
        assert "there is no recording" in missing.stderr


async def check_files(folder: Path, recording: str) -> None:
    """A recording in a file is read again like one in the store; other ones are told apart."""
    document = json.loads(recording)
    other: Mapping[str, tuple[Any, int]] = {
        "the same": (document, 0),
        "another repair": ({**document, "said": document["said"][1:]}, 1),
        "other tokens": ({**document, "output": document["output"][:-4]}, 1),
        "without its output": ({**document, "output": [], "left_out": ["output"]}, 2),
        "damaged": ({**document, "asked": {}}, 2),
        "of another version": ({**document, "version": 2}, 1),
        "none at all": ([], 1),
    }
    for name, (value, code) in other.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(value))
        await printed("trace", str(path), "--replay", code=code)
    told = json.loads(
        (await printed("trace", str(folder / "another repair.json"), "--replay", "--json", code=1)).stdout
    )
    assert told["same"] is False
    assert len(told["now"]) == len(told["recorded"]) + 1


async def printed(*arguments: str, code: int = 0) -> Result:
    result = await asyncio.to_thread(CliRunner().invoke, main, list(arguments))
    assert result.exit_code == code, result.output
    return result


# -- whose recordings are, and what is in them


async def test_a_recording_is_its_tenants_and_holds_no_key_or_header(tmp_path: Path) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = recorded(f"vllm@{fake.url}")
        config["model_list"][0]["litellm_params"]["api_key"] = "sk-of-the-backend"
        async with keyed(config, tmp_path) as (running, keys):
            record, key = await keys.issue("ann")
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            mine = await running.post("/v1/chat/completions", body, **bearing(key), x_of_mine="a header of mine")
            masters = await running.post("/v1/chat/completions", body, **bearing(MASTER))
            document = await document_of(running, mine, "ann")
            assert (document["tenant"], document["key"]) == ("ann", record.id)
            await document_of(running, masters, "default")
            for tenant, foreign in (("default", mine), ("ann", masters), ("", mine)):
                assert await store_of(running).trace(tenant, foreign.headers["x-request-id"]) is None
            for secret in (key, MASTER, "sk-of-the-backend", "a header of mine", fake.url):
                assert secret not in json.dumps(document)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(with_keys(config, f"sqlite://{tmp_path}/state.db")))
        id = mine.headers["x-request-id"]
        # The command is the operator's, who knows an id and need not know whose it is.
        everybodys = (await printed("trace", "--config", str(path))).stdout
        assert [line.split()[3] for line in everybodys.splitlines()] == ["default", "ann"]
        assert id in (await printed("trace", "--config", str(path), "--tenant", "ann")).stdout
        assert id not in (await printed("trace", "--config", str(path), "--tenant", "default")).stdout
        assert json.loads((await printed("trace", id, "--config", str(path), "--json")).stdout)["tenant"] == "ann"


MODES = {"off": 0, "recoveries": 1, "all": 2}


@pytest.mark.parametrize(("mode", "count"), MODES.items(), ids=MODES)
async def test_the_mode_says_what_is_recorded(mode: str, count: int) -> None:
    plain = ENCODING.encode_marked("<|channel|>final<|message|>Hi<|return|>")
    async with FakeVllm(tokens=MALFORMED) as bad, FakeVllm(tokens=plain) as good:
        config = recorded(f"vllm@{bad.url}", mode=mode)
        config["model_list"].append({**recorded(f"vllm@{good.url}")["model_list"][0], "model_name": "gpt-oss-good"})
        async with gateway(config) as running:
            for model in ("gpt-oss", "gpt-oss-good"):
                assert (await running.chat(model=model)).status == 200
            assert (await running.chat(model="gpt-oss-nowhere")).status == 404
            found = await kept(running, count)
            assert len(found) == count
            if count:
                await shows(running, f'unisono_traces_total{{outcome="kept"}} {count}.0')


async def test_every_choice_of_an_answer_has_a_recording() -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(recorded(f"vllm@{fake.url}")) as running:
        id = (await running.chat(n=2)).headers["x-request-id"]
        assert {one.id for one in await kept(running, 2)} == {id, f"{id}-1"}


async def test_every_response_of_a_socket_has_a_recording_that_the_command_finds(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/state.db"
    lanes = (None, "a", "b", "a", None)
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = {**recorded(f"vllm@{fake.url}"), "store": {"url": store}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        async with gateway(config) as running, connected(running) as client:
            for number, lane in enumerate(lanes, 1):
                # What is refused is none of them.
                await client.socket.send('{"type":"response.create","stream_id":"?"}')
                await client.send(input=f"This is number {number}.", **({"stream_id": lane} if lane else {}))
            ended = 0
            while ended < len(lanes):
                ended += (await client.event())["type"] == "response.completed"
            found = await kept(running, len(lanes))
            assert client.socket.response is not None
            first = client.socket.response.headers["x-request-id"]
    ids = [first, *(f"{first}.{number}" for number in range(2, len(lanes) + 1))]
    assert sorted(one.id for one in found) == sorted(ids)
    for number, id in enumerate(ids, 1):
        shown = (await printed("trace", id, "--config", str(path))).stdout
        assert f"<|start|>user<|message|>This is number {number}.<|end|>" in shown


RESPONSES: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "not stored": {"store": False},
    "in the background": {"background": True},
    "of a form": {"text": {"format": {"type": "json_object"}}},
}


@pytest.mark.parametrize("fields", RESPONSES.values(), ids=RESPONSES)
async def test_responses_are_recorded_and_read_again_to_the_same(fields: dict[str, Any]) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(recorded(f"vllm@{fake.url}")) as running:
        body = json.dumps({"model": "gpt-oss", "input": "Hi", **fields}).encode()
        answer = await running.post("/v1/responses", body)
        assert answer.status == 200
        document = await document_of(running, answer)
        assert (document["surface"], document["background"]) == ("responses", "background" in fields)
        assert is_as_recorded(document, read_document(document))


async def test_only_the_last_ones_are_kept() -> None:
    async with FakeVllm(tokens=MALFORMED) as fake, gateway(recorded(f"vllm@{fake.url}", keep=3)) as running:
        ids = [(await running.chat()).headers["x-request-id"] for _ in range(5)]
        for _ in range(500):
            if [one.id for one in await kept(running, 1)] == ids[:1:-1]:
                return
            await asyncio.sleep(0.01)
        pytest.fail("not the last ones")


@pytest.mark.slow
async def test_a_store_that_is_down_costs_no_answer(tmp_path: Path) -> None:
    async with FakeVllm(tokens=MALFORMED) as fake:
        config = {**recorded(f"vllm@{fake.url}"), "store": {"url": "redis://127.0.0.1:1/0"}}
        async with gateway(config) as running:
            answers = [await running.chat(stream=stream) for stream in (False, True)]
            assert [answer.status for answer in answers] == [200, 200]
            await shows(running, 'unisono_traces_total{outcome="failed"} 2.0')


async def shows(running: Gateway, line: str) -> None:
    """What is counted is counted behind the answers."""
    for _ in range(500):
        async with running.session.get(f"{running.url}/metrics") as response:
            if line in await response.text():
                return
        await asyncio.sleep(0.01)
    raise AssertionError(line)
