"""Schemas of the gateway's answers; `make test-openapi` compares them with real answers.

Every object may have further fields.
"""

from __future__ import annotations

from typing import Any

from unisono.api.openapi.models import Schema, ref
from unisono.core.state_store import Status

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
MOMENT: Schema = {"type": "integer", "description": "Unix time in seconds."}


def thing(optional: Schema | None = None, /, **fields: Schema) -> Schema:
    """Return the schema of an object that always has `fields`."""
    return {"type": "object", "properties": {**fields, **(optional or {})}, "required": [*fields]}


def many(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, NOTHING]}


def just(value: Any) -> Schema:
    return {"const": value}


def listing(schema: Schema) -> Schema:
    return thing(object=just("list"), data=many(schema))


FINISHED: Schema = {"enum": ["stop", "length", "tool_calls", "function_call"]}
CALLED: Schema = thing(name=TEXT, arguments=TEXT)
SPENT: dict[str, Schema] = {
    "requests": COUNT,
    "errors": COUNT,
    "input_tokens": COUNT,
    "input_cached_tokens": COUNT,
    "output_tokens": COUNT,
    "reasoning_tokens": COUNT,
    "total_tokens": COUNT,
    "cost_usd": NUMBER,
}
DAY: Schema = {"type": "string", "format": "date"}

SHARED: dict[str, Schema] = {
    "Error": thing(error=thing(message=TEXT, type=TEXT, param=maybe(TEXT), code=TEXT)),
    "About": {
        "description": "Report on the generation: backend, failovers, recoveries and notes.",
        **thing(
            {"left_out": COUNT, "unmet": TEXT, "hooks": OBJECT, "notes": many(TEXT)},
            recoveries=many(TEXT),
            failovers=COUNT,
            backend=TEXT,
        ),
    },
    "Deleted": thing(id=TEXT, object=TEXT, deleted=just(True)),
}

CHAT: dict[str, Schema] = {
    "ChatCompletion": thing(
        id=TEXT,
        object=just("chat.completion"),
        created=MOMENT,
        model=TEXT,
        system_fingerprint=maybe(TEXT),
        choices=many(ref("ChatChoice")),
        usage=ref("ChatUsage"),
        unisono=ref("About"),
    ),
    "ChatChoice": thing(index=COUNT, message=ref("ChatAnswer"), logprobs=NOTHING, finish_reason=FINISHED),
    "ChatAnswer": thing(
        {
            "reasoning": TEXT,
            "reasoning_content": TEXT,
            "tool_calls": many(ref("ChatCall")),
            "function_call": CALLED,
        },
        role=just("assistant"),
        content=maybe(TEXT),
        refusal=maybe(TEXT),
        annotations=many(OBJECT),
    ),
    "ChatCall": {
        "anyOf": [
            thing(id=TEXT, type=just("function"), function=CALLED),
            thing(id=TEXT, type=just("custom"), custom=thing(name=TEXT, input=TEXT)),
        ]
    },
    "ChatUsage": thing(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=thing(cached_tokens=COUNT),
        completion_tokens_details=thing(reasoning_tokens=COUNT),
    ),
    "ChatCompletionChunk": thing(
        {"usage": maybe(ref("ChatUsage")), "unisono": ref("About")},
        id=TEXT,
        object=just("chat.completion.chunk"),
        created=MOMENT,
        model=TEXT,
        system_fingerprint=maybe(TEXT),
        choices=many(
            thing(
                index=COUNT, delta=ref("ChatDelta"), logprobs=NOTHING, finish_reason={"enum": [*FINISHED["enum"], None]}
            )
        ),
    ),
    "ChatDelta": thing(
        {
            "role": just("assistant"),
            "content": TEXT,
            "refusal": TEXT,
            "reasoning": TEXT,
            "reasoning_content": TEXT,
            "tool_calls": many(thing(index=COUNT)),
            "function_call": OBJECT,
        }
    ),
}

_TOKEN_IDS: dict[str, Schema] = {"token_ids": many(COUNT), "prompt_token_ids": maybe(many(COUNT))}
_STOPPED: Schema = {"anyOf": [TEXT, COUNT, NOTHING]}

