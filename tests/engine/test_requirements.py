"""Requirements of requests for their answers."""

from __future__ import annotations

import pytest

from tests.engine.planning import CONVERSATION, TOOLS, WITHOUT_TOOLS, turn
from unisono.core.recovery_rules import UNDECLARED_TOOL
from unisono.engine.interventions.policy import MessageKind
from unisono.engine.interventions.requirements import ToolRequirements, requirements_of
from unisono.engine.request import ForcedCalls
from unisono.harmony.tool_declarations import plan_tools


@pytest.mark.parametrize("calls_allowed", [True, False])
@pytest.mark.parametrize("disabled_rules", [frozenset[str](), frozenset({UNDECLARED_TOOL})])
def test_a_request_without_tools_shares_its_tool_requirements(
    *, calls_allowed: bool, disabled_rules: frozenset[str]
) -> None:
    request = turn(conversation=WITHOUT_TOOLS, calls_allowed=calls_allowed, disabled_rules=disabled_rules)
    required = requirements_of(request, plan_tools(()), None).tools
    assert required == ToolRequirements(calls_allowed=calls_allowed, declared=None if disabled_rules else frozenset())
    assert requirements_of(request, plan_tools(()), None).tools is required


def test_a_forced_call_without_tools_has_no_tool_to_call() -> None:
    assert requirements_of(turn(ForcedCalls(), WITHOUT_TOOLS), plan_tools(()), None).tools.forced == ()


def test_undeclared_tools_of_the_client_are_still_its_own() -> None:
    request = turn(conversation=CONVERSATION, calls_allowed=False)
    required = requirements_of(request, plan_tools(()), None).tools
    assert required.own == {f"functions.{tool.name}" for tool in TOOLS}
    assert required.declared == frozenset()


def test_an_approved_call_meets_the_requirement_and_the_allowed_list_stays() -> None:
    choice = ForcedCalls(frozenset({"now"}), exclusive=True)
    required = requirements_of(turn(choice), plan_tools(TOOLS), None, approved=["now"]).tools
    assert (required.forced, required.allowed) == (None, {"functions.now"})
    assert required.call_kind("functions.add", is_call_owed=False) is MessageKind.BARRED
