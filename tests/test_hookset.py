"""Hooks of a configuration: names, options, rejected hooks, and the documented example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.gateway import gateway
from tests.e2e.hooked import install
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm
from unisono.bootstrap.hooks import Hookset, build_hooks
from unisono.config import Config, HookSettings, load, parse
from unisono.core.conversation import Conversation, Preamble
from unisono.engine.request import GenerationRequest
from unisono.errors import ConfigError

PAGE = Path(__file__).parent.parent / "docs" / "hooks.md"
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Four.<|return|>")


def settings_of(hooks: Any) -> Config:
    return parse({"unisono": {"hooks": hooks}}, {"KEY": "sk-1"}).config


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)


def test_an_entry_is_a_name_or_a_name_with_options() -> None:
    named, empty, with_options = settings_of(
        [
            "hearing",
            {"hearing": None},
            {"failing": {"at": "x", "key": "os.environ/KEY", "timeout_s": 2, "fail": "open"}},
        ]
    ).unisono.hooks
    assert named == empty == HookSettings(name="hearing", timeout_s=5, fail="closed")
    assert with_options == HookSettings(name="failing", timeout_s=2, fail="open", options={"at": "x", "key": "sk-1"})


INSTALLED = "blocklist, content_filter, failing, garbling, gone, halved, hearing, presidio, replacing, unmakeable"
WRONG: dict[str, tuple[Any, str]] = {
    "name instead of a list": ("hearing", "unisono.hooks: input should be a list"),
    "number instead of a name": ([1], "unisono.hooks[0]: must be the name of a hook, or `{name: {options}}`"),
    "two names in one entry": (
        [{"a": {}, "b": {}}],
        "unisono.hooks[0]: must be the name of a hook, or `{name: {options}}`",
    ),
    "options that are a list": ([{"hearing": []}], "unisono.hooks[0]: the options of a hook must be a mapping"),
    "zero timeout": ([{"hearing": {"timeout_s": 0}}], "unisono.hooks[0].timeout_s: input should be greater than 0"),
    "unknown failure mode": (
        [{"hearing": {"fail": "soft"}}],
        "unisono.hooks[0].fail: input should be 'closed' or 'open'",
    ),
    "unknown hook": (
        ["hearing", "hearsay"],
        f"unisono.hooks[1]: unknown hook `hearsay`; installed hooks: {INSTALLED}",
    ),
    "missing package": (["gone"], "unisono.hooks[0]: the hook `gone` cannot be imported: No module named"),
    "hook without a method": (["halved"], "unisono.hooks[0]: the hook `halved` has no method `after`"),
    "hook that fails to start": (
        ["unmakeable"],
        "unisono.hooks[0]: the hook `unmakeable` failed to start: SystemExit: no licence",
    ),
    "unknown option": (
        [{"hearing": {"says": "a", "to": "b"}}],
        "unisono.hooks[0].hearing.to: the hook has no option `to`; remove it",
    ),
    "invalid option": (
        ["hearing", {"blocklist": {"patterns": {"a": "("}}}],
        "unisono.hooks[1].blocklist.patterns.a: it is not a supported regular expression",
    ),
}


@pytest.mark.parametrize(("hooks", "message"), WRONG.values(), ids=WRONG)
def test_an_invalid_hook_is_rejected_at_start(hooks: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_hooks(settings_of(hooks))
    assert str(refused.value).startswith(message)


async def test_a_generation_has_no_gate_without_hooks() -> None:
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config_with(fake, [])) as running:
        assert running.app is not None
        assert build_hooks(settings_of([])) == Hookset()
        response = await running.chat()
        assert "hooks" not in response.body["unisono"]
    assert build_hooks(settings_of([])).gates(lambda request: request)(REQUEST) is None
    assert build_hooks(settings_of(["hearing"])).gates(lambda request: request)(REQUEST) is not None


REQUEST = GenerationRequest("gpt-oss", Conversation(Preamble()))


def config_with(fake: FakeVllm, hooks: Any) -> dict[str, Any]:
    entry = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
    return {"model_list": [entry], "unisono": {"hooks": hooks}}


async def test_hooks_close_with_their_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "class Closing:\n    closed = []\n    def __init__(self, options): pass\n"
    module += "    async def before(self, request): pass\n    async def after(self, request, answer): pass\n"
    module += "    async def aclose(self):\n        self.closed.append(self)\n        raise ValueError\n"
    (tmp_path / "closing_hook.py").write_text(module)
    (tmp_path / "more").mkdir()
    install(tmp_path / "more", monkeypatch, closing="closing_hook:Closing")
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config_with(fake, ["closing"])) as running:
        assert (await running.chat()).status == 200
    import closing_hook  # type: ignore[import-not-found]

    assert len(closing_hook.Closing.closed) == 1


async def test_the_documented_example_behaves_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    blocks = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```", page, re.S | re.M))
    (tmp_path / "own").mkdir()
    (tmp_path / "names.py").write_text(blocks["names.py"])
    [point] = re.findall(r'^names = "(.*)"$', blocks["pyproject.toml"], re.M)
    install(tmp_path / "own", monkeypatch, names=point)
    hooks = yaml.safe_load(blocks["config.yaml"])["unisono"]["hooks"]
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config_with(fake, hooks)) as running:
        messages = [{"role": "user", "content": "I am Ann."}]
        annotations = (await running.chat(messages=messages)).body["unisono"]["hooks"]
        assert annotations == json.loads(blocks["unisono.hooks"])
        assert "I am [name]." in ENCODING.decode(fake.requests[-1].json["prompt"])
        blocked = await running.chat(messages=[{"role": "user", "content": "4111111111111111"}])
        assert (blocked.status, blocked.body["error"]["code"]) == (400, "content_blocked")
        assert blocked.body == json.loads(blocks["error"])


def test_the_example_configuration_names_installed_hooks(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "config.example.yaml").read_text()
    [documented] = re.findall(r"^  # hooks: (\[.*\])$", text, re.M)
    path = tmp_path / "config.yaml"
    path.write_text(f"unisono: {{hooks: {documented}}}")
    assert build_hooks(load(path, {}).config).hooks
