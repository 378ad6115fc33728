"""Real coding agents complete sessions through the gateway.

Each session is played by the scripted model, which decides from its prompt. The prompts of a failed session are in the
folder `prompts` of its temporary folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agents import AGENTS
from tests.agents.policy import NEXT, SENTENCES
from tests.agents.sessions import RUN_TIMEOUT_S, AgentSession, Exchange, end_group, session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * RUN_TIMEOUT_S)]

# Final answer to each task.
ANSWERS = {
    "edit": "calc.py is fixed.",
    "recall": "I fixed calc.py.",
    "image": "I cannot see red.png.",
    "number": "Number 137 is 18769.",
    "parallel": "LEFT and RIGHT.",
    "sum": "The sum is 204.",
    "poem": "The poem is in poem.txt.",
}
# Codex sends other tools for the names of its own list. Without a name, it chooses one.
CODEX_MODELS = ("gpt-oss-120b", "gpt-5.5", "gpt-6.1-terra", "")
# Libraries of opencode for Chat Completions, Responses and Messages.
SDKS = ("@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic")
BASIC = ("edit recall", "image edit", "number")


@dataclass(frozen=True)
class Case:
    """A session: its tasks, each a run of the agent; all but the first continue the session.

    `failure` is what the first run reports instead of an answer, `code` its exit code. `summary` is a text of the
    prompt by which the agent or the gateway compacts the conversation.
    """

    agent: str
    tasks: str
    options: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    code: int = 0
    summary: str = ""

    def __str__(self) -> str:
        return "-".join([self.agent, *self.tasks.split(), *map(str, self.options.values())])


def cases() -> Iterator[Case]:
    for tasks in BASIC:
        yield from (Case("codex", tasks, {"model": model}) for model in CODEX_MODELS)
        yield Case("claude", tasks)
        yield from (Case("opencode", tasks, {"sdk": sdk}) for sdk in SDKS)
    # Pictures by each API. A tool result of Chat Completions has no pictures, so opencode sends them as the user.
    yield from (Case("opencode", "image edit", {"inputs": ("text", "image"), "sdk": sdk}) for sdk in SDKS)
    # Compaction by an ordinary request, or by an item that asks the gateway for it.
    yield Case("codex", "sum", {"compact_at": 24_000}, summary="CONTEXT CHECKPOINT")
    yield Case("codex", "sum", {"compact_at": 24_000, "provider": "OpenAI"}, summary="Sum up our conversation")
    # Compaction after the gateway refused a prompt, and by the agent's own count.
    yield Case("claude", "sum", {"window": 70_000}, summary="Respond with TEXT ONLY")
    yield Case("opencode", "sum", {"window": 60_000}, summary="Here is the conversation so far", code=1)
    yield Case("claude", "sum", {"compact_at": 70_000, "max_output": 4_096}, summary="Respond with TEXT ONLY")
    limits = {"compact_at": 48_000, "max_output": 4_096}
    yield Case("opencode", "sum", limits, summary="Here is the conversation so far")
    # A call that is cut by the token limit. Claude Code asks the model to continue, the others end the run.
    yield Case("codex", "poem edit", {"window": 10_000}, failure="Incomplete response", code=1)
    yield Case("claude", "poem edit", {"max_output": 1_000})
    yield Case("opencode", "poem edit", {"max_output": 1_000}, failure="")


@pytest.fixture(autouse=True)
def _no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test whose gateway logs an error."""
    yield
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("case", tuple(cases()), ids=str)
async def test_an_agent_completes_a_session(tmp_path: Path, case: Case) -> None:
    tasks = case.tasks.split()
    async with session(AGENTS[case.agent], tmp_path, has_numbers="number" in tasks, **case.options) as running:
        for place, task in enumerate(tasks):
            run = await running.ask(SENTENCES[task])
            if place == 0 and case.failure is not None:
                assert (run.code, case.failure in run.log, ANSWERS[task] in run.text) == (case.code, True, False), run
            else:
                assert (run.code, ANSWERS[task] in run.text) == (0 if place else case.code, True), run
        assert ("a + b" in (running.folder / "calc.py").read_text()) == ("edit" in tasks)
        summaries = [exchange for exchange in running.model.exchanges if case.summary in exchange.view.last_user_text]
        assert summaries
        assert broken_prefixes(running.model.exchanges) == []


