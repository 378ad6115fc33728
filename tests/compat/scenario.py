"""Configuration, model and requests of the recorded state.

Further requests continue from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.e2e.continuing import Model
from tests.e2e.gateway import config_of
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm, VllmScript

Json = dict[str, Any]

MASTER_KEY = "sk-master-of-the-recorded-state"
SALT = "a salt of the recorded state"
# Recorded state must not expire, so its lifetime is about 30 years.
LIFETIME_S = 1e9
LEASE_S = 1.0
# Conversations that continue keep this date in their prompt, whatever the date of the later request is.
FIRST_DAY, LATER_DAY = "2026-11-20", "2026-11-24"

UNFINISHED = "Begin a long answer."
LONG = Model(words=60, delay_s=0.03)
LOOK_UP = "Look it up."
CALL = (
    "<|channel|>analysis<|message|>The tool knows it.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>'
)
ANSWER = (
    "<|channel|>analysis<|message|>Easy; \u00e9 \U0001f600.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is \u201eblue\u201c \U0001f600.<|return|>"
)
# The parser closes the reasoning and reports the recovery `missing-end`.
MALFORMED = "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Mended.<|return|>"

PARAMETERS: Json = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL: Json = {"type": "function", "name": "look", "parameters": PARAMETERS}
MESSAGES_TOOL: Json = {"name": "look", "input_schema": PARAMETERS}
SEALED: Json = {"store": False, "include": ["reasoning.encrypted_content"]}


def config(store_url: str, backend_url: str, day: str) -> Json:
    store = {
        "url": store_url,
        "ttl_s": LIFETIME_S,
        "log_ttl_s": LIFETIME_S,
        "lease_s": LEASE_S,
        "deadline_s": 5.0,
    }
    traces = {"mode": "all", "ttl_s": LIFETIME_S, "keep": 100}
    return config_of(
        f"vllm@{backend_url}",
        store=store,
        general_settings={"master_key": MASTER_KEY},
        unisono={"salt_key": SALT, "current_date": day, "traces": traces},
    )


def script(request: Mapping[str, Any]) -> VllmScript:
    """Answer by the last message of the user.

    A long answer continues after the tokens in the prompt.
    """
    text = ENCODING.decode(request["prompt"])
    last = text.rpartition("<|start|>user")[2]
    if UNFINISHED in last:
        return LONG.script(dict(request))
    output = MALFORMED if "Malformed." in last else ANSWER
    if LOOK_UP in last and "<|start|>functions.look" not in last:
        output = CALL
    return VllmScript(tokens=ENCODING.encode_marked(output), per_chunk=3)


def continuations(documents: Mapping[str, Json]) -> Mapping[str, tuple[str, Json]]:
    """Return requests, path and body, that continue from the documents of the recorded state."""
    with_model: Json = {"model": "gpt-oss"}
    to_respond = "/v1/responses"
    message = {"role": "user", "content": "And then?"}
    calls = [item for item in documents["sealed call"]["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "blue"}
    [use] = [block for block in documents["message"]["content"] if block["type"] == "tool_use"]
    tool_result = {"type": "tool_result", "tool_use_id": use["id"], "content": "blue"}
    return {
        "response": (
            to_respond,
            with_model | {"input": "And then?", "previous_response_id": documents["second response"]["id"]},
        ),
        "tool result": (
            to_respond,
            with_model
            | {"input": [call_result(documents)], "previous_response_id": documents["call"]["id"]}
            | _tools(),
        ),
        "conversation": (
            to_respond,
            with_model | {"input": "And then?", "conversation": documents["conversation"]["id"]},
        ),
        "background": (
            to_respond,
            with_model | {"input": "And then?", "previous_response_id": documents["background"]["id"]},
        ),
        "sealed": (
            to_respond,
            with_model
            | SEALED
            | _tools()
            | {
                "input": [
                    {"role": "user", "content": LOOK_UP},
                    *without_text(documents["sealed call"]["output"]),
                    result,
                ]
            },
        ),
        "compacted": (
            to_respond,
            with_model | {"input": [*documents["compaction"]["output"], message], "store": False},
        ),
        "message": (
            "/v1/messages",
            with_model
            | {
                "max_tokens": 1024,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "tools": [MESSAGES_TOOL],
                "messages": [
                    {"role": "user", "content": LOOK_UP},
                    {"role": "assistant", "content": documents["message"]["content"]},
                    {"role": "user", "content": [tool_result]},
                ],
            },
        ),
    }


def without_text(items: Sequence[Json]) -> list[Json]:
    """Return the items without the visible text of reasoning.

    Reasoning can then only come from `encrypted_content`.
    """
    return [{**item, "content": []} if item["type"] == "reasoning" else item for item in items]


def call_result(documents: Mapping[str, Json]) -> Json:
    [call] = [item for item in documents["call"]["output"] if item["type"] == "function_call"]
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}


def _tools() -> Json:
    return {"tools": [TOOL]}


def last_prompt(fake: FakeVllm) -> list[int]:
    """Return the prompt of the last generation."""
    return list([seen.json["prompt"] for seen in fake.requests if seen.path == "/v1/completions"][-1])
