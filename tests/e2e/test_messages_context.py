"""Context management of the Messages API: clearing of tool results and thinking, and compaction."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, Gateway, gateway
from tests.e2e.messages import message_in, text_in
from tests.e2e.wires import ENCODING, WIRES, Fake, Wire, asked, deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
SUMMARY = "They want tea; the pot is empty."
FINAL = "<|channel|>final<|message|>{}<|return|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
SUMMARIZED = THOUGHT + FINAL.format(SUMMARY)
ANSWER = THOUGHT + FINAL.format("ok")
TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("look", "smell")]
SALT = {"salt_key": "a salt of the tests, long enough", "current_date": "2026-11-20"}
BETA = {"anthropic-beta": "context-management-2025-06-27,compact-2026-01-12"}
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@dataclass
class Bench:
    """A gateway with one scripted backend."""

    wire: Wire
    fake: Fake
    gateway: Gateway

    def say(self, *outputs: str) -> None:
        """Script the next outputs, in order; the last one is repeated."""
        scripts = [self.wire.script(each) for each in outputs]
        left = iter(scripts)
        self.fake.script = lambda _: next(left, scripts[-1])  # type: ignore[assignment]
        self.fake.requests.clear()

    async def post(self, path: str = "", **fields: Any) -> Answer:
        body = {"model": "gpt-oss", "max_tokens": 4096, "tools": TOOLS, **fields}
        return await self.gateway.post(f"/v1/messages{path}", json.dumps(body).encode(), **BETA)

    async def message(self, **fields: Any) -> Json:
        return message_in(await self.post(**fields))

    async def count(self, **fields: Any) -> Json:
        answer = await self.post("/count_tokens", **fields)
        assert answer.status == 200, answer.raw
        return dict(answer.body)

    @property
    def prompts(self) -> list[str]:
        prompts = [request.json["prompt"] for request in asked(self.fake)]
        return [prompt if isinstance(prompt, str) else ENCODING.decode(prompt) for prompt in prompts]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    wire = WIRES[request.param]
    async with wire.fake() as fake:
        config = {"model_list": [deployment("gpt-oss", wire, fake)], "unisono": SALT}
        async with gateway(config) as running:
            yield Bench(wire, fake, running)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def uses(*calls: tuple[str, str]) -> list[Json]:
    """Return the messages of a loop of calls, each with the name of its tool and a unique word."""
    messages: list[Json] = []
    for name, word in calls:
        call = {"type": "tool_use", "id": f"toolu_{word}", "name": name, "input": {"into": f"in-{word}"}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{word}", "content": f"out-{word} " * 60}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return messages


LOOP = [user("Is there tea?"), *uses(("look", "a"), ("smell", "b"), ("look", "c"), ("smell", "d"))]


def clear(**fields: Any) -> Json:
    return {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", **fields}]}}


def tokens(number: int) -> Json:
    return {"type": "input_tokens", "value": number}


def tool_uses(number: int) -> Json:
    return {"type": "tool_uses", "value": number}


CLEARED: dict[str, tuple[Json, str, str]] = {
    # case: (fields of the edit, words of cleared results, words of cleared inputs)
    "the default": ({}, "", ""),
    "below the trigger": ({"trigger": tokens(50_000), "keep": tool_uses(0)}, "", ""),
    "above the trigger": ({"trigger": tokens(100)}, "a", ""),
    "few uses": ({"trigger": tool_uses(4)}, "", ""),
    "many uses": ({"trigger": tool_uses(3)}, "a", ""),
    "one kept": ({"trigger": tokens(100), "keep": tool_uses(1)}, "abc", ""),
    "none kept": ({"trigger": tokens(100), "keep": tool_uses(0)}, "abcd", ""),
    "excluded tools": ({"trigger": tokens(100), "keep": tool_uses(1), "exclude_tools": ["look"]}, "b", ""),
    "inputs too": ({"trigger": tokens(100), "keep": tool_uses(1), "clear_tool_inputs": True}, "abc", "abc"),
    "inputs of one tool": ({"trigger": tokens(100), "keep": tool_uses(1), "clear_tool_inputs": ["smell"]}, "abc", "b"),
    "enough to clear": ({"trigger": tokens(100), "keep": tool_uses(1), "clear_at_least": tokens(300)}, "abc", ""),
    "too little to clear": ({"trigger": tokens(100), "keep": tool_uses(1), "clear_at_least": tokens(5_000)}, "", ""),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("edit", "results", "inputs"), CLEARED.values(), ids=CLEARED)
async def test_old_tool_uses_are_cleared(bench: Bench, edit: Json, results: str, inputs: str) -> None:
    bench.say(ANSWER)
    plain = await bench.message(messages=LOOP)
    whole = await bench.message(messages=LOOP, **clear(**edit))
    streamed = await bench.message(messages=LOOP, stream=True, **clear(**edit))
    assert {**streamed, "id": ""} == {**whole, "id": ""}
    before, after, _ = bench.prompts
    assert [word for word in "abcd" if f"out-{word}" not in after] == list(results)
    assert [word for word in "abcd" if f"in-{word}" not in after] == list(inputs)
    assert (before == after) is (not results)
    assert "context_management" not in plain
    edits = whole["context_management"]["applied_edits"]
    assert "context_management: no effect" not in whole["unisono"].get("notes", [])
    counted = await bench.count(messages=LOOP, **clear(**edit))
    original = await bench.count(messages=LOOP)
    assert counted["context_management"] == {"original_input_tokens": original["input_tokens"]}
    assert "context_management" not in original
    cleared = original["input_tokens"] - counted["input_tokens"]
    assert edits == (
        [
            {
                "type": "clear_tool_uses_20250919",
                "cleared_tool_uses": len(results),
                "cleared_input_tokens": cleared,
            }
        ]
        if results
        else []
    )


def mcp_uses(*words: str) -> list[Json]:
    """Return the messages of a loop of calls to an MCP server, whose results are not sealed."""
    blocks: list[Json] = []
    for word in words:
        use = {"type": "mcp_tool_use", "id": f"mcptoolu_{word}", "name": "look", "server_name": "docs"}
        content = [{"type": "text", "text": f"out-{word} " * 60}]
        result = {"type": "mcp_tool_result", "tool_use_id": f"mcptoolu_{word}", "is_error": False, "content": content}
        blocks += [use | {"input": {"into": f"in-{word}"}}, result]
    return [user("Is there tea?"), {"role": "assistant", "content": blocks}, user("And now?")]


FEW = {"trigger": tokens(100), "keep": tool_uses(1)}
MCP_LOOP = mcp_uses("a", "b", "c")
OWN_LOOP = [user("Is there tea?"), *uses(("docs__look", "a"), ("docs__look", "b"), ("docs__look", "c"))]
OWN_TOOL = {"name": "docs__look", "input_schema": {"type": "object"}}
# case: (messages and tools, fields of the edit, words of cleared results, words of cleared inputs)
NAMED: dict[str, tuple[Json, Json, str, str]] = {
    "no name": ({"messages": MCP_LOOP}, FEW, "ab", ""),
    "an excluded tool": ({"messages": MCP_LOOP}, {**FEW, "exclude_tools": ["look"]}, "", ""),
    "another excluded tool": ({"messages": MCP_LOOP}, {**FEW, "exclude_tools": ["smell"]}, "ab", ""),
    "inputs of a tool": ({"messages": MCP_LOOP}, {**FEW, "clear_tool_inputs": ["look"]}, "ab", "ab"),
    "a similar name of the client": (
        {"messages": OWN_LOOP, "tools": [OWN_TOOL]},
        {**FEW, "exclude_tools": ["look"]},
        "ab",
        "",
    ),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("fields", "edit", "results", "inputs"), NAMED.values(), ids=NAMED)
async def test_edits_name_tools_of_mcp_servers_as_their_blocks_do(
    bench: Bench, fields: Json, edit: Json, results: str, inputs: str
) -> None:
    bench.say(ANSWER)
    await bench.message(**fields, **clear(**edit))
    [prompt] = bench.prompts
    assert [word for word in "abc" if f"out-{word}" not in prompt] == list(results)
    assert [word for word in "abc" if f"in-{word}" not in prompt] == list(inputs)
    assert "functions.docs__look to=assistant" in prompt


# The third turn has no answer: the user interrupted it, so that its reasoning stays in the prompt.
async def test_old_thinking_is_cleared(bench: Bench) -> None:
    calls = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'
    bench.say(f"<|channel|>analysis<|message|>First thought.<|end|><|start|>assistant{calls}", ANSWER)
    first = await bench.message(messages=[user("Look.")], thinking={"type": "adaptive"})
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "blue"}
    turn: list[Json] = [
        user("Look."),
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Stop. Look there."}]},
        *uses(("look", "x")),
    ]
    for thoughts in (first["content"], first["content"][1:]):
        # The gateway restores the reasoning of a call that a client left out.
        turn[1]["content"] = thoughts
        for keep, is_kept in ((None, True), ("all", True), ({"type": "thinking_turns", "value": 1}, False)):
            edit = {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}
            fields: Json = {} if keep is None else {"context_management": {"edits": [edit]}}
            message = await bench.message(messages=turn, thinking={"type": "adaptive"}, **fields)
            assert ("First thought." in bench.prompts[-1]) is is_kept
            if fields:
                edits = message["context_management"]["applied_edits"]
                assert [edit["cleared_thinking_turns"] for edit in edits] == ([] if is_kept else [1])
                assert all(edit["cleared_input_tokens"] > 0 for edit in edits)


async def test_the_edits_of_claude_code_leave_a_cached_prompt_alone(bench: Bench) -> None:
    calls = THOUGHT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'
    bench.say(calls, ANSWER)
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
    fields: Json = {"thinking": {"type": "adaptive"}, "context_management": {"edits": edits}}
    first = await bench.message(messages=[user("Look.")], **fields)
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "blue"}
    turn = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = await bench.message(messages=[user("Look."), *turn], **fields)
    assert bench.prompts[1].startswith(bench.prompts[0] + calls)
    assert (text_in(second["content"]), second["context_management"]) == ("ok", {"applied_edits": []})


# -- compaction

POT = "The porcelain pot is empty. " * 200
HISTORY = [user("Is there tea?"), {"role": "assistant", "content": POT}, user("Then make some.")]
REMOVED = ("porcelain", "Sum up our conversation", "Hm.")


def compact(**fields: Any) -> Json:
    edit = {"type": "compact_20260112", "trigger": tokens(1000), **fields}
    return {"context_management": {"edits": [edit]}, "system": "Be brief."}


def assert_replaced(prompt: str, *texts: str) -> None:
    assert [text for text in REMOVED if text in prompt] == []
    assert [prompt.count(text) for text in texts] == [1] * len(texts)
    assert sorted(texts, key=prompt.index) == list(texts)


KEPT = ("Be brief.", "Is there tea?", SUMMARY, "Then make some.")


@both_forms
async def test_a_long_conversation_is_compacted_before_its_answer(bench: Bench, stream: bool) -> None:
    bench.say(SUMMARIZED, ANSWER)
    first = await bench.message(messages=HISTORY, stream=stream, **compact())
    block, text = first["content"]
    assert (block["type"], block["content"], text["text"]) == ("compaction", SUMMARY, "ok")
    assert (first["stop_reason"], first["context_management"]) == ("end_turn", {"applied_edits": []})
    summarizing, answering = bench.prompts
    assert "Sum up our conversation" in summarizing
    assert_replaced(answering, *KEPT)
    # The summary is an iteration of its own, and no part of the usage of the answer.
    compaction, answer = first["usage"]["iterations"]
    assert (compaction["type"], answer["type"]) == ("compaction", "message")
    assert compaction["input_tokens"] > answer["input_tokens"] == first["usage"]["input_tokens"]
    assert answer["output_tokens"] == first["usage"]["output_tokens"]
    # The client sends the whole history again, with the block.
    messages = [*HISTORY, {"role": "assistant", "content": first["content"]}, user("And now?")]
    counted = await bench.count(messages=messages, **compact())
    second = await bench.message(messages=messages, stream=stream, **compact())
    assert_replaced(bench.prompts[-1], *KEPT, "<|message|>ok<|end|>", "And now?")
    assert bench.prompts[-1].startswith(answering.removesuffix("<|start|>assistant"))
    assert len(bench.prompts) == 3
    assert counted["input_tokens"] == second["usage"]["input_tokens"] + second["usage"]["cache_read_input_tokens"]


@both_forms
async def test_an_answer_may_pause_after_the_compaction(bench: Bench, stream: bool) -> None:
    bench.say(SUMMARIZED, ANSWER)
    paused = await bench.message(
        messages=HISTORY, stream=stream, **compact(pause_after_compaction=True, instructions="Name every pot.")
    )
    assert ([block["type"] for block in paused["content"]], paused["stop_reason"]) == (["compaction"], "compaction")
    assert paused["usage"]["output_tokens"] == 0
    [iteration] = paused["usage"]["iterations"]
    assert (iteration["type"], iteration["output_tokens"] > 0) == ("compaction", True)
    assert bench.prompts[0].count("Name every pot.") == bench.prompts[0].count("Sum up our conversation") == 1
    block = {"role": "assistant", "content": paused["content"]}
    # Sent back as it is, with the newest messages once more, or without the encrypted content.
    await bench.message(messages=[*HISTORY, block], **compact())
    assert_replaced(bench.prompts[-1], *KEPT)
    await bench.message(messages=[block, HISTORY[-1]], **compact())
    assert_replaced(bench.prompts[-1], *KEPT)
    foreign = {"role": "assistant", "content": [{"type": "compaction", "content": SUMMARY}]}
    await bench.message(messages=[*HISTORY, foreign, user("And now?")], **compact())
    assert_replaced(bench.prompts[-1], "Be brief.", SUMMARY, "And now?")
    assert "Is there tea?" not in bench.prompts[-1]


@pytest.mark.parametrize("is_whole", [True, False], ids=["all messages", "only the block"])
@both_forms
async def test_a_tool_that_was_removed_before_a_compaction_is_refused(
    bench: Bench, stream: bool, is_whole: bool
) -> None:
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    history = [*HISTORY[:2], {"role": "system", "content": [removal]}, HISTORY[2]]
    bench.say(
        SUMMARIZED, ANSWER, "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>", ANSWER
    )
    first = await bench.message(messages=history, stream=stream, **compact())
    assert first["content"][0]["tool_changes"] == [removal]
    block = {"role": "assistant", "content": first["content"]}
    second = await bench.message(messages=[*(history if is_whole else []), block, user("Now?")], stream=stream)
    assert [each["type"] for each in second["content"]] == ["text"]
    assert "There is no tool 'look'. Call one of these instead" in bench.prompts[-1]
    assert bench.prompts[-1].count("do not call this tool: look") == 1


@both_forms
async def test_a_client_may_compact_at_any_time(bench: Bench, stream: bool) -> None:
    bench.say(SUMMARIZED, ANSWER)
    fields: Json = {"messages": HISTORY[:2], "compaction": {"type": "summarize"}}
    counted = await bench.count(**fields)
    summarized = await bench.message(**fields, stream=stream)
    assert counted["input_tokens"] == summarized["usage"]["iterations"][0]["input_tokens"]
    [block] = summarized["content"]
    assert (block["content"], summarized["stop_reason"]) == (SUMMARY, "compaction")
    await bench.message(messages=[{"role": "assistant", "content": [block]}, HISTORY[2]], system="Be brief.")
    assert_replaced(bench.prompts[-1], *KEPT)


async def test_a_call_without_a_result_stays_after_the_summary(bench: Bench) -> None:
    bench.say(SUMMARIZED, ANSWER)
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"into": "cup"}}
    summarized = await bench.message(
        messages=[*HISTORY, {"role": "assistant", "content": [use]}], compaction={"type": "summarize"}
    )
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Empty."}
    block = {"role": "assistant", "content": summarized["content"]}
    message = await bench.message(messages=[block, {"role": "user", "content": [result]}], system="Be brief.")
    assert_replaced(bench.prompts[-1], "Be brief.", SUMMARY, '{"into":"cup"}', "<|start|>functions.look to", "Empty.")
    assert "notes" not in message["unisono"]


@pytest.mark.parametrize("is_repeated", [False, True], ids=["once", "sent again"])
async def test_a_result_without_an_answer_stays_after_the_summary(bench: Bench, is_repeated: bool) -> None:
    bench.say(SUMMARIZED, ANSWER)
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"into": "cup"}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Empty."}]}
    summarized = await bench.message(
        messages=[*HISTORY, {"role": "assistant", "content": [use]}, result], compaction={"type": "summarize"}
    )
    block = {"role": "assistant", "content": summarized["content"]}
    later = [result] if is_repeated else [user("And now?")]
    message = await bench.message(messages=[block, *later], system="Be brief.")
    assert_replaced(bench.prompts[-1], "Be brief.", SUMMARY, '{"into":"cup"}', "<|start|>functions.look to", "Empty.")
    assert "notes" not in message["unisono"]


async def test_a_preamble_between_pending_calls_does_not_separate_them_from_their_results(bench: Bench) -> None:
    bench.say(SUMMARIZED, ANSWER)
    uses = [{"type": "tool_use", "id": f"toolu_{n}", "name": "look", "input": {"into": f"cup {n}"}} for n in (1, 2)]
    calls = [uses[0], {"type": "text", "text": "Then the other."}, uses[1]]
    summarized = await bench.message(
        messages=[*HISTORY, {"role": "assistant", "content": calls}], compaction={"type": "summarize"}
    )
    results = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"Empty {n}."} for n in (1, 2)]
    block = {"role": "assistant", "content": summarized["content"]}
    await bench.message(messages=[block, {"role": "user", "content": results}])
    assert_replaced(bench.prompts[-1], SUMMARY, "cup 1", "Empty 1.", "Then the other.", "cup 2", "Empty 2.")


@pytest.mark.parametrize("place", ["same message", "next message"])
async def test_calls_that_follow_their_compaction_again_appear_once(bench: Bench, place: str) -> None:
    bench.say(SUMMARIZED, ANSWER)
    calls = [{"type": "tool_use", "id": f"toolu_{n}", "name": "look", "input": {"into": f"cup {n}"}} for n in (1, 2)]
    calls.insert(0, {"type": "text", "text": "I look again."})
    summarized = await bench.message(
        messages=[*HISTORY, {"role": "assistant", "content": calls}], compaction={"type": "summarize"}
    )
    results = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"Empty {n}."} for n in (1, 2)]
    contents = [[*summarized["content"], *calls]] if place == "same message" else [summarized["content"], calls]
    messages = [{"role": "assistant", "content": content} for content in contents]
    await bench.message(messages=[*messages, {"role": "user", "content": results}])
    assert_replaced(bench.prompts[-1], SUMMARY, "I look again.", "cup 1", "Empty 1.", "cup 2", "Empty 2.")


@both_forms
async def test_a_missing_summary_is_a_block_without_content(bench: Bench, stream: bool) -> None:
    bench.say(f"{THOUGHT}<|channel|>final<|message|><|return|>", ANSWER)
    message = await bench.message(messages=HISTORY, stream=stream, **compact())
    assert message["content"][0] == {"type": "compaction", "content": None, "encrypted_content": None}
    assert text_in(message["content"]) == "ok"
    assert "porcelain" in bench.prompts[-1]
    again = [*HISTORY, {"role": "assistant", "content": message["content"]}, user("And now?")]
    await bench.message(messages=again)
    assert "porcelain" in bench.prompts[-1]


async def test_a_compaction_follows_the_cleared_tool_uses(bench: Bench) -> None:
    bench.say(ANSWER)
    edits = [
        {"type": "clear_tool_uses_20250919", "trigger": tokens(100), "keep": tool_uses(0)},
        {"type": "compact_20260112", "trigger": tokens(700)},
    ]
    message = await bench.message(messages=LOOP, context_management={"edits": edits})
    assert [block["type"] for block in message["content"]] == ["text"]
    assert len(bench.prompts) == 1


INVALID: dict[str, tuple[Json, str]] = {
    "no object": ({"context_management": "all"}, "context_management"),
    "no list": ({"context_management": {"edits": {}}}, "context_management.edits"),
    "unknown type": ({"context_management": {"edits": [{"type": "forget"}]}}, "context_management.edits.0.type"),
    "no type": ({"context_management": {"edits": [{}]}}, "context_management.edits.0.type"),
    "no number": (clear(keep={"type": "tool_uses"}), "context_management.edits.0.keep.value"),
    "negative number": (clear(trigger=tokens(-1)), "context_management.edits.0.trigger.value"),
    "unknown trigger": (clear(trigger={"type": "time", "value": 1}), "context_management.edits.0.trigger.type"),
    "thinking without a number": (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]}},
        "context_management.edits.0.keep.value",
    ),
    "pause as text": (compact(pause_after_compaction="yes"), "context_management.edits.0.pause_after_compaction"),
    "unknown compaction": ({"compaction": {"type": "zip"}}, "compaction.type"),
    "both": ({"compaction": {"type": "summarize"}, **clear()}, "compaction"),
}


@pytest.mark.parametrize(("fields", "param"), INVALID.values(), ids=INVALID)
async def test_an_invalid_edit_is_refused_by_name(bench: Bench, fields: Json, param: str) -> None:
    answer = await bench.post(messages=HISTORY, **fields)
    assert answer.status == 400, answer.raw
    assert f"'{param}'" in answer.body["error"]["message"]
