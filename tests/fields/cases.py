"""What `outcomes` needs to know about single fields: the requests around them, and effects that no answer shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]
WORD: Final = "porcelain"
# Stands for the address of the MCP server.
UPSTREAM: Final = "http://upstream/mcp"
_SCHEMA: Final = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
_CUP: Final = {"type": "object", "properties": {"size": {"type": "string"}}}
_FUNCTION: Final = {"name": WORD, "description": "A cup.", "parameters": _SCHEMA}
_SECOND: Final = {**_FUNCTION, "name": "glass"}
_CHAT_TOOLS: Final = [
    *({"type": "function", "function": each} for each in (_FUNCTION, _SECOND)),
    {"type": "custom", "custom": {"name": "paper"}},
]
_RESPONSES_TOOLS: Final = [
    *({"type": "function", **each} for each in (_FUNCTION, _SECOND)),
    {"type": "custom", "name": "paper"},
]
_MESSAGES_TOOLS: Final = [{"name": each, "input_schema": _SCHEMA} for each in (WORD, "glass")]
_SERVER: Final = {"type": "mcp", "server_label": WORD, "require_approval": "never"}
_NAMED_SERVER: Final = {"type": "url", "name": "named", "url": UPSTREAM}
_TOOLSET: Final[Json] = {
    "mcp_servers": [_NAMED_SERVER],
    "tools": [{"type": "mcp_toolset", "mcp_server_name": "named"}],
}
_CLEAR: Final = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}
_CLEAR_THINKING: Final = {"type": "clear_thinking_20251015"}
_COMPACT: Final = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}}


def _turn(number: int) -> list[Json]:
    """Return the messages of a call and its result."""
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": WORD, "input": {"number": number}}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "It is broken. " * 50}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


_CALLS: Final[Json] = {
    "messages": [{"role": "user", "content": "Count the cups."}, *(each for turn in range(6) for each in _turn(turn))],
    "tools": _MESSAGES_TOOLS,
}


@dataclass(frozen=True)
class Case:
    """A request in which a field can have an effect.

    The values in `fields` are added to the request of the row and win over it. `values` replace those of the row.
    """

    fields: Json = field(default_factory=dict)
    values: tuple[Any, ...] | None = None


def _edits(edit: Json) -> Json:
    return {**_CALLS, "context_management": {"edits": [edit]}}


# Requests for fields that have an effect only together with others, by API and path. The first pattern that matches
# the start of a path counts.
CASES: Final[Mapping[str, list[tuple[str, Case]]]] = {
    "chat": [
        (r"function_call\.", Case({"functions": [_FUNCTION]})),
        (r"function_call", Case({"functions": [_FUNCTION]}, ("none", "auto", {"name": WORD}, {}))),
        (r"logit_bias", Case(values=({"100": 5}, {}))),
        (r"modalities", Case(values=(["text", "audio"], ["text"], []))),
        (r"stream_options", Case({"stream": True})),
        (
            r"tool_choice$",
            Case(
                {"tools": _CHAT_TOOLS},
                (
                    *("none", "auto", "required", ""),
                    {"type": "function", "function": {"name": WORD}},
                    {"type": "custom", "custom": {"name": "paper"}},
                    {
                        "type": "allowed_tools",
                        "allowed_tools": {
                            "mode": "required",
                            "tools": [{"type": "function", "function": {"name": WORD}}],
                        },
                    },
                ),
            ),
        ),
        (r"tool_choice\[function\]", Case({"tools": _CHAT_TOOLS})),
        (r"tool_choice\[custom\]\.custom$", Case({"tools": _CHAT_TOOLS}, ({"name": "paper"}, {}))),
        (r"tool_choice\[custom\]", Case({"tools": _CHAT_TOOLS}, ("paper", ""))),
        (
            r"tool_choice\[allowed_tools\]\.allowed_tools$",
            Case(
                {"tools": _CHAT_TOOLS},
                ({"mode": "auto", "tools": [{"type": "function", "function": {"name": WORD}}]}, {}),
            ),
        ),
        (
            r"tool_choice\[allowed_tools\].*tools$",
            Case({"tools": _CHAT_TOOLS}, ([{"type": "function", "function": {"name": WORD}}], [])),
        ),
        (
            r"tool_choice\[allowed_tools\].*mode",
            Case(
                {
                    "tools": _CHAT_TOOLS,
                    "tool_choice": {
                        "type": "allowed_tools",
                        "allowed_tools": {"tools": [{"type": "function", "function": {"name": WORD}}]},
                    },
                }
            ),
        ),
        (r"top_logprobs", Case({"logprobs": True})),
    ],
    "responses": [
        (
            r"include",
            Case(
                {"reasoning": {"summary": "auto"}, "store": False},
                (["reasoning.encrypted_content"], ["file_search_call.results"], []),
            ),
        ),
        (r"context_management$", Case(values=([{"type": "compaction", "compact_threshold": 1000}], []))),
        (
            r"context_management",
            Case({"context_management": [{"type": "compaction", "compact_threshold": 2000}]}, (1000, 0)),
        ),
        (r"stream_options", Case({"stream": True})),
        (r"text\.format\[json_schema\]", Case({"text": {"format": {"name": "cup", "schema": _SCHEMA}}})),
        (
            r"tool_choice$",
            Case(
                {"tools": _RESPONSES_TOOLS},
                (
                    *("none", "auto", "required", ""),
                    {"type": "function", "name": WORD},
                    {"type": "custom", "name": "paper"},
                    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": WORD}]},
                ),
            ),
        ),
        (r"tool_choice\[function\]", Case({"tools": _RESPONSES_TOOLS})),
        (r"tool_choice\[custom\]", Case({"tools": _RESPONSES_TOOLS}, ("paper", ""))),
        (r"tool_choice\[mcp\]\.name", Case({"tools": [_SERVER]}, ("echo", ""))),
        (r"tool_choice\[mcp\]", Case({"tools": [_SERVER]})),
        (
            r"tool_choice\[allowed_tools\]\.tools",
            Case({"tools": _RESPONSES_TOOLS}, ([{"type": "function", "name": WORD}], [])),
        ),
        (
            r"tool_choice\[allowed_tools\].*mode",
            Case(
                {"tools": _RESPONSES_TOOLS, "tool_choice": {"tools": [{"type": "function", "name": WORD}]}},
            ),
        ),
        (r"tools\[function\]\.strict", Case({"tools": [{"parameters": _SCHEMA}]})),
        (r"tools\[mcp\]\.allowed_tools$", Case(values=(["echo"], [], {"read_only": True}, {}))),
        (r"tools\[mcp\]\.server_url", Case(values=(UPSTREAM, ""))),
        (r"tools\[namespace\].*parameters", Case(values=(_CUP, {}))),
        (r"tools\[tool_search\]\.parameters", Case({"tools": [{"execution": "client"}]}, (_SCHEMA, {}))),
        (r"tools\[tool_search\]\.description", Case({"tools": [{"execution": "client"}]})),
        (r"top_logprobs", Case({"include": ["message.output_text.logprobs"]})),
    ],
    "completions": [
        (r"logit_bias", Case(values=({"100": 5}, {}))),
        (r"stream_options", Case({"stream": True})),
        (r"suffix", Case(values=(WORD,))),
    ],
    "messages": [
        (r"context_management\.edits$", Case(_CALLS, ([_CLEAR], []))),
        (
            r".*clear_tool_uses_20250919\]\.clear_at_least$",
            Case(_edits(_CLEAR), ({"type": "input_tokens", "value": 10_000},)),
        ),
        (r".*clear_at_least\.value", Case(_edits(_CLEAR), (10_000, 0))),
        (r".*clear_tool_uses_20250919\]\.trigger$", Case(_edits({}), ({"type": "tool_uses", "value": 4},))),
        (r".*clear_tool_uses_20250919\]\.trigger\[", Case(_edits({}), (4, 0))),
        (r".*clear_tool_uses_20250919\]\.keep", Case(_edits(_CLEAR))),
        (r".*clear_tool_uses_20250919", Case(_edits(_CLEAR))),
        (r"fallbacks$", Case(values=([{"model": "gpt-oss-2"}], [], "default"))),
        (r"fallbacks\[\]\.model", Case(values=("gpt-oss-2", ""))),
        (r"mcp_servers$", Case(values=([_NAMED_SERVER], []))),
        (r"mcp_servers\[\]\.url", Case({"mcp_servers": [{"name": "named"}]}, (UPSTREAM, ""))),
        (r"mcp_servers\[\]\.tool_configuration\.allowed_tools", Case({"mcp_servers": [_NAMED_SERVER]}, (["echo"], []))),
        (r"mcp_servers\[\]", Case({"mcp_servers": [_NAMED_SERVER]})),
        (r"tool_choice", Case({"tools": _MESSAGES_TOOLS})),
        (
            r"tools\[tool_search",
            Case({"tools": [{}, {"name": WORD, "input_schema": _SCHEMA, "defer_loading": True}]}),
        ),
        (r"tools\[mcp_toolset\]\.mcp_server_name", Case({"mcp_servers": [_NAMED_SERVER]}, ("named", ""))),
        (r"tools\[mcp_toolset\]\.configs$", Case(_TOOLSET, ({"echo": {"enabled": False}}, {}))),
        (r"tools\[mcp_toolset\]\.configs", Case(_TOOLSET)),
        (r"tools\[mcp_toolset\]", Case(_TOOLSET)),
        (r"tools\[custom\]\.input_schema\.properties", Case(values=({WORD: {"type": "string"}}, {}))),
        (
            r"tools\[custom\]\.input_schema\.required",
            Case({"tools": [{"input_schema": {"properties": {WORD: {"type": "string"}}}}]}),
        ),
        (r"tools\[custom\]\.strict", Case({"tools": [{"input_schema": _SCHEMA}]})),
    ],
}

_STRICT: Final = "in effect: the arguments of calls conform to the schema"
_STRICT_FORM: Final = "in effect: the schema must be a strict schema"
_PARALLEL: Final = (
    "in effect: with one call at a time, an answer contains only its first call. The gateway drops later calls, but "
    "counts their tokens"
)
_CACHED: Final = "always in effect: backends cache the beginnings of prompts, and decide for how long"
_END_USER: Final = "in effect: names the end user; required if `enforce_user_param` is set"
_COMPACTION: Final = "in effect from the threshold on: the conversation is summarized"
_SENT: Final = "in effect: the gateway sends it to this server only"
_STICKY: Final = "in effect: requests with the same key go to the same backend"


@dataclass(frozen=True)
class Unseen:
    """Result for values of a field that change neither the request to a backend nor the answer.

    It applies to all values, or to those in `values`.
    """

    path: str
    result: str
    values: tuple[Any, ...] | None = None

    def applies_to(self, path: str, value: Any) -> bool:
        # Values that are equal in Python may differ in JSON: 0 is not false.
        is_meant = self.values is None or any(type(each) is type(value) and each == value for each in self.values)
        return is_meant and re.match(self.path, path) is not None


# By API. Other tests show these effects. The first entry counts whose pattern matches the start of the path.
UNSEEN: Final[Mapping[str, list[Unseen]]] = {
    "chat": [
        Unseen(r"modalities", 'in effect: `["text"]` is the only supported form of output', (["text"], [])),
        Unseen(r"parallel_tool_calls", _PARALLEL),
        Unseen(r"prompt_cache_key", _STICKY),
        Unseen(r"response_format.*strict", _STRICT_FORM),
        Unseen(r"tools\[function\].*strict", _STRICT),
        Unseen(r"tools\[custom\].*format$", "in effect: the input of the tool is plain text", ({"type": "text"},)),
        Unseen(r"(safety_identifier|user)", _END_USER),
    ],
    "responses": [
        Unseen(r"context_management", _COMPACTION),
        Unseen(r"(conversation|previous_response_id)", "in effect; an unknown id is an error"),
        Unseen(r"max_tool_calls", "in effect: limits the calls to server tools", (7,)),
        Unseen(r"metadata", "in effect: stored with the response"),
        Unseen(r"parallel_tool_calls", _PARALLEL),
        Unseen(r"prompt_cache_key", _STICKY),
        Unseen(r"(safety_identifier|user)", f"{_END_USER}; stored with the response"),
        Unseen(r"store", "in effect: with `false`, the response is not stored"),
        Unseen(r"stream_options\.include_obfuscation", "in effect: events are never obfuscated", (False,)),
        Unseen(r"text\.format.*strict", _STRICT_FORM),
        Unseen(r"text\.verbosity", "in effect: `medium` is the verbosity of the model", ("medium",)),
        Unseen(r"tools\[code_interpreter\]\.container$", "in effect: the code runs in the gateway's container"),
        Unseen(r"tools\[mcp\]\.(authorization|headers)", _SENT),
        Unseen(
            r"tools\[mcp\]\.require_approval$",
            "in effect: decides whether calls wait for an approval",
            ("always", "never"),
        ),
        Unseen(r"tools\[mcp\]\.server_url", "in effect: the address must be that of an allowed server", (UPSTREAM,)),
        Unseen(r"tools\[namespace\]\.description", "in effect: the tool search searches in this text"),
        Unseen(r"tools\[shell\]\.environment$", "in effect: the client runs the commands", ({"type": "local"}, {})),
        Unseen(r"tools\[(function|namespace)\].*\.strict", _STRICT),
        Unseen(r"tools\[.*\]\.defer_loading", "in effect: the prompt declares the tool from the start", (False,)),
        Unseen(
            r"tools\[(custom|namespace)\].*\.format$",
            "in effect: the input of the tool is plain text",
            ({"type": "text"},),
        ),
        Unseen(r"truncation", "in effect for prompts that exceed the context window: `auto` drops the oldest items"),
    ],
    "completions": [Unseen(r"user", _END_USER)],
    "messages": [
        Unseen(r".*cache_control", _CACHED),
        Unseen(r".*clear_thinking_20251015\]", "in effect: signed thinking blocks of older turns are left out"),
        Unseen(r".*compact_20260112\]", _COMPACTION),
        Unseen(r"fallbacks", "in effect: used if the requested model fails"),
        Unseen(r"mcp_servers.*authorization_token", _SENT),
        Unseen(r"metadata\.user_id", _END_USER),
        Unseen(r"tool_choice.*disable_parallel_tool_use", _PARALLEL),
        Unseen(
            r"tools\[(bash|memory|text_editor|web|code|tool_search)_.*\]\.name",
            "in effect: the tool has only this name",
        ),
        Unseen(r"tools\[custom\]\.strict", _STRICT),
        Unseen(
            r"tools\[mcp_toolset\]\.configs\.NAME\.enabled", "in effect: decides whether the prompt declares the tool"
        ),
        Unseen(
            r"tools\[web_.*max_uses",
            "in effect: limits the calls, if every server tool in the request has `max_uses`",
            (7,),
        ),
        Unseen(r"tools\[.*\]\.defer_loading", "in effect: the prompt declares the tool from the start", (False,)),
    ],
}


def case_of(api: str, path: str) -> Case:
    """Return the case of a field."""
    return next((case for pattern, case in CASES[api] if re.match(pattern, path)), Case())


def unseen_effect(api: str, path: str, value: Any) -> str:
    """Return the result for a value whose effect no answer shows; "" if there is none."""
    return next((each.result for each in UNSEEN[api] if each.applies_to(path, value)), "")
