"""`unisono trace --fork-at` against a server with a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.fakes import FakeVllm
from tests.fakes.language_model import Distribution, LanguageModel
from unisono.cli import main
from unisono.core.conversation import Effort
from unisono.errors import InvalidRequest
from unisono.harmony.encoding import load_encoding
from unisono.web.trace_fork import with_effort, with_tool_result

ENCODING = load_encoding()
PROMPT = ENCODING.encode_marked(
    "<|start|>system<|message|>Hi.\nReasoning: medium\n<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant"
)
CALLED = ENCODING.encode_marked(
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>old<|end|><|start|>assistant"
)
ANSWER = LanguageModel().greedy(PROMPT)


def later_fault(prompt: Sequence[int], position: int, distribution: Distribution) -> Distribution:
    return {4711: -0.1} if position == 7 else distribution


async def forked(tmp_path: Path, server: FakeVllm, position: int, *arguments: str) -> Result:
    document = {
        "object": "unisono.trace",
        "version": 1,
        "backend": "vllm-1",
        "steps": [{"step": 0, "prompt": {"same": 0, "tokens": PROMPT, "gap": None}}],
        "output": ANSWER,
    }
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(document))
    command = ["trace", str(path), "--fork-at", str(position), "--backend", f"vllm/tiny@{server.url}", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, main, command)


@pytest.mark.parametrize("position", [0, 5, len(ANSWER) - 1])
async def test_an_unchanged_fork_reproduces_the_answer(position: int, tmp_path: Path) -> None:
    async with FakeVllm(script=LanguageModel().script) as server:
        result = await forked(tmp_path, server, position, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["same"]
    assert found["forked"] == found["recorded"] == ANSWER[position:]


async def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    async with FakeVllm(script=LanguageModel(later_fault).script) as server:
        result = await forked(tmp_path, server, 3)
        outside = await forked(tmp_path, server, len(ANSWER))
    assert "first difference at token 7\n" in result.stdout
    assert outside.exit_code == 1
    assert f"there is no token {len(ANSWER)}" in outside.stderr


async def test_changes_reach_the_prompt(tmp_path: Path) -> None:
    async with FakeVllm(script=LanguageModel().script) as server:
        await forked(tmp_path, server, 4, "--effort", "high")
        [asked] = [seen.json for seen in server.requests]
    assert ENCODING.decode(asked["prompt"]) == ENCODING.decode([*PROMPT, *ANSWER[:4]]).replace("medium", "high")


def test_the_last_tool_result_is_replaced() -> None:
    changed = with_tool_result(ENCODING, [*PROMPT, *CALLED, *CALLED], "new <|end|>")
    text = ENCODING.decode(changed)
    assert text.count("<|message|>old<|end|>") == text.count("<|message|>new <|end|><|end|>") == 1
    # A marker in the text stays text.
    assert len(ENCODING.special_ids(changed)) == len(ENCODING.special_ids([*PROMPT, *CALLED, *CALLED]))


def test_what_is_not_in_the_prompt_cannot_be_replaced() -> None:
    with pytest.raises(InvalidRequest, match="no tool result"):
        with_tool_result(ENCODING, PROMPT, "x")
    with pytest.raises(InvalidRequest, match="no line with the reasoning effort"):
        with_effort(ENCODING, CALLED, Effort.LOW)
