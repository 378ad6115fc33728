"""Cached tokens that clients read after a search for tools: at least the prompt before it.

The fake backend counts as vLLM does: whole blocks of 16 tokens that it really received or generated before. Every
generated call here is longer than a block, so that the previous prompt is cached to its last token.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.gateway import message_of
from tests.e2e.hosting import calls, desk
from tests.e2e.messages import message_in
from tests.e2e.responses import ANSWER, Json, Line
from tests.e2e.test_added_tools import called
from tests.e2e.test_deferred_servers import DEFERRED
from tests.e2e.test_tool_search import ASKED, IN_MESSAGES, LOOKS, PAY, QUESTION, SEARCHES, STARS, TOOLS
from tests.e2e.wires import ENCODING, WIRES
from tests.fakes import FakeVllm, PrefixCache
from tests.fakes.prefix_cache import BLOCK_TOKENS
from tests.mcp.conftest import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
STARS_BY_WORDS = called("tool_search_tool_bm25", '{"query": "stars", "reason": "They may be in the sky."}')
CLIENT_SEARCH: Json = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(upstream: Upstream) -> AsyncIterator[Line]:
    async with desk(upstream, WIRES["vllm"]) as line:
        yield line


@pytest.fixture
def harness(running: Line) -> Line:
    assert isinstance(running.fake, FakeVllm)
    running.fake.prefix_cache = PrefixCache()
    return running


def cached_in(response: Json) -> int:
    """Return the cached tokens, and check that not the whole input is cached."""
    usage = response["usage"]
    cached = int(usage["input_tokens_details"]["cached_tokens"])
    assert cached < usage["input_tokens"]
    return cached


def result_of(response: Json) -> Json:
    """Return the result of the last call of a response."""
    return {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": "Polaris"}


# Fields of the request, and the outputs of the model: a search, a call that the client runs, and an answer.
FOUND: dict[str, tuple[Json, list[str]]] = {
    "tools": ({"input": [ASKED], "tools": TOOLS}, [SEARCHES, LOOKS]),
    "tools of an item": (
        {"input": [{"type": "additional_tools", "role": "developer", "tools": TOOLS}, ASKED]},
        [SEARCHES, LOOKS],
    ),
    "tools of a server": (
        {"input": [ASKED], "tools": [*TOOLS, DEFERRED]},
        [called("tool_search", '{"query": "told, stars"}'), calls("echo", text="hello"), LOOKS],
    ),
}


@pytest.mark.parametrize(("fields", "outputs"), FOUND.values(), ids=FOUND)
@pytest.mark.parametrize("stored", [False, True], ids=["resent", "stored"])
@both_forms
async def test_the_prompt_before_a_search_is_cached_after_it(
    harness: Line, fields: Json, outputs: list[str], stored: bool, stream: bool
) -> None:
    harness.say(*outputs, ANSWER)
    first = await harness.responds(**fields, stream=stream, store=stored)
    # Nothing was cached, though the later steps of the answer read the prompt of the first one from the cache.
    assert cached_in(first) == 0
    new = result_of(first)
    following: Json = {"previous_response_id": first["id"], "input": [new]}
    if not stored:
        following = {"input": [*fields["input"], *first["output"], new]}
    second = await harness.responds(**{**fields, **following}, stream=stream, store=stored)
    *_, last, prompt = harness.tokens
    assert first["usage"]["input_tokens"] < len(last) <= cached_in(second)
    # Everything that the model generated is cached, too, except for the rest of a block.
    written = len(last) + len(ENCODING.encode_marked(outputs[-1]))
    assert cached_in(second) > written - 1 - BLOCK_TOKENS
    assert len(prompt) == second["usage"]["input_tokens"]


@both_forms
async def test_the_prompt_before_a_search_of_the_client_is_cached_after_it(harness: Line, stream: bool) -> None:
    fields: Json = {"tools": [CLIENT_SEARCH, STARS, PAY], "stream": stream}
    harness.say(SEARCHES, LOOKS, ANSWER)
    first = await harness.responds(input=[ASKED], **fields)
    call = first["output"][-1]
    found = {"type": "tool_search_output", "call_id": call["call_id"], "execution": "client", "tools": [STARS]}
    second = await harness.responds(previous_response_id=first["id"], input=[found], **fields)
    third = await harness.responds(previous_response_id=second["id"], input=[result_of(second)], **fields)
    prompts = [len(prompt) for prompt in harness.tokens]
    assert [response["usage"]["input_tokens"] for response in (first, second, third)] == prompts
    assert [cached_in(first), cached_in(second) >= prompts[0], cached_in(third) >= prompts[1]] == [0, True, True]


@both_forms
async def test_the_prompt_before_a_search_of_anthropic_is_cached_after_it(harness: Line, stream: bool) -> None:
    tools = [{"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}, *IN_MESSAGES]
    fields: Json = {"model": "gpt-oss", "max_tokens": 1000, "tools": tools, "stream": stream}
    harness.say(STARS_BY_WORDS, called("look", '{"at":"north"}'), ANSWER)
    first = message_in(await harness.gateway.messages(messages=[QUESTION], **fields))
    assert first["usage"]["cache_read_input_tokens"] == 0
    answered = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "Polaris"}
    history = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [answered]}]
    second = message_in(await harness.gateway.messages(messages=[QUESTION, *history], **fields))
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] >= len(harness.tokens[1]) > first["usage"]["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(harness.tokens[2])


@both_forms
async def test_the_prompt_before_a_call_is_cached_in_chat(harness: Line, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    counted: Json = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    harness.say(called("look", '{"at":"north"}'), ANSWER)
    first = await harness.gateway.chat(messages=[QUESTION], tools=[tool], **counted)
    found = re.search(rb'"(call_\w+)"', first.raw)
    assert found is not None
    call = {"id": found[1].decode(), "type": "function", "function": {"name": "look", "arguments": '{"at":"north"}'}}
    history = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Polaris"},
    ]
    second = await harness.gateway.chat(messages=[QUESTION, *history], tools=[tool], **counted)
    before, after = (message_of(answer).usage for answer in (first, second))
    assert before["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"] == len(harness.tokens[0])
