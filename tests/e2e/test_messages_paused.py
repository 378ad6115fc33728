"""Server tools in Messages: results return with the client's next request.

A paused answer continues after the exact tokens at which it paused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.messages import message_in, text_in
from tests.e2e.test_builtin_tools import FIND, OPEN, SEARCH, answers
from tests.fakes import FakeVllm, VllmScript
from tests.toolservers.running import started
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
WEB = {"type": "web_search_20250305", "name": "web_search"}
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ "at" : "sky" }<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
THINKING: dict[str, dict[str, Any]] = {
    "hidden": {},
    "visible": {"thinking": {"type": "adaptive"}},
    "omitted": {"thinking": {"type": "adaptive", "display": "omitted"}},
}
every_form = pytest.mark.parametrize(
    ("thinking", "stream"),
    [(thinking, stream) for thinking in THINKING.values() for stream in (False, True)],
    ids=[f"{name}-{form}" for name in THINKING for form in ("whole", "streamed")],
)


def reasoning(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("documents")
    Path(folder / "capital.md").write_text("# Capitals\n\nParis is the capital of France.\n")
    with started("browser", "--folder", str(folder)) as address:
        yield address


class Harness:
    """A gateway with the browser tool, and a model with scripted outputs."""

    def __init__(self, running: Gateway, fake: FakeVllm) -> None:
        self.gateway = running
        self.fake = fake

    def say(self, *outputs: str) -> None:
        remaining = iter(outputs)
        self.fake.script = lambda _: VllmScript(tokens=ENCODING.encode_marked(next(remaining)))
        self.fake.requests.clear()

    async def send(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        """Send a request and check that its token count is exact; return the message."""
        before = len(self.fake.requests)
        message = message_in(await self.gateway.messages(messages=messages, **fields))
        counted = await self.gateway.messages(path="/v1/messages/count_tokens", messages=messages, **fields)
        assert counted.body["input_tokens"] == len(self.fake.requests[before].json["prompt"])
        return message

    @property
    def prompts(self) -> list[str]:
        return [ENCODING.decode(request.json["prompt"]) for request in self.fake.requests]


@pytest.fixture
async def harness(browser: str) -> AsyncIterator[Harness]:
    unisono = {"builtin_tools": {"browser": "pages"}, "pause_after_rounds": 2}
    async with (
        FakeVllm() as fake,
        gateway(config_of(f"vllm@{fake.url}", mcp_servers={"pages": {"url": browser}}, unisono=unisono)) as running,
    ):
        yield Harness(running, fake)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_search_without_hits_is_restored(harness: Harness, stream: bool) -> None:
    harness.say(SEARCH.replace("capital France", "zzzqqq"), answers("Nothing."), answers("Sorry."))
    question = {"role": "user", "content": "What is the capital of France?"}
    fields: dict[str, Any] = {"tools": [WEB], "stream": stream}
    first = await harness.send([question], **fields)
    [result] = [block for block in first["content"] if block["type"] == "web_search_tool_result"]
    assert result["content"] == []
    after_the_search = harness.prompts[1]
    second = await harness.send([question, {"role": "assistant", "content": first["content"]}, question], **fields)
    assert harness.prompts[-1].startswith(after_the_search)
    assert second["unisono"].get("notes") is None


@pytest.mark.sampled(one_in=3)
@every_form
async def test_a_paused_answer_continues_after_its_last_token(
    harness: Harness, thinking: dict[str, Any], stream: bool
) -> None:
    steps = [
        reasoning("One.") + PREAMBLE + SEARCH,
        reasoning("Two.") + OPEN,
        reasoning("Three.") + FIND,
        answers("Paris."),
    ]
    harness.say(*steps)
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    fields: dict[str, Any] = {"tools": [WEB, LOOK], "stream": stream, **thinking}
    first = await harness.send(messages, **fields)
    assert (first["stop_reason"], first["unisono"]["recoveries"]) == ("pause_turn", [])
    assert [block["type"] for block in first["content"] if block["type"] != "thinking"] == [
        "text",
        "server_tool_use",
        "web_search_tool_result",
        "server_tool_use",
        "web_fetch_tool_result",
    ]
    messages.append({"role": "assistant", "content": first["content"]})
    second = await harness.send(messages, **fields)
    assert (text_in(second["content"]), second["stop_reason"]) == ("Paris.", "end_turn")
    # The page is still open, so the text is found in it.
    [result] = [block for block in second["content"] if block["type"] == "web_fetch_tool_result"]
    assert result["content"]["type"] == "web_fetch_result"
    assert second["usage"]["server_tool_use"] == {"web_search_requests": 0, "web_fetch_requests": 1}
    prompts = harness.prompts
    assert len(prompts) == len(steps)
    for prompt, output, extended in zip(prompts, steps, prompts[1:], strict=False):
        assert extended.startswith(prompt + output)


async def test_an_answer_with_parallel_calls_continues_after_its_last_token(harness: Harness) -> None:
    other = SEARCH.replace("capital France", "Paris")
    last = reasoning("Two.") + OPEN
    harness.say(reasoning("One.") + SEARCH + "<|start|>assistant" + other, last, answers("Paris."))
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    first = await harness.send(messages, tools=[WEB])
    assert first["stop_reason"] == "pause_turn"
    messages.append({"role": "assistant", "content": first["content"]})
    await harness.send(messages, tools=[WEB])
    assert harness.prompts[2].startswith(harness.prompts[1] + last)


async def test_several_pauses_may_come_back_as_separate_messages(harness: Harness) -> None:
    harness.say(SEARCH, OPEN, FIND, SEARCH, answers("Paris."))
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    for reason in ("pause_turn", "pause_turn", "end_turn"):
        message = await harness.send(
            messages, tools=[WEB], tool_choice={"type": "any"} if reason == "end_turn" else None
        )
        assert message["stop_reason"] == reason
        messages.append({"role": "assistant", "content": message["content"]})
    assert harness.prompts[-1].startswith(harness.prompts[0])
    assert harness.prompts[-1].count("to=browser.") == 4


@pytest.mark.slow
@every_form
async def test_server_results_before_a_client_call_stand_in_the_prompt_once(
    harness: Harness, thinking: dict[str, Any], stream: bool
) -> None:
    harness.say(reasoning("One.") + SEARCH, reasoning("Two.") + CALL, answers("Blue."))
    messages: list[Any] = [{"role": "user", "content": "How is the sky over the capital?"}]
    fields: dict[str, Any] = {"tools": [WEB, LOOK], "stream": stream, **thinking}
    first = await harness.send(messages, **fields)
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "blue"}
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = await harness.send(messages, **fields)
    assert text_in(second["content"]) == "Blue."
    prompt, last = harness.prompts[1:]
    assert last.startswith(prompt + reasoning("Two.") + CALL)


async def test_calls_over_max_uses_return_an_error(harness: Harness) -> None:
    harness.say(SEARCH, SEARCH.replace("France", "Spain"), "Paris.<|return|>")
    message = await harness.send([{"role": "user", "content": "Where?"}], tools=[{**WEB, "max_uses": 1}])
    [_, rejected] = [block for block in message["content"] if block["type"] == "web_search_tool_result"]
    assert rejected["content"]["error_code"] == "max_uses_exceeded"
    assert message["usage"]["server_tool_use"] == {"web_search_requests": 1, "web_fetch_requests": 0}
    assert (text_in(message["content"]), message["stop_reason"]) == ("Paris.", "end_turn")
