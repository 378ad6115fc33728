"""History of server tools: requests to the user, decisions, and announced tool lists.

The history is read only from stored items, so that a process that takes over a response reads the same history. A call
that required approval is in the conversation at the position of its approval request. The result directly follows the
call, even if it arrived later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Final, TypeAlias

import orjson

from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Json, ToolResult
from unisono.core.frozen import dataclass
from unisono.core.server_tool_arguments import read_arguments
from unisono.core.state_store import StoredItem
from unisono.core.tool_host import ToolQuestion, UserAction, UserAnswer
from unisono.engine.request import ApprovalDecision
from unisono.engine.server_tools.call_verdicts import OUTCOME_UNKNOWN
from unisono.errors import InvalidRequest

# Item type of a call that waits for the user's answer to a question.
ELICITATION_REQUEST: Final = "mcp_elicitation_request"
NOT_ANSWERED: Final = "The user did not answer the question of the tool."
# Field of a stored approval request: the id that the client gave to the request.
CLIENTS_ID = "approval_request_id"
# Field of an approval request or question if a guardrail has masked the arguments of its call. The field contains the
# call twice, encrypted: with the masked arguments, and with the arguments that the model generated.
SEALED: Final = "encrypted_content"


Wire: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServerToolHistory:
    """History of server tools.

    `requests` maps ids of approval requests and questions to the calls that wait for them. `questions` maps the ids of
    questions to the questions. `decisions` holds the user's answers. `announced` holds the labels of the servers whose
    tools were listed. `sealed` maps the ids of calls with masked arguments to their encrypted calls. `pages` maps the
    ids of browser calls to the addresses of their pages.
    """

    requests: Mapping[str, AssistantCall] = field(default_factory=dict)
    questions: Mapping[str, ToolQuestion] = field(default_factory=dict)
    decisions: tuple[ApprovalDecision, ...] = ()
    announced: frozenset[str] = frozenset()
    sealed: Mapping[str, str] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, later: ServerToolHistory) -> ServerToolHistory:
        if self == NOTHING_HOSTED or later == NOTHING_HOSTED:
            return later if self == NOTHING_HOSTED else self
        requests, questions = {**self.requests, **later.requests}, {**self.questions, **later.questions}
        announced, sealed = self.announced | later.announced, {**self.sealed, **later.sealed}
        decisions, pages = self.decisions + later.decisions, {**self.pages, **later.pages}
        return ServerToolHistory(requests, questions, decisions, announced, sealed, pages)


NOTHING_HOSTED = ServerToolHistory()


def server_tool_history(items: Iterable[StoredItem], earlier: ServerToolHistory = NOTHING_HOSTED) -> ServerToolHistory:
    """Return the requests to the user, decisions, listed servers and pages found in `items`.

    `earlier` is the history before `items`. Its requests are needed to read the decisions in `items`; the result does
    not include it.
    """
    requests: dict[str, AssistantCall] = {}
    questions: dict[str, ToolQuestion] = {}
    decisions: list[ApprovalDecision] = []
    announced: set[str] = set()
    sealed: dict[str, str] = {}
    pages: dict[str, str] = {}
    for item in items:
        match item.wire.get("type"):
            case "mcp_approval_request" | "mcp_elicitation_request" as kind:
                calls = [content for content in item.meaning if isinstance(content, AssistantCall)]
                if calls and isinstance(text := item.wire.get(SEALED), str):
                    sealed[calls[-1].call_id] = text
                for known_as in (item.id, item.wire.get(CLIENTS_ID)):
                    if calls and isinstance(known_as, str):
                        requests[known_as] = calls[-1]
                        if kind == ELICITATION_REQUEST:
                            questions[known_as] = question_in(item.wire)
            case "mcp_approval_response" | "mcp_elicitation_response":
                request = request_of(item.wire)
                call = requests.get(request) or earlier.requests.get(request)
                # Only the first decision on a call is used. A client may send it again, and the call must not run
                # twice.
                known = (decision.call_id for decision in (*earlier.decisions, *decisions))
                if call is not None and call.call_id not in known:
                    question = questions.get(request) or earlier.questions.get(request)
                    decisions.append(_decision(item.wire, call.call_id, request, question))
            case "mcp_list_tools" if not item.wire.get("error"):
                announced.add(str(item.wire.get("server_label")))
            case "web_search_call":
                action = item.wire.get("action")
                url = action.get("url") if isinstance(action, dict) else None
                results = (content for content in item.meaning if isinstance(content, ToolResult))
                pages |= {result.call_id: url for result in results if isinstance(url, str)}
            case _:
                pass
    if not (requests or decisions or announced or pages):
        return NOTHING_HOSTED
    return ServerToolHistory(requests, questions, tuple(decisions), frozenset(announced), sealed, pages)


def request_of(response: Wire) -> str:
    """Return the id of the approval request or question that a response answers."""
    return str(response.get("approval_request_id") or response.get("elicitation_request_id"))


def _decision(response: Wire, call_id: str, request: str, question: ToolQuestion | None) -> ApprovalDecision:
    if question is not None:
        action = str(response.get("action"))
        # A client that sends an approval instead of an answer has not answered the question.
        reaction = UserAction(action) if action in {*UserAction} else UserAction.CANCEL
        answer = UserAnswer(reaction, response.get("content"), question.state)
        # The call continues also without an answer, so that the tool learns of it.
        return ApprovalDecision(call_id, request, approved=True, answer=answer)
    reason = response.get("reason")
    approved = response.get("approve") is True
    return ApprovalDecision(call_id, request, approved, reason if isinstance(reason, str) else "")


def question_in(request: Wire) -> ToolQuestion:
    """Return the question in an elicitation request."""
    schema, state = request.get("requested_schema"), request.get("state")
    try:
        parsed: Json = orjson.loads(state) if isinstance(state, str) else None
    except orjson.JSONDecodeError:
        parsed = None
    return ToolQuestion(
        str(request.get("message") or ""),
        schema if isinstance(schema, dict) else {},
        str(request.get("url") or ""),
        parsed,
    )


def parted(items: Sequence[StoredItem], earlier: ServerToolHistory) -> tuple[ServerToolHistory, ServerToolHistory]:
    """Split the server tool history at the last output of the model in `items`.

    Returns `earlier` with the history up to this output, and the history after it. A decision before the output was
    carried out by an earlier request.
    """
    output_positions = [position for position, item in enumerate(items) if _is_model_output(item)]
    boundary = output_positions[-1] + 1 if output_positions else 0
    before = earlier + server_tool_history(items[:boundary], earlier)
    return before, server_tool_history(items[boundary:], before)


def _is_model_output(item: StoredItem) -> bool:
    waits = item.wire.get("type") in ("mcp_approval_request", ELICITATION_REQUEST)
    return not waits and (
        item.wire.get("type") == "mcp_call" or any(isinstance(content, MADE) for content in item.meaning)
    )


def with_arguments(
    earlier: ServerToolHistory, now: ServerToolHistory, opened: Callable[[str], Sequence[Item] | None]
) -> ServerToolHistory:
    """Return `now` with the arguments with which the approved calls run.

    If a guardrail has masked the arguments for the client, the tool gets the arguments that the model generated, unless
    the client has edited the masked arguments. `opened` decrypts a call, and returns None if this fails. Raises
    InvalidRequest if the call of an approved request cannot be decrypted.
    """
    both = earlier + now
    calls = {call.call_id: call for call in both.requests.values()}
    decisions = (
        replace(each, arguments=_arguments(calls[each.call_id], both.sealed.get(each.call_id), opened))
        if each.approved
        else each
        for each in now.decisions
    )
    return replace(now, decisions=tuple(decisions)) if now.decisions else now


def _arguments(call: AssistantCall, sealed: str | None, opened: Callable[[str], Sequence[Item] | None]) -> str:
    if sealed is None:
        return call.arguments
    match opened(sealed):
        case [AssistantCall() as masked, AssistantCall() as generated]:
            # If the client has edited the arguments, the tool gets the edited arguments. JSON that is only written in a
            # different way counts as unchanged.
            is_same = masked.name == call.name and _digest(masked) == _digest(call)
            return generated.arguments if is_same else call.arguments
        case _:
            raise InvalidRequest(
                f"'input': the call to '{call.name}' cannot run, because this gateway cannot decrypt the field "
                f"'{SEALED}' of the approval request or question; send that item unchanged, or deny the call.",
                param="input",
            )


def _digest(call: AssistantCall) -> str:
    return read_arguments(call.name, call.arguments).digest


# Items generated by a model.
MADE = (AssistantReasoning, AssistantMessage, AssistantCall)


def with_call_results(
    items: Sequence[Item], earlier: ServerToolHistory, now: ServerToolHistory, *, waiting: Collection[str] = ()
) -> tuple[Item, ...]:
    """Return the conversation with a result after every call that required approval.

    Calls that are decided `now`, and calls with an id in `waiting`, have no result yet.
    """
    both = earlier + now
    requested = {call.call_id for call in both.requests.values()}
    asked = {both.requests[request].call_id for request in both.questions}
    if not requested:
        return tuple(items)
    open_now = {decision.call_id for decision in now.decisions}.union(waiting)
    decided = {decision.call_id: decision for decision in earlier.decisions}
    results = {item.call_id: item for item in items if isinstance(item, ToolResult) and item.call_id in requested}
    found: list[Item] = []
    for item in items:
        if isinstance(item, ToolResult) and item.call_id in requested:
            continue
        found.append(item)
        if isinstance(item, AssistantCall) and item.call_id in requested and item.call_id not in open_now:
            missing = _missing(item, decided.get(item.call_id), is_question=item.call_id in asked)
            found.append(results.get(item.call_id) or missing)
    return tuple(found)


def _missing(call: AssistantCall, decision: ApprovalDecision | None, *, is_question: bool) -> ToolResult:
    """Return a substitute result for a call that required approval and has no result."""
    if decision is None and is_question:
        return ToolResult(call.call_id, call.name, NOT_ANSWERED)
    if decision is None:
        decision = ApprovalDecision(call.call_id, "", approved=False)
    return ToolResult(call.call_id, call.name, OUTCOME_UNKNOWN if decision.approved else decision.denial)
