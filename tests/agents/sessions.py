"""One agent in a working directory of its own, before a gateway whose backend is the scripted model."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.agents.agents import Agent, AgentSettings
from tests.agents.policy import PARTS, answer, final
from tests.agents.prompt_view import PromptView
from tests.agents.wire_log import WireLog
from tests.agents.wire_shapes import SESSION_FILE, write_session
from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
RUN_TIMEOUT_S = 90.0
KILL_TIMEOUT_S = 10.0
MAX_EXCHANGES = 60
# Names that agents ask for besides the configured model.
ALIASES = ("gpt-5.5", "gpt-6.1-terra", "gpt-6.1-sol", "codex-auto-review", "claude-haiku-4-5")


@dataclass(frozen=True)
class Exchange:
    """A prompt and the output of the model, as tokens and as text."""

    prompt: Sequence[int]
    output: Sequence[int]

    @cached_property
    def view(self) -> PromptView:
        return PromptView(ENCODING.decode(self.prompt))


@dataclass
class ScriptedModel:
    """Model behind a fake vLLM, and its exchanges."""

    exchanges: list[Exchange] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def script(self, request: dict[str, Any]) -> VllmScript:
        prompt = request["prompt"]
        try:
            if len(self.exchanges) >= MAX_EXCHANGES:
                raise LookupError("the session does not end")
            output = answer(ENCODING.decode(prompt))
        except LookupError as error:
            self.failures.append(str(error))
            output = final(str(error))
        tokens = ENCODING.encode_marked(output.text)
        self.exchanges.append(Exchange(prompt, tokens))
        return VllmScript(tokens=tokens, delay_s=output.delay_s)

    def write(self, folder: Path) -> None:
        """Write all exchanges to files, for the study of a failure."""
        folder.mkdir()
        for number, exchange in enumerate(self.exchanges):
            text = f"{exchange.view.text}\n=====\n{ENCODING.decode(exchange.output)}\n"
            (folder / f"{number:03}.txt").write_text(text)

    @property
    def main(self) -> list[Exchange]:
        """Exchanges with tools, without those for titles."""
        return [exchange for exchange in self.exchanges if exchange.view.tools]


@dataclass(frozen=True)
class AgentRun:
    """Outcome of a run."""

    code: int
    text: str
    log: str


@dataclass
class AgentSession:
    agent: Agent
    settings: AgentSettings
    folder: Path
    model: ScriptedModel
    backend: FakeVllm
    is_begun: bool = False

    async def ask(self, prompt: str) -> AgentRun:
        """Run the agent with a prompt; all runs but the first one continue the session."""
        process = await self.start(prompt)
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                text, log = await process.communicate()
        finally:
            await end_group(process)
        assert process.returncode is not None
        return AgentRun(process.returncode, text.decode(), log.decode())

    async def start(self, prompt: str) -> asyncio.subprocess.Process:
        variables = self.agent.configure(self.settings)
        system = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        arguments = self.agent.arguments(self.settings, prompt, self.is_begun)
        self.is_begun = True
        return await asyncio.create_subprocess_exec(
            *(str(self.agent.path), *arguments),
            cwd=self.folder,
            env={**system, "HOME": str(self.settings.home), **variables, **(self.settings.env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A process group of its own, so that its tools end with it.
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )


def _heed_interrupts() -> None:
    """Restore the default action of SIGINT in a child, which ignores it if the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def end_group(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the process group of an agent."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    async with asyncio.timeout(KILL_TIMEOUT_S):
        await process.wait()


def png() -> bytes:
    """Return a picture of 8 by 8 red pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xff\0\0" * 8) * 8)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def write_workspace(folder: Path) -> None:
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "check.py").write_text("from calc import add\n\nassert add(2, 3) == 5\nprint('CHECK', 'PASSED')\n")
    (folder / "left.txt").write_text("LEFT\n")
    (folder / "right.txt").write_text("RIGHT\n")
    (folder / "red.png").write_bytes(png())
    filler = "".join(f"Line {number} of this part has no value at all.\n" for number in range(800))
    for part in range(1, PARTS + 1):
        (folder / f"part{part}.txt").write_text(f"VALUE {part} = {part * part}\n{filler}")


@asynccontextmanager
async def session(
    agent: Agent, root: Path, window: int | None = None, unisono: Any = None, **options: Any
) -> AsyncIterator[AgentSession]:
    """Run a gateway for one agent.

    `window` is the context window of the model, `unisono` other settings of it. `options` are settings of the agent.
    """
    folder, home = root / "work", root / "home"
    folder.mkdir()
    home.mkdir()
    write_workspace(folder)
    model, log = ScriptedModel(), WireLog()
    async with FakeVllm(script=model.script) as backend:
        sections = {"router_settings": {"model_group_alias": dict.fromkeys(ALIASES, "gpt-oss-120b")}}
        config = config_of(f"vllm@{backend.url}", name="gpt-oss-120b", **sections)
        [entry] = config["model_list"]
        entry["unisono"] = unisono or {}
        if window is not None:
            entry["model_info"] = {"max_input_tokens": window}
        async with gateway(config, log.wrap) as running:
            try:
                yield AgentSession(agent, AgentSettings(running.url, home, **options), folder, model, backend)
            finally:
                model.write(root / "prompts")
                write_session(root / SESSION_FILE, agent.name, log.shape)
    assert not model.failures
