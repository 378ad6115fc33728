"""Server tools under guardrails that mask: a tool gets the arguments that the model generated."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.e2e.hosting import calls, desk, made
from tests.e2e.responses import ANSWER, Json, Line, refusal
from tests.mcp.conftest import Upstream

MAIL = "ann@example.com"
MASKED = "[EMAIL_REDACTED]"
TRIP = {"day": "Monday", "seats": 2}
MODES = pytest.mark.parametrize("mode", [["post_call"], ["pre_call"], ["pre_call", "post_call"]], ids="+".join)
STORED = pytest.mark.parametrize("store", [True, False], ids=["stored", "sent"])


@asynccontextmanager
async def guarded(upstream: Upstream, mode: list[str], **entry: str) -> AsyncIterator[Line]:
    patterns = [{"pattern_type": "prebuilt", "pattern_name": "email", "action": "MASK"}]
    params = {"guardrail": "litellm_content_filter", "mode": mode, "default_on": True, "patterns": patterns}
    guardrails = [{"guardrail_name": "mails", "litellm_params": params}]
    async with desk(upstream, entry=entry, guardrails=guardrails) as harness:
        yield harness


async def continued(harness: Line, first: Json, answer: Json, *, store: bool) -> Json:
    """Send the answer of the user to the last item of a response."""
    harness.say(ANSWER)
    if store:
        return await harness.whole(previous_response_id=first["id"], input=[answer])
    return await harness.whole(store=False, input=[{"role": "user", "content": "Go"}, *first["output"], answer])


def answered(request: Json) -> Json:
    if request["type"] == "mcp_approval_request":
        return {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    field = {"elicitation_request_id": request["id"], "content": TRIP}
    return {"type": "mcp_elicitation_response", "action": "accept", **field}


@pytest.mark.sampled(one_in=6)
@MODES
@STORED
@pytest.mark.parametrize("way", ["modern", "legacy"])
async def test_a_call_continues_with_the_arguments_of_the_model(
    upstream: Upstream, mode: list[str], store: bool, way: str
) -> None:
    city = f"{MAIL} {way}{store}{len(mode)}{mode[0]}"
    async with guarded(upstream, mode, url=upstream.urls[way]) as harness:
        harness.say(calls("book", city=city))
        first = await harness.whole(store=store)
        [request] = made(first, "mcp_elicitation_request")
        assert (MASKED in request["arguments"]) is (mode != ["pre_call"])
        second = await continued(harness, first, answered(request), store=store)
        assert not made(second, "mcp_elicitation_request")
        assert upstream.noted(f"book {city} Monday") == [f"book {city} Monday 2"]
        [call] = made(second)
        assert (MASKED in call["arguments"]) is (mode != ["pre_call"])


@pytest.mark.sampled(one_in=6)
@MODES
@STORED
async def test_an_approved_call_has_the_arguments_of_the_model(
    upstream: Upstream, mode: list[str], store: bool
) -> None:
    async with guarded(upstream, mode, require_approval="always") as harness:
        text = f"{MAIL} {store}{len(mode)}{mode[0]}"
        harness.say(calls("echo", text=text))
        first = await harness.whole(store=store)
        [request] = made(first, "mcp_approval_request")
        assert (MASKED in request["arguments"]) is (mode != ["pre_call"])
        await continued(harness, first, answered(request), store=store)
        assert upstream.noted(text) == [f"echo {text}"]


async def test_a_client_may_write_the_masked_arguments_in_a_different_way(upstream: Upstream) -> None:
    async with guarded(upstream, ["post_call"], require_approval="always") as harness:
        harness.say(calls("echo", text=f"{MAIL} rewritten"))
        first = await harness.whole(store=False)
        request = first["output"][-1]
        request["arguments"] = json.dumps(json.loads(request["arguments"]), indent=1)
        await continued(harness, first, answered(request), store=False)
        assert upstream.noted("rewritten") == [f"echo {MAIL} rewritten"]


async def test_a_client_may_edit_the_masked_arguments(upstream: Upstream) -> None:
    async with guarded(upstream, ["post_call"], require_approval="always") as harness:
        harness.say(calls("echo", text=MAIL))
        first = await harness.whole(store=False)
        first["output"][-1]["arguments"] = '{"text":"edited"}'
        await continued(harness, first, answered(first["output"][-1]), store=False)
        assert upstream.noted("edited") == ["echo edited"]


async def test_a_call_that_cannot_be_decrypted_does_not_run(upstream: Upstream) -> None:
    async with guarded(upstream, ["post_call"], require_approval="always") as harness:
        harness.say(calls("echo", text=f"{MAIL} damaged"))
        first = await harness.whole(store=False)
        request = first["output"][-1]
        request["encrypted_content"] = request["encrypted_content"][:-4]
        history = [{"role": "user", "content": "Go"}, *first["output"], answered(request)]
        answer = await harness.post(store=False, input=history)
        assert "encrypted_content" in refusal(answer, 400, "input")
        assert not upstream.noted("damaged")
        denial = {**answered(request), "approve": False}
        await continued(harness, first, denial, store=False)
