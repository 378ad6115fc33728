"""The coding agents: binaries, settings without an account, and command lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Folder of the installed packages.
MODULES = ROOT / os.environ.get("AGENTS_HOME", ".envs/agents") / "node_modules"
NUMBERS = [sys.executable, str(Path(__file__).with_name("numbers_server.py"))]


@dataclass(frozen=True)
class AgentSettings:
    """Settings of a session. An empty model leaves the choice to the agent."""

    url: str
    home: Path
    model: str = "gpt-oss-120b"
    # Name of the provider in Codex's configuration, which decides how it compacts.
    provider: str = "Unisono"
    # Prompt tokens at which Codex compacts by itself, or the context window that the others are told.
    compact_at: int | None = None
    max_output: int = 32_000
    has_numbers: bool = False
    # Library by which opencode talks to the gateway, which decides the API.
    sdk: str = "@ai-sdk/openai-compatible"
    # Kinds of input that opencode may send.
    inputs: Sequence[str] = ("text",)
    env: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    `configure` writes its settings and returns its environment. `arguments` are those of a run with a prompt, which
    starts a session or continues the last one.
    """

    name: str
    binary: str
    configure: Callable[[AgentSettings], Mapping[str, str]]
    arguments: Callable[[AgentSettings, str, bool], Sequence[str]]

    @property
    def path(self) -> Path:
        """Path of the binary in the package of this platform."""
        found = sorted(MODULES.glob(self.binary))
        assert found, f"no {self.binary} in {MODULES}: run `make test-agents`"
        return found[0]


def _codex_settings(settings: AgentSettings) -> Mapping[str, str]:
    lines = [
        *([f'model = "{settings.model}"'] if settings.model else []),
        'model_provider = "gateway"',
        *([f"model_auto_compact_token_limit = {settings.compact_at}"] if settings.compact_at else []),
        "[model_providers.gateway]",
        f'name = "{settings.provider}"',
        f'base_url = "{settings.url}/v1"',
        'env_key = "GATEWAY_KEY"',
    ]
    if settings.has_numbers:
        command, *arguments = map(json.dumps, NUMBERS)
        lines += [
            "[mcp_servers.numbers]",
            f"command = {command}",
            f"args = [{', '.join(arguments)}]",
            # Without it, the first prompt does not wait for the server.
            "required = true",
        ]
    (settings.home / "config.toml").write_text("\n".join(lines) + "\n")
    return {"CODEX_HOME": str(settings.home), "GATEWAY_KEY": "none"}


def _codex_arguments(settings: AgentSettings, prompt: str, is_continued: bool) -> Sequence[str]:
    # The container is the sandbox.
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["exec", *(["resume", "--last"] if is_continued else []), *flags, prompt]


def _claude_settings(settings: AgentSettings) -> Mapping[str, str]:
    servers = {"numbers": {"command": NUMBERS[0], "args": NUMBERS[1:]}} if settings.has_numbers else {}
    (settings.home / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return {
        "CLAUDE_CONFIG_DIR": str(settings.home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(settings.max_output),
        "ANTHROPIC_BASE_URL": settings.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": settings.model,
        **({"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(settings.compact_at)} if settings.compact_at else {}),
        # Allows to skip permissions as root.
        "IS_SANDBOX": "1",
    }


def _claude_arguments(settings: AgentSettings, prompt: str, is_continued: bool) -> Sequence[str]:
    flags = ["--dangerously-skip-permissions", "--strict-mcp-config", "--mcp-config", str(settings.home / "mcp.json")]
    return [*(["-c"] if is_continued else []), "-p", prompt, *flags]


def _opencode_settings(settings: AgentSettings) -> Mapping[str, str]:
    window = {"context": settings.compact_at or 131_072, "output": settings.max_output}
    provider = {
        "npm": settings.sdk,
        "options": {"baseURL": f"{settings.url}/v1", "apiKey": "none"},
        "models": {settings.model: {"limit": window, "modalities": {"input": settings.inputs, "output": ["text"]}}},
    }
    numbers = {"numbers": {"type": "local", "command": NUMBERS}} if settings.has_numbers else {}
    path = settings.home / "opencode.json"
    path.write_text(
        json.dumps(
            {
                "model": f"gateway/{settings.model}",
                "autoupdate": False,
                "share": "disabled",
                "permission": "allow",
                "provider": {"gateway": provider},
                "mcp": numbers,
            }
        )
    )
    return {"OPENCODE_CONFIG": str(path), "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def _opencode_arguments(settings: AgentSettings, prompt: str, is_continued: bool) -> Sequence[str]:
    return ["run", *(["--continue"] if is_continued else []), prompt]


_EVERY = (
    Agent("codex", "@openai/codex-*/vendor/*/bin/codex", _codex_settings, _codex_arguments),
    Agent("claude", "@anthropic-ai/claude-code-*/claude", _claude_settings, _claude_arguments),
    Agent("opencode", "opencode-*/bin/opencode", _opencode_settings, _opencode_arguments),
)
AGENTS = {agent.name: agent for agent in _EVERY}
