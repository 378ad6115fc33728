"""Server tools in Messages: what was run comes back with the client's next request, and an answer that paused goes on
behind the very tokens it paused at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.messages import message_in, text_in
from tests.e2e.test_builtin_tools import FIND, OPEN, SEARCH, answers, started
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
WEB = {"type": "web_search_20250305", "name": "web_search"}
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ "at" : "sky" }<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
THINKING: dict[str, dict[str, Any]] = {
    "hidden": {},
    "shown": {"thinking": {"type": "adaptive"}},
    "omitted": {"thinking": {"type": "adaptive", "display": "omitted"}},
}
every_form = pytest.mark.parametrize(
    ("thinking", "stream"),
    [(thinking, stream) for thinking in THINKING.values() for stream in (False, True)],
    ids=[f"{name}-{form}" for name in THINKING for form in ("whole", "streamed")],
)


def thought(words: str) -> str:
    return f"<|channel|>analysis<|message|>{words}<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("documents")
    Path(folder / "capital.md").write_text("# Capitals\n\nParis is the capital of France.\n")
    with started("browser", "--folder", str(folder)) as address:
        yield address


class Desk:
    """A gateway with the browser, in front of a model that says one thing after the other."""

    def __init__(self, running: Gateway, fake: FakeVllm) -> None:
        self.gateway = running
        self.fake = fake

    def say(self, *outputs: str) -> None:
        left = iter(outputs)
        self.fake.script = lambda _: VllmScript(tokens=ENCODING.encode_marked(next(left)))
        self.fake.requests.clear()

    async def asked(self, talk: list[Any], **fields: Any) -> dict[str, Any]:
        """The message, which is counted as it was asked for."""
        before = len(self.fake.requests)
        message = message_in(await self.gateway.messages(messages=talk, **fields))
        counted = await self.gateway.messages(path="/v1/messages/count_tokens", messages=talk, **fields)
        assert counted.body["input_tokens"] == len(self.fake.requests[before].json["prompt"])
        return message

    @property
    def prompts(self) -> list[str]:
        return [ENCODING.decode(request.json["prompt"]) for request in self.fake.requests]


@pytest.fixture
async def desk(browser: str) -> AsyncIterator[Desk]:
    unisono = {"builtin_tools": {"browser": "pages"}, "pause_after_rounds": 2}
    async with (
        FakeVllm() as fake,
        gateway(config_of(f"vllm@{fake.url}", mcp_servers={"pages": {"url": browser}}, unisono=unisono)) as running,
    ):
        yield Desk(running, fake)


@every_form
async def test_an_answer_pauses_and_goes_on_where_it_was(desk: Desk, thinking: dict[str, Any], stream: bool) -> None:
    steps = [thought("One.") + PREAMBLE + SEARCH, thought("Two.") + OPEN, thought("Three.") + FIND, answers("Paris.")]
    desk.say(*steps)
    talk: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    fields: dict[str, Any] = {"tools": [WEB, LOOK], "stream": stream, **thinking}
    first = await desk.asked(talk, **fields)
    assert (first["stop_reason"], first["unisono"]["recoveries"]) == ("pause_turn", [])
    assert [block["type"] for block in first["content"] if block["type"] != "thinking"] == [
        "text",
        "server_tool_use",
        "web_search_tool_result",
        "server_tool_use",
        "web_fetch_tool_result",
    ]
    talk.append({"role": "assistant", "content": first["content"]})
    second = await desk.asked(talk, **fields)
    assert (text_in(second["content"]), second["stop_reason"]) == ("Paris.", "end_turn")
    # The page is still open: what is looked for in it is found.
    [found] = [block for block in second["content"] if block["type"] == "web_fetch_tool_result"]
    assert found["content"]["type"] == "web_fetch_result"
    assert second["usage"]["server_tool_use"] == {"web_search_requests": 0, "web_fetch_requests": 1}
    prompts = desk.prompts
    assert len(prompts) == len(steps)
    for begun, said, extended in zip(prompts, steps, prompts[1:], strict=False):
        assert extended.startswith(begun + said)


async def test_several_pauses_may_come_back_as_messages_of_their_own(desk: Desk) -> None:
    desk.say(SEARCH, OPEN, FIND, SEARCH, answers("Paris."))
    talk: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    for reason in ("pause_turn", "pause_turn", "end_turn"):
        message = await desk.asked(talk, tools=[WEB], tool_choice={"type": "any"} if reason == "end_turn" else None)
        assert message["stop_reason"] == reason
        talk.append({"role": "assistant", "content": message["content"]})
    assert desk.prompts[-1].startswith(desk.prompts[0])
    assert desk.prompts[-1].count("to=browser.") == 4


@every_form
async def test_what_was_run_before_a_call_of_the_clients_stands_in_the_prompt_once(
    desk: Desk, thinking: dict[str, Any], stream: bool
) -> None:
    desk.say(thought("One.") + SEARCH, thought("Two.") + CALL, answers("Blue."))
    talk: list[Any] = [{"role": "user", "content": "How is the sky over the capital?"}]
    fields: dict[str, Any] = {"tools": [WEB, LOOK], "stream": stream, **thinking}
    first = await desk.asked(talk, **fields)
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "blue"}
    talk += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = await desk.asked(talk, **fields)
    assert text_in(second["content"]) == "Blue."
    begun, last = desk.prompts[1:]
    assert last.startswith(begun + thought("Two.") + CALL)


async def test_calls_over_the_bound_say_so(desk: Desk) -> None:
    desk.say(SEARCH, SEARCH.replace("France", "Spain"), "Paris.<|return|>")
    message = await desk.asked([{"role": "user", "content": "Where?"}], tools=[{**WEB, "max_uses": 1}])
    [_, over] = [block for block in message["content"] if block["type"] == "web_search_tool_result"]
    assert over["content"]["error_code"] == "max_uses_exceeded"
    assert (text_in(message["content"]), message["stop_reason"]) == ("Paris.", "end_turn")
