"""Conversion of each kind of `input` item to the model's history, one function per kind.

Reasoning that cannot be read is skipped; it never makes a request fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from unisono.api.client_toolbox import MAX_NAME, checked_name, in_namespace
from unisono.api.compaction_summary import pending_calls, replaces_history
from unisono.api.content_parts import join, text_of
from unisono.api.field_types import shortened
from unisono.api.gateway_tools import PYTHON
from unisono.api.history_builder import UNKNOWN_TOOL
from unisono.api.responses.client_tools import FORMS, arguments_of
from unisono.api.responses.configuration_updates import enforceable
from unisono.api.responses.input_conversion import InputConversion
from unisono.api.responses.input_items import (
    InputAddedTools,
    InputAgentMessage,
    InputApprovalRequest,
    InputApprovalResponse,
    InputCall,
    InputCallOutput,
    InputClientToolCall,
    InputClientToolOutput,
    InputCodeCall,
    InputConfiguration,
    InputCustomCall,
    InputElicitationRequest,
    InputElicitationResponse,
    InputItem,
    InputMcpCall,
    InputMcpList,
    InputMessage,
    InputReasoning,
    InputReference,
    InputSealed,
    InputSearch,
    InputSearchCall,
    InputSearchOutput,
    InputSilent,
    InputTrigger,
)
from unisono.api.responses.items import FAILED, served_call
from unisono.api.responses.message_items import read_agent_message, read_message
from unisono.api.responses.server_tools.approval_history import question_in
from unisono.api.responses.tool_items import (
    error_text,
    is_same_call,
    is_same_mcp_call,
    output_texts,
    read_added_tools,
    read_search_call,
    read_search_output,
)
from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantReasoning,
    DeveloperMessage,
    Item,
    ToolResult,
    UserMessage,
)
from unisono.core.tool_host import ToolQuestion
from unisono.errors import InvalidRequest, NotFound
from unisono.schemas import check, violation


def _reasoning(conversion: InputConversion, input_item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(input_item, InputReasoning)
    text = join(input_item.content, param=f"{param}.content")
    # Clients send reasoning back by its id, sealed, or as text. Stored and sealed reasoning has the generated tokens.
    # If the client's text differs, it was edited, and replaces the stored reasoning.
    stored = conversion.known.stored_item(input_item.id) if input_item.id else None
    sealed = conversion.known.opened(input_item.encrypted_content) if input_item.encrypted_content else None
    for own_items in (stored.meaning if stored else (), sealed or ()):
        thoughts = [item for item in own_items if isinstance(item, AssistantReasoning)]
        if thoughts and (not text or thoughts[-1].text == text):
            return thoughts
    if text:
        return (AssistantReasoning(text),)
    if input_item.summary or input_item.encrypted_content:
        conversion.notes.append(f"{param}: no effect, because it has only a summary or content encrypted elsewhere")
    return ()


def _call(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputCall)
    name = checked_name(item.namespace, item.name, param)
    return conversion.exact(AssistantCall(item.call_id, name, item.arguments), item.id)


def _custom_call(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputCustomCall)
    name = checked_name(item.namespace, item.name, param)
    call = AssistantCall(item.call_id, name, item.input)
    stored = conversion.known.stored_item(item.id) if item.id else None
    if stored is not None and stored.wire.get("input") == item.input and stored.wire.get("call_id") == item.call_id:
        return stored.meaning
    return (call,)


def _output(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputCallOutput)
    output = text_of(item.output, param=f"{param}.output")
    name = in_namespace(item.namespace, item.name or UNKNOWN_TOOL)[:MAX_NAME]
    if item.call_id is None:
        call_id = conversion.unnamed(param)
        if not item.name:
            conversion.history.name_of(call_id, f"{param}.call_id", missing="it has no 'call_id' and no 'name'")
        return (ToolResult(call_id, name, output),)
    name = conversion.history.name_of(item.call_id, f"{param}.call_id", default=name)
    return (ToolResult(item.call_id, name, output),)


def _reference(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputReference)
    stored = conversion.known.stored_item(item.id)
    if stored is None:
        raise NotFound(f"Item with id '{shortened(item.id)}' not found.", param=f"{param}.id")
    return _compacted(conversion, stored.meaning) if _is_compaction(conversion, item) else stored.meaning


def _mcp_call(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    """Convert the item of an MCP call, which contains the call and its result.

    Returns the call and the result. If the call was approved, its approval request has already added the call to the
    history; then only the result is returned.
    """
    assert isinstance(item, InputMcpCall)
    # A failed call may have an output besides its error. If both texts are equal, the model reads one of them.
    texts = dict.fromkeys((text_of(item.output, param=f"{param}.output"), error_text(item.error)))
    output = join(texts, "\n", param=f"{param}.output")
    stored = conversion.known.stored_item(item.id) if item.id else None
    if (
        stored is not None
        and is_same_mcp_call(stored, item.arguments, output)
        and conversion.has_calls_of(stored.meaning)
    ):
        return stored.meaning
    # The item of the approval request has already added the call to the history.
    request = conversion.requests.get(item.approval_request_id or "")
    if request is not None:
        return (ToolResult(request.call_id, request.name, output),)
    name = conversion.hosted_name(item.server_label, item.name or "mcp")
    call_id = served_call(item.id, item.type) if item.id else conversion.unnamed(param)
    return (AssistantCall(call_id, name, item.arguments), ToolResult(call_id, name, output))


def _approval_request(conversion: InputConversion, input_item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(input_item, InputApprovalRequest)
    request_id = input_item.id or conversion.unnamed(param)
    name = conversion.hosted_name(input_item.server_label, input_item.name or "mcp")
    items: Sequence[Item] = (AssistantCall(request_id, name, input_item.arguments),)
    stored = conversion.known.stored_item(request_id)
    if (
        stored is not None
        and stored.wire.get("arguments") == input_item.arguments
        and stored.wire.get("name") == input_item.name
    ):
        items = stored.meaning
    conversion.requests[request_id] = next(item for item in reversed(items) if isinstance(item, AssistantCall))
    return items


def _approval_response(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputApprovalResponse)
    call = conversion.requests.get(item.approval_request_id)
    at = f"{param}.approval_request_id"
    if call is None:
        missing = (
            f"'{at}': approval request '{shortened(item.approval_request_id)}' not found; "
            "send its 'mcp_approval_request' item before the response."
        )
        conversion.history.leave_out(NotFound(missing, param=at), "the input has no approval request with this id")
        return ()
    if item.approval_request_id in conversion.questions:
        wrong = f"'{at}' names a question of a tool; answer it with an item of the type 'mcp_elicitation_response'."
        conversion.leave_out(param, InvalidRequest(wrong, param=at), "the request is a question")
        return ()
    decision = conversion.answered.get(call.call_id)
    if decision is None:
        conversion.answered[call.call_id] = item.approve
    elif decision is item.approve:
        conversion.notes.append(f"{param}: no effect, because it repeats an earlier item")
    else:
        twice = f"'{at}': approval request '{shortened(item.approval_request_id)}' was already answered."
        conversion.leave_out(param, InvalidRequest(twice, param=at), "the approval request was already answered")
    return ()


def _elicitation_request(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputElicitationRequest)
    items = _approval_request(conversion, item, param)
    conversion.questions[item.id or conversion.unnamed(param)] = question_in(item.model_dump())
    return items


def _elicitation_response(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputElicitationResponse)
    request_id, at = item.elicitation_request_id, f"{param}.elicitation_request_id"
    question, call = conversion.questions.get(request_id), conversion.requests.get(request_id)
    if question is None or call is None:
        missing = (
            f"'{at}': question '{shortened(request_id)}' not found; "
            "send its 'mcp_elicitation_request' item before the response."
        )
        conversion.history.leave_out(NotFound(missing, param=at), "the input has no question with this id")
        return ()
    if call.call_id in conversion.answered:
        twice = f"'{at}': question '{shortened(request_id)}' was already answered."
        conversion.leave_out(param, InvalidRequest(twice, param=at), "the question was already answered")
        return ()
    conversion.answered[call.call_id] = True
    if item.action == "accept" and (problem := _problem(question, item.content)):
        raise InvalidRequest(f"'{param}.content': {problem}", param=f"{param}.content")
    return ()


def _problem(question: ToolQuestion, content: Mapping[str, Any] | None) -> str:
    """Return why `content` is not a valid answer to a question; "" if it is valid."""
    if question.url:
        return "" if not content else "must be omitted, because the question only asks the user to visit a page"
    if content is None:
        return "is required for the action 'accept': an object of the question's 'requested_schema'"
    try:
        check(question.schema, "requested_schema")
    except InvalidRequest:
        # The gateway does not support this schema, so only the tool can check the answer.
        return ""
    return violation(question.schema, orjson.dumps(content).decode()) or ""


def _code_call(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputCodeCall)
    stored = conversion.known.stored_item(item.id) if item.id else None
    if (
        stored is not None
        and stored.meaning
        and stored.wire.get("code") == (item.code or "")
        and conversion.has_calls_of(stored.meaning)
    ):
        return stored.meaning
    if not isinstance(item.outputs, list):
        conversion.notes.append(
            f"{param}: left out, because it has no outputs; "
            "request them with 'include': ['code_interpreter_call.outputs']"
        )
        return ()
    logs = [output.get("logs") for output in item.outputs if isinstance(output, dict)]
    output = join((log for log in logs if isinstance(log, str)), "\n", param=f"{param}.outputs")
    # By this id, the conversation cache finds the tokens that the model generated for the call, and renders the call
    # only once. Code from other servers gets the same name and form as a call of this model.
    call_id = served_call(item.id, item.type) if item.id else conversion.unnamed(param)
    return AssistantCall(call_id, PYTHON, item.code or ""), ToolResult(call_id, PYTHON, output)


def _sealed(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputSealed)
    # A compaction from another server or tenant cannot be decrypted. It is skipped and reported in a note.
    opened = conversion.known.opened(item.encrypted_content) if item.encrypted_content else None
    if opened is None:
        conversion.notes.append(f"{param}: no effect, because this gateway cannot decrypt it")
        return ()
    return _compacted(conversion, opened)


def _compacted(conversion: InputConversion, opened: Sequence[Item]) -> Sequence[Item]:
    """Return the items of a compaction, and remove the items that it replaces.

    If output of the model precedes the compaction, the client has sent its whole history, which the compaction
    replaces. Otherwise, the client has chosen the messages before the compaction, so the model reads all of them. Those
    that the compaction does not contain are returned first, because a stored compaction replaces the items before it.
    """
    history = conversion.history
    if replaces_history(opened):
        chosen = () if history.has_output else tuple(item for item in history.items() if item not in opened)
        history.clear()
        return (*chosen, *opened)
    # The item from `/responses/compact` of earlier versions lacks the user messages. The client sends them before it.
    known = [item for item in history.items() if isinstance(item, UserMessage | DeveloperMessage | AddedTools)]
    return [item for item in opened if item not in known]


def _search(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    """Convert a web search call.

    The client's item contains only the query. The results are in the stored item, if there is one.
    """
    stored = conversion.known.stored_item(item.id) if item.id else None
    if stored is not None and stored.meaning and conversion.has_calls_of(stored.meaning):
        return stored.meaning
    return _without_meaning(conversion, item, param)


def _client_tool_call(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputClientToolCall)
    kind = item.type.removesuffix("_call")
    details = item.action if item.action is not None else item.operation
    call_id = item.call_id or item.id or conversion.unnamed(param)
    if item.id:
        conversion.call_ids[item.id] = call_id
    stored = conversion.known.stored_item(item.id) if item.id else None
    if stored is not None and is_same_call(stored, item.call_id, details):
        return stored.meaning
    return (AssistantCall(call_id, kind, arguments_of(FORMS[kind], details)),)


def _client_tool_output(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputClientToolOutput)
    text = join(output_texts(item.output), "\n", param=f"{param}.output")
    # The output of a patch is only a log. Its status states whether the patch was applied.
    text = f"{item.status}: {text}" if text and item.status == FAILED else text or item.status or ""
    kind = item.type.removesuffix("_call_output")
    call_id = conversion.call_of(item) or item.call_id or item.id
    if call_id is None:
        conversion.notes.append(f"{param}: the model reads this result without its call, because it has no 'call_id'")
        return (ToolResult(conversion.unnamed(param), kind, text),)
    at = f"{param}.call_id" if item.call_id else f"{param}.id"
    return (ToolResult(call_id, conversion.history.name_of(call_id, at, default=kind), text),)


def _configuration(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    assert isinstance(item, InputConfiguration)
    if item.text is not None:
        at = f"{param}.text.format"
        _, without, refusal = enforceable(item.text.format, at)
        if refusal is not None:
            conversion.leave_out(f"{at}.{without}", refusal, refusal.message.removesuffix("."))
    conversion.configuration = conversion.configuration.updated(item.reasoning, item.text)
    return ()


def _without_meaning(conversion: InputConversion, item: InputItem, param: str) -> Sequence[Item]:
    conversion.notes.append(f"{param}: no effect, because an item of type '{item.type}' has no content for the model")
    return ()


# Readers by kind of item.
READERS: Mapping[type[InputItem], Callable[[InputConversion, InputItem, str], Sequence[Item]]] = {
    InputMessage: read_message,
    InputAgentMessage: read_agent_message,
    InputReasoning: _reasoning,
    InputCall: _call,
    InputCustomCall: _custom_call,
    InputCallOutput: _output,
    InputReference: _reference,
    InputMcpCall: _mcp_call,
    # Skipped, because the tools of an MCP server are declared anew for every answer.
    InputMcpList: lambda *_: (),
    InputApprovalRequest: _approval_request,
    InputApprovalResponse: _approval_response,
    InputElicitationRequest: _elicitation_request,
    InputElicitationResponse: _elicitation_response,
    InputCodeCall: _code_call,
    InputSealed: _sealed,
    InputSearch: _search,
    InputSilent: _without_meaning,
    InputTrigger: lambda *_: (),
    InputConfiguration: _configuration,
    InputAddedTools: read_added_tools,
    InputSearchCall: read_search_call,
    InputSearchOutput: read_search_output,
    InputClientToolCall: _client_tool_call,
    InputClientToolOutput: _client_tool_output,
}


def read(conversion: InputConversion, item: InputItem, param: str) -> tuple[Item, ...]:
    """Add an item to the history of `conversion`, and return its content.

    Raises InvalidRequest for an item that contradicts the items before it, and NotFound for a reference to a missing
    item. Both errors name the field `param`.
    """
    items = READERS[type(item)](conversion, item, param)
    if not _is_compaction(conversion, item):
        conversion.add(items)
        return tuple(items)
    # Clients may send pending calls before or after the compaction that also contains them.
    conversion.history.move_if_repeated(pending_calls(conversion.history.items()))
    conversion.add(items)
    conversion.history.move_if_repeated(pending_calls(items))
    return tuple(items)


def _is_compaction(conversion: InputConversion, item: InputItem) -> bool:
    stored = conversion.known.stored_item(item.id) if isinstance(item, InputReference) else None
    return isinstance(item, InputSealed) or (stored is not None and stored.wire.get("type") == "compaction")