def broken_prefixes(exchanges: Sequence[Exchange]) -> list[int]:
    """Return the places of prompts that do not begin with the prompt before them.

    A new message of the user may replace text: reasoning of finished turns, or a whole conversation by its summary.
    """
    return [
        place
        for place, (before, after) in enumerate(pairwise(exchanges), 1)
        if before.view.tools
        and before.view.user_texts == after.view.user_texts
        and after.prompt[: len(before.prompt)] != before.prompt
    ]


# Sessions whose agent sends 200 tools that the model must find first.
DEFERRED = {
    "claude": ("claude", {}),
    "claude-on": ("claude", {"env": {"ENABLE_TOOL_SEARCH": "true"}}),
    "codex": ("codex", {"model": "gpt-5.5"}),
}


@pytest.mark.parametrize(("name", "options"), DEFERRED.values(), ids=DEFERRED)
async def test_a_deferred_tool_is_declared_when_it_was_found(tmp_path: Path, name: str, options: Any) -> None:
    async with session(AGENTS[name], tmp_path, has_numbers=True, **options) as running:
        run = await running.ask(SENTENCES["number"])
        assert ANSWERS["number"] in run.text, run
        first, *later = [exchange.view.tools.keys() for exchange in running.model.main]
        assert {tool for tool in first if "number_" in tool} == set()
        assert [{"mcp__numbers__number_137"} <= tools for tools in later] == [True, True]
        assert broken_prefixes(running.model.exchanges) == []


# Sessions whose agent declares all 200 tools at once.
DECLARED = {
    "claude-off": ("claude", {"env": {"ENABLE_TOOL_SEARCH": "false"}}),
    "codex": ("codex", {"model": "gpt-oss-120b"}),
    "opencode": ("opencode", {}),
}


@pytest.mark.parametrize(("name", "options"), DECLARED.values(), ids=DECLARED)
async def test_two_hundred_tools_are_declared_at_once(tmp_path: Path, name: str, options: Any) -> None:
    async with session(AGENTS[name], tmp_path, has_numbers=True, **options) as running:
        run = await running.ask(SENTENCES["number"])
        assert ANSWERS["number"] in run.text, run
        assert len([tool for tool in running.model.main[0].view.tools if "number_" in tool]) == 200
        assert len(running.model.main) == 2


# Number of prompts of a session with two calls in one message. `exec` of Codex takes one call at a time.
PARALLEL = {
    "codex": ("codex", {}, 2),
    "codex-exec": ("codex", {"model": "gpt-6.1-terra"}, 3),
    "claude": ("claude", {}, 2),
    **{f"opencode-{sdk}": ("opencode", {"sdk": sdk}, 2) for sdk in SDKS},
}


@pytest.mark.parametrize(("name", "options", "prompts"), PARALLEL.values(), ids=PARALLEL)
async def test_two_calls_in_one_message_both_run(tmp_path: Path, name: str, options: Any, prompts: int) -> None:
    async with session(AGENTS[name], tmp_path, **options) as running:
        run = await running.ask(SENTENCES["parallel"])
        assert ANSWERS["parallel"] in run.text, run
        # Without the requests that continue a message under the grammar of its tool.
        assert len([each for each in running.model.main if each.view.text.endswith(NEXT)]) == prompts
        assert broken_prefixes(running.model.exchanges) == []


@pytest.mark.parametrize("name", AGENTS)
async def test_an_interrupt_cancels_the_generation(tmp_path: Path, name: str) -> None:
    async with session(AGENTS[name], tmp_path) as running:
        process = await running.start(SENTENCES["count"])
        try:
            await first_tokens(running)
            # As Ctrl-C in a terminal, which reaches the whole process group.
            os.killpg(process.pid, signal.SIGINT)
            place = running.model.exchanges.index(running.model.main[0])
            await running.backend.gone(place)
            async with asyncio.timeout(RUN_TIMEOUT_S):
                await process.communicate()
        finally:
            await end_group(process)
        run = await running.ask(SENTENCES["edit"])
        assert (run.code, ANSWERS["edit"] in run.text) == (0, True), run


async def first_tokens(running: AgentSession) -> None:
    """Wait until the model writes its answer."""
    async with asyncio.timeout(RUN_TIMEOUT_S):
        while not running.model.main:
            await asyncio.sleep(0.05)
    # The first tokens have to reach the agent.
    await asyncio.sleep(0.5)