COMPLETIONS: dict[str, Schema] = {
    "Completion": thing(
        id=TEXT,
        object=just("text_completion"),
        created=MOMENT,
        model=TEXT,
        system_fingerprint=maybe(TEXT),
        choices=many(
            thing(
                _TOKEN_IDS,
                index=COUNT,
                text=TEXT,
                logprobs=NOTHING,
                finish_reason={"enum": ["stop", "length"]},
                stop_reason=_STOPPED,
            )
        ),
        usage=ref("CompletionUsage"),
        unisono=ref("About"),
    ),
    "CompletionUsage": thing(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=thing(cached_tokens=COUNT),
    ),
    "CompletionChunk": thing(
        {"usage": maybe(ref("CompletionUsage")), "unisono": ref("About")},
        id=TEXT,
        object=just("text_completion"),
        created=MOMENT,
        model=TEXT,
        system_fingerprint=maybe(TEXT),
        choices=many(
            thing(
                {**_TOKEN_IDS, "stop_reason": _STOPPED},
                index=COUNT,
                text=TEXT,
                logprobs=NOTHING,
                finish_reason={"enum": ["stop", "length", None]},
            )
        ),
    ),
}

RESPONSES: dict[str, Schema] = {
    "Response": thing(
        {"unisono": ref("About")},
        id=TEXT,
        object=just("response"),
        created_at=MOMENT,
        status={"enum": [status.value for status in Status]},
        completed_at=maybe(MOMENT),
        error=maybe(thing(code=TEXT, message=TEXT)),
        incomplete_details=maybe(thing(reason=TEXT)),
        model=TEXT,
        output=many(ref("Item")),
        usage=maybe(ref("ResponseUsage")),
        background=TRUTH,
        conversation=maybe(thing(id=TEXT)),
        frequency_penalty=NUMBER,
        instructions=maybe(TEXT),
        max_output_tokens=maybe(COUNT),
        max_tool_calls=maybe(COUNT),
        metadata=OBJECT,
        parallel_tool_calls=TRUTH,
        presence_penalty=NUMBER,
        previous_response_id=maybe(TEXT),
        prompt_cache_key=maybe(TEXT),
        reasoning=thing(effort=TEXT, summary=maybe(TEXT)),
        safety_identifier=maybe(TEXT),
        service_tier=TEXT,
        store=TRUTH,
        temperature=NUMBER,
        text=thing(format=thing(type=TEXT), verbosity=TEXT),
        tool_choice={"anyOf": [TEXT, thing(type=TEXT)]},
        tools=many(thing(type=TEXT)),
        top_logprobs=COUNT,
        top_p=NUMBER,
        truncation=TEXT,
        user=maybe(TEXT),
    ),
    "ResponseUsage": thing(
        input_tokens=COUNT,
        input_tokens_details=thing(cached_tokens=COUNT, cache_write_tokens=COUNT),
        output_tokens=COUNT,
        output_tokens_details=thing({"tool_output_tokens": COUNT}, reasoning_tokens=COUNT),
        total_tokens=COUNT,
    ),
    "ResponseEvent": thing(
        {"response": ref("Response"), "item": ref("Item"), "delta": TEXT}, type=TEXT, sequence_number=COUNT
    ),
    "Item": thing(id=TEXT, type=TEXT),
    "ItemPage": thing(
        object=just("list"),
        data=many(ref("Item")),
        first_id=maybe(TEXT),
        last_id=maybe(TEXT),
        has_more=TRUTH,
    ),
    "InputTokens": thing(object=just("response.input_tokens"), input_tokens=COUNT),
    "Compaction": thing(
        id=TEXT,
        object=just("response.compaction"),
        created_at=MOMENT,
        output=many(ref("Item")),
        usage=ref("ResponseUsage"),
        unisono=ref("About"),
    ),
    "Conversation": thing(id=TEXT, object=just("conversation"), created_at=MOMENT, metadata=OBJECT),
}

