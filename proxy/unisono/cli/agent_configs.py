"""Configurations that let other programs use a gateway, for `unisono config` and `launch`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Final

from unisono.core.frozen import dataclass

MAX_OUTPUT_TOKENS: Final = 32_768
# An answer may use at most the context window divided by this number.
OUTPUT_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class GatewayTarget:
    """Model that a gateway serves, with everything a program needs in order to use the model.

    `url` does not end in `/v1`, `context` is the context window in tokens, and `key_env` is the name of the environment
    variable that contains the key.
    """

    url: str
    model: str
    context: int
    key_env: str

    @property
    def output(self) -> int:
        return min(MAX_OUTPUT_TOKENS, self.context // OUTPUT_SHARE)

    @property
    def key_expression(self) -> str:
        """Shell expression that expands to the key, or to `none` if the variable is not set.

        A gateway without keys accepts any text as the key, but programs require one.
        """
        return f'"${{{self.key_env}:-none}}"'


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """Text that configures a program, and a remark that tells the user where to put the text.

    `comment` is the prefix that starts a comment in the language of the text. `place` is the remark, in which
    `{key_env}` is replaced with the name of the environment variable.
    """

    comment: str
    place: str
    text: Callable[[GatewayTarget], str]

    def render(self, target: GatewayTarget) -> str:
        remark = self.place.format(key_env=target.key_env)
        return "".join(f"{self.comment} {line}\n" for line in remark.splitlines()) + self.text(target)


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """Command that starts an agent: npm package, arguments, and environment variables.

    `variables` is called with the target and the key. Variables with the value None are removed from the environment.
    """

    package: str
    arguments: Callable[[GatewayTarget], list[str]]
    variables: Callable[[GatewayTarget, str], Mapping[str, str | None]]


# A JSON string is also a valid string in TOML and YAML.
def _quoted(value: str) -> str:
    return json.dumps(value)


def _codex_settings(target: GatewayTarget) -> dict[str, str]:
    provider = {
        "name": "Unisono",
        "base_url": f"{target.url}/v1",
        # Codex requests its model catalogue only from this address.
        "model_catalog_url": f"{target.url}/v1/models",
        "env_key": target.key_env,
    }
    return {
        "model": target.model,
        "model_provider": "unisono",
        **{f"model_providers.unisono.{name}": value for name, value in provider.items()},
    }


def _codex_text(target: GatewayTarget) -> str:
    table = "model_providers.unisono"
    settings = _codex_settings(target)
    head = [f"{name} = {_quoted(value)}" for name, value in settings.items() if "." not in name]
    provider = [
        f"{name.rpartition('.')[2]} = {_quoted(value)}" for name, value in settings.items() if name.startswith(table)
    ]
    return "\n".join((*head, "", f"[{table}]", *provider, ""))


def _codex_arguments(target: GatewayTarget) -> list[str]:
    return [part for name, value in _codex_settings(target).items() for part in ("-c", f"{name}={_quoted(value)}")]


def _claude_variables(target: GatewayTarget) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_MODEL": target.model,
        # Models for short background tasks, and for agents that the agent starts.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        # Claude Code 2.1.331 assumes a million tokens for models that it does not know.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
    }


def _claude_text(target: GatewayTarget) -> str:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in _claude_variables(target).items()]
    token = f"export ANTHROPIC_AUTH_TOKEN={target.key_expression}"
    # If ANTHROPIC_API_KEY is set, Claude Code sends this key to the gateway too.
    return "\n".join((lines[0], token, "unset ANTHROPIC_API_KEY", *lines[1:], ""))


def _opencode_settings(target: GatewayTarget) -> dict[str, Any]:
    name = f"unisono/{target.model}"
    model = {
        "name": target.model,
        "reasoning": True,
        "tool_call": True,
        "attachment": False,
        "limit": {"context": target.context, "output": target.output},
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "provider": {
            "unisono": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Unisono",
                "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{target.key_env}}}"},
                "models": {target.model: model},
            }
        },
    }


def _open_webui_text(target: GatewayTarget) -> str:
    return (
        f"export OPENAI_API_BASE_URL={shlex.quote(f'{target.url}/v1')}\n"
        f"export OPENAI_API_KEY={target.key_expression}\n"
        f"export DEFAULT_MODELS={shlex.quote(target.model)}\n"
    )


def _continue_text(target: GatewayTarget) -> str:
    return f"""\
name: Unisono
version: 1.0.0
schema: v1
models:
  - name: {_quoted(target.model)}
    provider: openai
    model: {_quoted(target.model)}
    apiBase: {_quoted(f"{target.url}/v1")}
    apiKey: ${{{{ secrets.{target.key_env} }}}}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {target.context}
      maxTokens: {target.output}
"""


PROGRAMS: Final[Mapping[str, ProgramConfig]] = {
    "codex": ProgramConfig(
        "#",
        "For ~/.codex/config.toml. Codex reads the key from {key_env}, which must be set: to a key of the gateway,\n"
        "or to any text if it has none.",
        _codex_text,
    ),
    "claude": ProgramConfig(
        "#",
        "Run these lines before `claude`, or put them into the profile of your shell, such as ~/.bashrc. Set\n"
        "{key_env} to a key of the gateway first, if it has any.",
        _claude_text,
    ),
    "opencode": ProgramConfig(
        "//",
        "For ~/.config/opencode/opencode.json, or for opencode.json in the folder of a project. Set {key_env} to a\n"
        "key of the gateway, if it has any.",
        lambda target: json.dumps(_opencode_settings(target), indent=2) + "\n",
    ),
    "open-webui": ProgramConfig(
        "#",
        "Run these lines before the first start of Open WebUI. Later, the settings in its database take precedence:\n"
        "change them under Admin Panel, Settings, Connections.",
        _open_webui_text,
    ),
    "continue": ProgramConfig(
        "#",
        "For ~/.continue/config.yaml. Put the key of the gateway, or any text, into ~/.continue/.env: {key_env}=...",
        _continue_text,
    ),
}

LAUNCHES: Final[Mapping[str, AgentLaunch]] = {
    "codex": AgentLaunch("@openai/codex", _codex_arguments, lambda target, key: {}),
    "claude": AgentLaunch(
        "@anthropic-ai/claude-code",
        lambda target: [],
        lambda target, key: {
            **_claude_variables(target),
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_API_KEY": None,
        },
    ),
    "opencode": AgentLaunch(
        "opencode-ai",
        lambda target: [],
        # opencode merges this variable with the configuration files of the user.
        lambda target, key: {"OPENCODE_CONFIG_CONTENT": json.dumps(_opencode_settings(target))},
    ),
}
