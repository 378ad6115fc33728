"""Errors of fields that accept several types name the field instead of a branch of the union."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from unisono.api.admin.entry_schema import AddMembers
from unisono.api.chat.schema import ChatRequest
from unisono.api.error_responses import failure_of
from unisono.api.messages.schema import MessagesRequest

CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}


def clearing(inputs: Any) -> dict[str, Any]:
    edit = {"type": "clear_tool_uses_20250919", "clear_tool_inputs": inputs}
    return {**CHAT, "max_tokens": 1, "context_management": {"edits": [edit]}}


def adding(member: Any) -> dict[str, Any]:
    return {"team_id": "team-1", "member": member}


CASES: dict[str, tuple[type[BaseModel], dict[str, Any], str]] = {
    # case: (model, body, field in the error)
    "user": (ChatRequest, {**CHAT, "user": 1.5}, "user"),
    "safety_identifier": (ChatRequest, {**CHAT, "safety_identifier": []}, "safety_identifier"),
    "fallback": (ChatRequest, {**CHAT, "fallbacks": ["gpt-oss", 1]}, "fallbacks.1"),
    "tool inputs": (MessagesRequest, clearing("all"), "context_management.edits.0.clear_tool_inputs"),
    "role of a member": (AddMembers, adding({"user_id": "ann", "role": "owner"}), "member.role"),
    "role in a list": (AddMembers, adding([{"user_id": "ann", "role": "owner"}]), "member.0.role"),
    "unnamed member": (AddMembers, adding({"role": "user"}), "member"),
    "member as text": (AddMembers, adding("ann"), "member"),
    "list of texts": (AddMembers, adding(["ann"]), "member.0"),
}


@pytest.mark.parametrize(("model", "body", "param"), CASES.values(), ids=CASES)
def test_errors_name_the_field(model: type[BaseModel], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    error = failure_of(raised.value)
    assert error.param == param
    assert "[" not in str(error)


@pytest.mark.parametrize("member", [{"user_id": "ann"}, [{"user_id": "ann"}]])
def test_one_member_and_a_list_of_members_are_accepted(member: Any) -> None:
    [added] = AddMembers.model_validate(adding(member)).member
    assert added.user_id == "ann"