MESSAGES: dict[str, Schema] = {
    "Message": thing(
        id=TEXT,
        type=just("message"),
        role=just("assistant"),
        model=TEXT,
        content=many(ref("AnsweredBlock")),
        stop_reason={
            "enum": [
                *("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"),
                "model_context_window_exceeded",
            ]
        },
        stop_sequence=maybe(TEXT),
        stop_details=maybe(thing(type=just("refusal"), category=NOTHING, explanation=maybe(TEXT))),
        usage=ref("MessageUsage"),
        unisono=ref("About"),
    ),
    "AnsweredBlock": {
        "anyOf": [
            thing(type=just("text"), text=TEXT),
            thing(type=just("thinking"), thinking=TEXT, signature=TEXT),
            thing(type={"enum": ["tool_use", "server_tool_use"]}, id=TEXT, name=TEXT, input=OBJECT),
            thing(type={"type": "string", "pattern": "_tool_result$"}, tool_use_id=TEXT, content={}),
        ]
    },
    "MessageUsage": thing(
        {"server_tool_use": OBJECT},
        input_tokens=COUNT,
        cache_creation_input_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        output_tokens=COUNT,
        output_tokens_details=thing(thinking_tokens=COUNT),
    ),
    "MessageEvent": thing(
        {"message": OBJECT, "index": COUNT, "content_block": ref("AnsweredBlock"), "delta": OBJECT, "usage": OBJECT},
        type=TEXT,
    ),
    "MessageTokens": thing(input_tokens=COUNT),
    "MessagesError": thing(
        type=just("error"), error=thing(type=TEXT, message=TEXT, details=thing(error_code=TEXT)), request_id=TEXT
    ),
}

GATEWAY: dict[str, Schema] = {
    "Model": thing(
        {"context_length": COUNT, "max_model_len": COUNT}, id=TEXT, object=just("model"), created=MOMENT, owned_by=TEXT
    ),
    "ModelList": listing(ref("Model")),
    "ModelInfo": thing(
        data=many(
            thing(
                model_name=TEXT,
                litellm_params=thing(model=TEXT),
                model_info=thing(id=TEXT, mode=TEXT, max_input_tokens=maybe(COUNT), max_tokens=maybe(COUNT)),
            )
        )
    ),
    "Usage": thing(
        object=just("usage"),
        key=maybe(TEXT),
        since=DAY,
        until=DAY,
        total=thing(**SPENT),
        data=many(thing(date=DAY, model=TEXT, served_model=TEXT, **SPENT)),
    ),
    "GatewayStatus": thing(
        {"workers": COUNT, "minutes": many(thing(at=MOMENT, answers=COUNT, failed=COUNT, recoveries=OBJECT))},
        object=just("status"),
        version=TEXT,
        at=NUMBER,
        key=maybe(TEXT),
        keyless=TRUTH,
        traces={"enum": ["off", "recoveries", "all"]},
        rules=OBJECT,
        models=many(
            thing(
                {"waiting": COUNT, "deployments": many(thing(name=TEXT, state=TEXT, reason=TEXT, kind=TEXT))},
                id=TEXT,
                model=TEXT,
                context=maybe(COUNT),
                ready=TRUTH,
            )
        ),
    ),
    "TraceList": listing(thing(id=TEXT, at=NUMBER, model=TEXT, outcome=TEXT, recoveries=many(TEXT))),
    "Trace": thing(object=just("unisono.trace"), version=COUNT, id=TEXT, steps=many(OBJECT), output=many(COUNT)),
    "Inspection": thing(
        object=just("unisono.inspection"),
        about=maybe(OBJECT),
        steps=many(thing(step=COUNT, generations=many(OBJECT), prompts=many(OBJECT), output=many(thing(kind=TEXT)))),
        items=many(thing(kind=TEXT, name=TEXT, characters=COUNT, complete=TRUTH)),
        tools=many(OBJECT),
        left_out=many(TEXT),
    ),
    "Alive": thing(status=just("alive")),
    "Readiness": thing(
        status={"enum": ["ready", "not ready"]}, models=thing(ready=COUNT, total=COUNT), reasons=many(TEXT)
    ),
}

DOCUMENT: dict[str, Schema] = {"Document": thing(openapi=TEXT, info=OBJECT, paths=OBJECT, components=OBJECT)}

ANSWERS: dict[str, Schema] = {**SHARED, **CHAT, **COMPLETIONS, **RESPONSES, **MESSAGES, **GATEWAY, **DOCUMENT}
