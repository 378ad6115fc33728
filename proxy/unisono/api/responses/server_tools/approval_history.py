"""What was said about hosted tools in what a request continues: requests for approval, answers to them, lists told.

Everything is read from the items as they are kept, so whoever takes a response over reads the same. A call that needed
approval stands in the conversation where it was asked for, and its result right behind it, whenever that came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, ToolResult
from unisono.core.state_store import StoredItem
from unisono.engine.judging import OUTCOME_UNKNOWN
from unisono.engine.turn import ApprovalDecision

CLIENTS_ID = "approval_request_id"
"""In a request that a client sent itself: the id it knows the request by."""


@dataclass(frozen=True, slots=True)
class ServerToolHistory:
    """`requests` are the calls that approval was asked for, by the ids of the requests; `decisions` what was said to
    them; `announced` are labels of servers whose tools were told."""

    requests: Mapping[str, AssistantCall] = field(default_factory=dict)
    decisions: tuple[ApprovalDecision, ...] = ()
    announced: frozenset[str] = frozenset()

    def __add__(self, later: ServerToolHistory) -> ServerToolHistory:
        if self == NOTHING_HOSTED or later == NOTHING_HOSTED:
            return later if self == NOTHING_HOSTED else self
        requests = {**self.requests, **later.requests}
        return ServerToolHistory(requests, self.decisions + later.decisions, self.announced | later.announced)


NOTHING_HOSTED = ServerToolHistory()


def hosted_in(items: Iterable[StoredItem], earlier: ServerToolHistory = NOTHING_HOSTED) -> ServerToolHistory:
    """What kept items say, where `earlier` was said before them."""
    requests: dict[str, AssistantCall] = {}
    decisions: list[ApprovalDecision] = []
    announced: set[str] = set()
    for item in items:
        match item.shown.get("type"):
            case "mcp_approval_request":
                calls = [said for said in item.said if isinstance(said, AssistantCall)]
                for known_as in (item.id, item.shown.get(CLIENTS_ID)):
                    if calls and isinstance(known_as, str):
                        requests[known_as] = calls[-1]
            case "mcp_approval_response":
                request = str(item.shown.get("approval_request_id"))
                call = requests.get(request) or earlier.requests.get(request)
                if call is not None:
                    reason = item.shown.get("reason")
                    approved = item.shown.get("approve") is True
                    decisions.append(
                        ApprovalDecision(call.call_id, request, approved, reason if isinstance(reason, str) else "")
                    )
            case "mcp_list_tools" if not item.shown.get("error"):
                announced.add(str(item.shown.get("server_label")))
            case _:
                pass
    if not (requests or decisions or announced):
        return NOTHING_HOSTED
    return ServerToolHistory(requests, tuple(decisions), frozenset(announced))


def parted(items: Sequence[StoredItem], earlier: ServerToolHistory) -> tuple[ServerToolHistory, ServerToolHistory]:
    """What input says about hosted tools, where `earlier` was said before it: what was before this turn too, as the
    client tells it, and what is new. A decision behind which the model has spoken was carried out then."""
    spoken = [position for position, item in enumerate(items) if _is_spoken(item)]
    turned = spoken[-1] + 1 if spoken else 0
    before = earlier + hosted_in(items[:turned], earlier)
    return before, hosted_in(items[turned:], before)


def _is_spoken(item: StoredItem) -> bool:
    asks = item.shown.get("type") == "mcp_approval_request"
    return not asks and (item.shown.get("type") == "mcp_call" or any(isinstance(said, MADE) for said in item.said))


MADE = (AssistantReasoning, AssistantMessage, AssistantCall)
"""What a model says."""


def settled(items: Sequence[Item], earlier: ServerToolHistory, now: ServerToolHistory) -> tuple[Item, ...]:
    """The conversation in which every call that approval was asked for has its result behind it, except those that are
    decided `now`."""
    asked = {call.call_id for call in (*earlier.requests.values(), *now.requests.values())}
    if not asked:
        return tuple(items)
    open_now = {decision.call_id for decision in now.decisions}
    decided = {decision.call_id: decision for decision in earlier.decisions}
    results = {item.call_id: item for item in items if isinstance(item, ToolResult) and item.call_id in asked}
    found: list[Item] = []
    for item in items:
        if isinstance(item, ToolResult) and item.call_id in asked:
            continue
        found.append(item)
        if isinstance(item, AssistantCall) and item.call_id in asked and item.call_id not in open_now:
            found.append(results.get(item.call_id) or _missing(item, decided.get(item.call_id)))
    return tuple(found)


def _missing(call: AssistantCall, decision: ApprovalDecision | None) -> ToolResult:
    """What stands behind a call that nothing came of."""
    if decision is None:
        decision = ApprovalDecision(call.call_id, "", approved=False)
    return ToolResult(call.call_id, call.name, OUTCOME_UNKNOWN if decision.approved else decision.denial)
