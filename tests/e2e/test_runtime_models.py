"""Models that are added, changed, drained and removed at run time, over two gateway processes on both stores."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from tests.contract.servers import Server
from tests.e2e.administered import ANSWER, ENCODING
from tests.e2e.gateway import config_of
from tests.e2e.keyed import MASTER, with_keys
from tests.e2e.replicas import Client, Replica
from tests.fakes import FakeVllm, VllmScript, hold_at
from unisono.cli import main

pytestmark = pytest.mark.asyncio(loop_scope="module")
AUTH = {"authorization": f"Bearer {MASTER}"}
SECRET = "sk-backend-secret-0123456789"
# Generous: the gateways follow within a second, but the machine may be busy.
FOLLOW_TIMEOUT_S = 20.0
RUNNING = ("queued", "in_progress")
# case: (end of the id of the deployment that changes, its state after the change; empty if the deployment is deleted)
CHANGED = {"drain": ("", "drained"), "delete": ("", ""), "another": ("-2", "ready")}


@dataclass
class Replicas:
    """Two gateway processes on one store, with one deployment in the file."""

    processes: list[Replica]
    session: aiohttp.ClientSession
    store: str
    fake: FakeVllm
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def client(self, index: int) -> Client:
        return Client(self.processes[index].url, self.session)

    async def asks(self, method: str, path: str, index: int = 0, **body: Any) -> tuple[int, Any]:
        return await self.client(index).asks(method, path, body if method != "GET" else None, **AUTH)

    async def made(self, path: str, index: int = 0, **body: Any) -> Any:
        status, answer = await self.asks("POST", path, index, **body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, **body: Any) -> tuple[int, str, str]:
        status, answer = await self.asks("POST", path, **body)
        assert status >= 400, answer
        return status, answer["error"]["param"], answer["error"]["message"]

    async def info(self, id: str, index: int = 0) -> Any:
        _, listed = await self.asks("GET", f"/model/info?litellm_model_id={id}", index)
        return next(iter(listed["data"]), None)

    async def state(self, id: str, index: int = 0) -> str:
        found = await self.info(id, index)
        return "" if found is None else str(found["model_info"]["state"])

    async def becomes(self, id: str, state: str, index: int = 1) -> None:
        async with asyncio.timeout(FOLLOW_TIMEOUT_S):
            while await self.state(id, index) != state:
                await asyncio.sleep(0.05)

    async def completes(self, response: Any, index: int = 0) -> None:
        """Wait until a background response is completed."""
        async with asyncio.timeout(FOLLOW_TIMEOUT_S):
            while (found := (await self.asks("GET", f"/v1/responses/{response['id']}", index))[1])["status"] in RUNNING:
                await asyncio.sleep(0.05)
        assert found["status"] == "completed", found["error"]

    async def chat(self, model: str, index: int = 0, **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.asks("POST", "/v1/chat/completions", index, model=model, messages=messages, **fields)

    async def backend(self, **options: Any) -> FakeVllm:
        fake = FakeVllm(tokens=ENCODING.encode_marked(ANSWER), **options)
        return await self.stack.enter_async_context(fake)


STORES = ["file", pytest.param("redis", marks=pytest.mark.slow)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=STORES)
async def replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    address = f"sqlite://{folder}/state.db"
    if request.param == "redis":
        server: Server = request.getfixturevalue("redis_server")
        address = server.url
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(tokens=ENCODING.encode_marked(ANSWER)))
        config = with_keys(config_of(f"vllm@{fake.url}", unisono={"model_variables": ["BACKEND_KEY"]}), address)
        config["store"]["deadline_s"] = 5.0
        environment = {"BACKEND_KEY": SECRET, "OTHER_KEY": "x"}
        processes = [Replica(folder / str(n), config, environment=environment) for n in range(2)]
        for process in processes:
            stack.push_async_callback(process.end)
        await asyncio.gather(*(process.start() for process in processes))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Replicas(processes, session, address, fake, stack)


def params(url: str, **more: Any) -> dict[str, Any]:
    return {"model": "vllm/tiny", "api_base": url, **more}


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_a_model_is_added_used_changed_and_deleted_on_all_replicas(replicas: Replicas) -> None:
    fake = await replicas.backend()
    new = {"model_name": "gpt-oss-new", "litellm_params": params(fake.url, api_key=SECRET, weight=2)}
    made = await replicas.made("/model/new", **new, model_info={"id": "new-1"})
    assert (made["model_id"], made["model_name"], made["created_by"]) == ("new-1", "gpt-oss-new", "master_key")
    assert made["litellm_params"] == params(fake.url, weight=2)
    assert (made["model_info"]["db_model"], made["model_info"]["state"]) == (True, "ready")
    status, answer = await replicas.chat("gpt-oss-new")
    assert (status, answer["unisono"]["backend"]) == (200, "new-1")
    await replicas.becomes("new-1", "ready")
    assert (await replicas.chat("gpt-oss-new", 1))[0] == 200
    assert fake.requests[-1].headers["authorization"] == f"Bearer {SECRET}"
    assert (await replicas.made("/model/new", **new, model_info={"id": "new-1"}))["created_at"] == made["created_at"]
    changed = await replicas.made(
        "/model/update", 1, litellm_params={"weight": None, "rpm": 60}, model_info={"id": "new-1"}
    )
    assert changed["litellm_params"] == params(fake.url, rpm=60)
    _, listed = await replicas.asks("GET", "/model/info", 1)
    kinds = {each["model_info"]["id"]: each["model_info"]["db_model"] for each in listed["data"]}
    assert kinds == {"vllm-1": False, "new-1": True}
    assert "api_key" not in json.dumps(listed)
    deleted = await replicas.made("/model/delete", id="new-1")
    assert deleted == {"message": "Model: new-1 deleted successfully"}
    assert (await replicas.chat("gpt-oss-new"))[0] == 404
    await replicas.becomes("new-1", "")
    assert (await replicas.chat("gpt-oss-new", 1))[0] == 404
    _, audit = await replicas.asks("GET", "/audit?page_size=3")
    assert [log["action"] for log in audit["audit_logs"]] == ["deleted", "updated", "created"]
    assert SECRET not in json.dumps(audit)


async def test_a_model_that_cannot_be_reached_is_stored_and_used_once_it_answers(replicas: Replicas) -> None:
    port = closed_port()
    entry = {"model_name": "gpt-oss-late", "litellm_params": params(f"http://127.0.0.1:{port}")}
    made = await replicas.made("/model/new", **entry, model_info={"id": "late-1"})
    assert made["model_info"]["state"] == "failing"
    assert made["model_info"]["error"].startswith("backend_unavailable")
    assert (await replicas.chat("gpt-oss-late"))[0] == 503
    late = FakeVllm(tokens=ENCODING.encode_marked(ANSWER))
    late.at_port = port
    async with late:
        await asyncio.gather(*(replicas.becomes("late-1", "ready", index) for index in (0, 1)))
        assert (await replicas.chat("gpt-oss-late"))[0] == 200
        await replicas.made("/model/delete", id="late-1")


async def test_no_request_reaches_a_deployment_before_its_probe_has_passed(replicas: Replicas) -> None:
    # The group has a healthy deployment, so no request may wait for the new one.
    entry = {"model_name": "gpt-oss", "litellm_params": params(f"http://127.0.0.1:{closed_port()}", weight=1000)}
    made = await replicas.made("/model/new", **entry, model_info={"id": "beside-1"})
    assert made["model_info"]["state"] == "failing"
    for index in (0, 1):
        for _ in range(3):
            status, answer = await replicas.chat("gpt-oss", index)
            assert (status, answer["unisono"]["backend"], answer["unisono"]["failovers"]) == (200, "vllm-1", 0)
    await replicas.made("/model/delete", id="beside-1")


async def test_bad_entries_are_refused_with_the_name_of_the_field(replicas: Replicas) -> None:
    good = params("http://127.0.0.1:9")
    for body, field_name in (
        ({"litellm_params": {**good, "api_bse": "x"}}, "litellm_params.api_bse"),
        ({"litellm_params": {"model": "vllm/x", "api_base": "no address"}}, "litellm_params.api_base"),
        ({"litellm_params": {**good, "rpm": -1}}, "litellm_params.rpm"),
        ({"litellm_params": {**good, "model": "vlm/gpt-oss"}}, "litellm_params.model"),
        ({"litellm_params": {**good, "model": "mlx/demo"}}, "litellm_params.model"),
        ({"litellm_params": {**good, "api_key": "os.environ/OTHER_KEY"}}, "litellm_params.api_key"),
        ({"litellm_params": {**good, "guardrails": ["none"]}}, "litellm_params.guardrails"),
        ({"litellm_params": good, "model_info": {"mode": "ocr"}}, "model_info.mode"),
        ({"litellm_params": good, "model_info": {"id": "vllm-1"}}, "model_info.id"),
        ({"litellm_params": good, "unisono": {"reasoning_field": "none"}}, "unisono.reasoning_field"),
        ({"litellm_params": "vllm"}, "litellm_params"),
        ({"litellm_params": good, "weight": 2}, "weight"),
    ):
        status, param, message = await replicas.refused("/model/new", **{"model_name": "gpt-oss", **body})
        assert (status, param) == (400, field_name), message
    assert (await replicas.refused("/model/delete", id="vllm-1"))[:2] == (400, "model_info.id")
    assert (await replicas.refused("/model/update", model_info={"id": "vllm-1"}))[:2] == (400, "model_info.id")
    assert (await replicas.refused("/model/delete", id="none"))[0] == 404
    assert (await replicas.refused("/model/none/drain"))[0] == 404


async def test_permitted_variables_are_resolved_by_each_process(replicas: Replicas) -> None:
    fake = await replicas.backend()
    entry = {"model_name": "gpt-oss-env", "litellm_params": params(fake.url, api_key="os.environ/BACKEND_KEY")}
    await replicas.made("/model/new", **entry, model_info={"id": "env-1"})
    assert (await replicas.chat("gpt-oss-env"))[0] == 200
    assert fake.requests[-1].headers["authorization"] == f"Bearer {SECRET}"
    await replicas.made("/model/delete", id="env-1")


async def test_only_admins_change_models_and_see_deployments(replicas: Replicas) -> None:
    key = (await replicas.made("/key/generate"))["key"]
    await replicas.made("/user/new", user_id="root", user_role="proxy_admin", auto_create_key=False)
    admin = (await replicas.made("/key/generate", user_id="root"))["key"]
    client = replicas.client(0)
    for path in ("/model/new", "/model/update", "/model/delete", "/model/vllm-1/drain"):
        status, answer = await client.asks("POST", path, {}, authorization=f"Bearer {key}")
        assert (status, answer["error"]["code"]) == (403, "permission_denied"), answer
    for used, id in ((key, "gpt-oss"), (admin, "vllm-1")):
        _, listed = await client.asks("GET", "/v1/model/info", None, authorization=f"Bearer {used}")
        assert listed["data"][0]["model_name"] == "gpt-oss"
        assert [each["model_info"]["id"] for each in listed["data"]] == [id]
        assert ("api_base" in listed["data"][0]["litellm_params"]) is (used == admin)


async def test_a_drained_deployment_finishes_its_answers_and_gets_no_new_ones(replicas: Replicas) -> None:
    slow = await replicas.backend(delay_s=0.2)
    entry = {"model_name": "gpt-oss-slow", "litellm_params": params(slow.url)}
    await replicas.made("/model/new", **entry, model_info={"id": "slow-1"})
    running = asyncio.create_task(replicas.chat("gpt-oss-slow"))
    while not slow.requests or slow.requests[-1].json["prompt"] == []:
        await asyncio.sleep(0.02)
    drained = await replicas.made("/model/slow-1/drain")
    assert (drained["model_info"]["state"], drained["model_info"]["drained"]) == ("drained", True)
    status, refused = await replicas.chat("gpt-oss-slow")
    assert (status, refused["error"]["code"]) == (503, "backend_unavailable")
    status, answer = await running
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello.")
    await replicas.becomes("slow-1", "drained")
    _, health = await replicas.asks("GET", "/health", 1)
    states = {each["model_id"]: each["state"] for each in health["unhealthy_endpoints"]}
    assert states == {"slow-1": "drained"}
    async with replicas.session.get(replicas.processes[1].url + "/metrics", headers=AUTH) as answered:
        text = await answered.text()
    assert 'unisono_backend_drained{backend="slow-1",model="gpt-oss-slow"} 1.0' in text
    await replicas.made("/model/slow-1/resume", 1)
    assert (await replicas.chat("gpt-oss-slow", 1))[0] == 200
    await replicas.becomes("slow-1", "ready", 0)
    await replicas.made("/model/delete", id="slow-1")


async def test_a_waiting_request_does_not_start_on_a_deleted_deployment(replicas: Replicas) -> None:
    # The answer on the deleted deployment ends first.
    backends = {"kept": await replicas.backend(delay_s=0.4), "deleted": await replicas.backend(delay_s=0.2)}
    for id, fake in backends.items():
        entry = {"model_name": "gpt-oss-queued", "litellm_params": params(fake.url, max_parallel_requests=1)}
        await replicas.made("/model/new", **entry, model_info={"id": id})
    asking = [asyncio.create_task(replicas.chat("gpt-oss-queued")) for _ in range(3)]
    while not all(any(not each.is_probe and each.body for each in fake.requests) for fake in backends.values()):
        await asyncio.sleep(0.02)
    await replicas.made("/model/delete", id="deleted")
    answers = [answer for _, answer in await asyncio.gather(*asking)]
    assert sorted(answer["unisono"]["backend"] for answer in answers) == ["deleted", "kept", "kept"]
    await replicas.made("/model/delete", id="kept")


@dataclass(frozen=True)
class HeldModel:
    """Model with one stored deployment of the same name, whose answers stop in the middle until `release` is set."""

    name: str
    fake: FakeVllm
    entry: dict[str, Any]
    release: asyncio.Event

    @property
    def body(self) -> dict[str, Any]:
        return {"model": self.entry["model_name"], "input": "Hi"}

    def answers(self) -> int:
        """Return the number of generations that have begun. Probes, whose prompts are shorter, are not counted."""
        return len([each for each in self.fake.requests if len(each.json["prompt"]) > 1])

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(FOLLOW_TIMEOUT_S):
            while self.answers() < count:
                await asyncio.sleep(0.02)


async def held_model(replicas: Replicas, name: str) -> HeldModel:
    fake, release = await replicas.backend(), asyncio.Event()
    entry = {"model_name": f"gpt-oss-{name}", "litellm_params": params(fake.url)}
    await replicas.made("/model/new", **entry, model_info={"id": name})
    script = VllmScript(tokens=ENCODING.encode_marked(ANSWER), faults=(hold_at(7, release),))
    fake.script = lambda _: script
    return HeldModel(name, fake, entry, release)


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["same replica", "other replica"])
@pytest.mark.parametrize("change", ["drain", "delete", pytest.param("another", marks=pytest.mark.slow)])
async def test_stored_responses_finish_on_the_deployment_on_which_they_began(
    replicas: Replicas, change: str, index: int
) -> None:
    model = await held_model(replicas, f"long-{change}-{index}")
    asked = replicas.client(0).asks("POST", "/v1/responses", model.body, **AUTH, **{"idempotency-key": model.name})
    repeatable = asyncio.create_task(asked)
    kept, cancelled = [await replicas.made("/v1/responses", **model.body, background=True) for _ in range(2)]
    await model.begun(3)
    if change == "drain":
        await replicas.made(f"/model/{model.name}/drain", index)
    elif change == "delete":
        await replicas.made("/model/delete", index, id=model.name)
    else:
        await replicas.made("/model/new", index, **model.entry, model_info={"id": f"{model.name}-2"})
    changed, state = CHANGED[change]
    await replicas.becomes(model.name + changed, state, 0)
    ended = await replicas.made(f"/v1/responses/{cancelled['id']}/cancel")
    assert ended["status"] == "cancelled", ended["error"]
    model.release.set()
    status, answer = await repeatable
    assert (status, answer.get("status")) == (200, "completed"), answer
    await replicas.completes(kept)
    # No answer was started a second time.
    assert model.answers() == 3
    for id in (model.name, f"{model.name}-2"):
        await replicas.asks("POST", "/model/delete", id=id)


@pytest.mark.slow
async def test_a_drained_deployment_finishes_the_responses_of_a_process_that_has_ended(replicas: Replicas) -> None:
    model = await held_model(replicas, "left")
    began = [await replicas.made("/v1/responses", **model.body, background=True) for _ in range(2)]
    await model.begun(2)
    await replicas.made("/model/left/drain")
    await replicas.becomes("left", "drained")
    await replicas.processes[0].end()
    model.release.set()
    for response in began:
        await replicas.completes(response, 1)
    assert (await replicas.chat("gpt-oss-left", 1))[0] == 503
    await replicas.processes[0].start()
    await replicas.made("/model/delete", id="left")


@pytest.mark.slow
async def test_stored_models_and_drains_survive_a_restart(replicas: Replicas) -> None:
    fake = await replicas.backend()
    entry = {"model_name": "gpt-oss-kept", "litellm_params": params(fake.url)}
    await replicas.made("/model/new", **entry, model_info={"id": "kept-1"})
    await replicas.made("/model/vllm-1/drain")
    await replicas.processes[0].end()
    await replicas.processes[0].start()
    assert await replicas.state("vllm-1") == "drained"
    assert (await replicas.chat("gpt-oss"))[0] == 503
    assert (await replicas.chat("gpt-oss-kept"))[0] == 200
    await replicas.made("/model/vllm-1/resume")
    assert (await replicas.chat("gpt-oss"))[0] == 200
    # Another salt makes the settings unreadable: they are reported, and everything else is served.
    process = replicas.processes[0]
    config = json.loads(process.path.read_text())
    config["unisono"]["salt_key"] = "another salt, long enough"
    await process.end()
    process.config = config
    await process.start()
    found = await replicas.info("kept-1")
    assert (found["model_info"]["state"], found["model_name"]) == ("invalid", "gpt-oss-kept")
    assert "salt_key" in found["model_info"]["error"]
    assert (await replicas.chat("gpt-oss"))[0] == 200
    await replicas.made("/model/delete", id="kept-1")


async def command(replicas: Replicas, *arguments: str, remote: bool) -> Result:
    where = ["--url", replicas.processes[1].url] if remote else ["--config", str(replicas.processes[1].path)]
    environment = {"UNISONO_API_KEY": MASTER, "BACKEND_KEY": SECRET}
    options = ["models", arguments[0], *where, *arguments[1:]]
    return await asyncio.to_thread(CliRunner().invoke, main, options, env=environment)


@pytest.mark.slow
async def test_the_command_adds_drains_resumes_and_removes_models(replicas: Replicas, tmp_path: Path) -> None:
    fake = await replicas.backend()
    for remote in (True, False):
        arguments = (
            "gpt-oss-cli",
            "vllm/tiny",
            "--api-base",
            fake.url,
            "--api-key-env",
            "BACKEND_KEY",
            "--id",
            "cli-1",
        )
        added = await command(replicas, "add", *arguments, remote=remote)
        assert added.exit_code == 0, added.output
        assert "cli-1" in added.output
        await replicas.becomes("cli-1", "ready")
        assert (await replicas.chat("gpt-oss-cli", 1))[0] == 200
        assert fake.requests[-1].headers["authorization"] == f"Bearer {SECRET}"
        for verb, state in (("drain", "drained"), ("resume", "ready"), ("remove", "")):
            done = await command(replicas, verb, "cli-1", remote=remote)
            assert done.exit_code == 0, done.output
            await replicas.becomes("cli-1", state)
        file = tmp_path / "entry.yaml"
        file.write_text(f"model_name: gpt-oss-cli\nlitellm_params: {{model: vlm/x, api_base: '{fake.url}'}}\n")
        refused = await command(replicas, "add", "--file", str(file), remote=remote)
        assert refused.exit_code == 1
        assert "litellm_params.model" in refused.output
        gone = await command(replicas, "remove", "vllm-1", remote=remote)
        assert (gone.exit_code, "configuration file" in gone.output) == (1, True), gone.output
