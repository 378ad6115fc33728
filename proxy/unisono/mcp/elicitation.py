"""Questions that a tool asks the user during a call; the protocol calls them elicitations.

Newer servers answer a call with their questions. The gateway then repeats the call together with the user's answers.
Older servers send a question while the call is running. The gateway cancels this question and later repeats the whole
call, because no call can stay open until the user has answered. When the repeated call sends the same question, it gets
the answer. A server may also refuse a call until the user has visited a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import mcp_types as types
import orjson
from mcp_types import ElicitRequest, ElicitRequestURLParams, ElicitResult, InputRequiredResult
from pydantic import ValidationError

from unisono.core.conversation import Json
from unisono.core.tool_host import ToolOutcome, ToolQuestion, UserAction, UserAnswer

# Maximum number of questions of one call. A server could otherwise ask forever.
MAX_QUESTIONS: Final = 16
MAX_MESSAGE_CHARACTERS: Final = 4_000
MAX_URL_CHARACTERS: Final = 2_048
# Keys of the state that the client returns with an answer. The call continues from this state.
_ASKED, _ANSWERS, _OPEN, _SERVER_STATE = "asked", "answers", "open", "server_state"
# Prefix of the keys of pages that the user has to visit. These keys are not sent to the server.
_PAGE: Final = "page "


class Dialogue:
    """Questions and answers of one call. If `can_ask` is False, every question is declined.

    `answer` is the user's answer to the previous question, with the state of the call. `question` is the question that
    the user has to answer before the call can be repeated, or None. `declined` contains the texts of the declined
    questions. `unassigned` contains the texts of cancelled questions that this call or another call has asked.
    `has_result` is True once the server has answered the call.
    """

    def __init__(self, answer: UserAnswer | None, *, can_ask: bool) -> None:
        state = answer.state if answer is not None and isinstance(answer.state, dict) else {}
        answers = state.get(_ANSWERS)
        self._answers: dict[str, Json] = dict(answers) if isinstance(answers, dict) else {}
        open_questions = state.get(_OPEN)
        self._open: dict[str, Json] = dict(open_questions) if isinstance(open_questions, dict) else {}
        self._server_state = state.get(_SERVER_STATE)
        self.can_ask = can_ask
        self.question: ToolQuestion | None = None
        self.declined: list[str] = []
        self.unassigned: list[str] = []
        self.has_result = False
        if answer is not None and isinstance(asked := state.get(_ASKED), str):
            self._answers[asked] = {"action": answer.action.value, "content": answer.content}
        self._ask_next()

    def is_waiting(self) -> bool:
        """Return True if the user has to answer a question."""
        return self.question is not None

    def _ask_next(self) -> None:
        """Set `question` to the first open question without an answer, if there is one."""
        for key, written in self._open.items():
            # The client returned the state, so its structure is checked.
            match written:
                case [str(message), dict(schema), str(url)] if key not in self._answers:
                    self.question = self._asked(key, message, schema, url)
                    return

    def _asked(self, key: str, message: str, schema: dict[str, Json], url: str) -> ToolQuestion:
        state: Json = {_ASKED: key, _ANSWERS: self._answers, _OPEN: self._open, _SERVER_STATE: self._server_state}
        return ToolQuestion(message, schema, url, state)

    # -- a server that asks while the call runs

    def reply(self, params: types.ElicitRequestParams) -> ElicitResult:
        """Return the user's answer to a question that the server sends during the call.

        A question without an answer is cancelled. The first such question becomes `question`. A question that cannot be
        passed to the user is declined.
        """
        written = _written(params)
        key = json.dumps(written)
        if (known := self._answers.get(key)) is not None:
            return _result(known)
        if not self.can_ask or len(self._answers) >= MAX_QUESTIONS or not _is_askable(params):
            self.declined.append(written[0])
            return ElicitResult(action="decline")
        self.question = self.question or self._asked(key, *written)
        return ElicitResult(action="cancel")

    # -- a server that answers a call with its questions

    def read(self, result: InputRequiredResult) -> bool:
        """Store the questions in a server's answer to a call.

        Returns False if a question cannot be passed to the user, or if there are too many.
        """
        requests = result.input_requests or {}
        forms = {key: request.params for key, request in requests.items() if isinstance(request, ElicitRequest)}
        if len(forms) < len(requests) or len(forms) > MAX_QUESTIONS:
            return False
        if not self.can_ask or not all(map(_is_askable, forms.values())):
            self.declined += [_written(params)[0] for params in forms.values()]
            return False
        self._server_state = result.request_state
        self._open = {key: list(_written(params)) for key, params in forms.items()}
        # Earlier answers are dropped: they were already sent, and the server may use their keys for new questions.
        self._answers = {}
        self._ask_next()
        return True

    def read_pages(self, error: types.ErrorData) -> bool:
        """Store the pages that the user has to visit before the server accepts the call.

        Returns False if the user cannot be sent to a page.
        """
        pages = [page for page in _pages(error) if _is_askable(page)]
        if not pages or not self.can_ask or len(self._answers) + len(pages) > MAX_QUESTIONS:
            return False
        self._open = {f"{_PAGE}{page.url}": list(_written(page)) for page in pages}
        self._ask_next()
        return self.is_waiting()

    def params(self, params: types.CallToolRequestParams) -> types.CallToolRequestParams:
        """Return the parameters of the call with the user's answers and the server's state."""
        keys = [key for key in self._open if key in self._answers and not key.startswith(_PAGE)]
        answers = {key: _result(self._answers[key]) for key in keys}
        state = self._server_state if isinstance(self._server_state, str) else None
        return params.model_copy(update={"input_responses": answers or None, "request_state": state})


def outcome_of(dialogue: Dialogue) -> ToolOutcome:
    """Return the outcome of a call that waits for the user's answer."""
    question = dialogue.question
    assert question is not None
    page = f" The user is sent to {question.url}." if question.url else ""
    text = f"The tool asks the user: {question.message}{page} The call is repeated with the answer."
    return ToolOutcome(text, question=question)


def note_of(dialogue: Dialogue) -> str:
    """Return the text that informs the model of the questions that the user does not see."""
    declined = (
        f"[The tool asked the user a question, which cannot be passed on here: {each}]" for each in dialogue.declined
    )
    unassigned = (
        "[During this call, the tool server asked the user a question that may belong to another call, so it was not "
        f"passed on: {each} If this call needs the answer, make it again.]"
        for each in dialogue.unassigned
    )
    return "\n".join((*declined, *unassigned))


def _is_askable(params: types.ElicitRequestParams) -> bool:
    """Return True for a form, and for a page with an HTTP address of acceptable length."""
    if not isinstance(params, ElicitRequestURLParams):
        return True
    return len(params.url) <= MAX_URL_CHARACTERS and params.url.lower().startswith(("https://", "http://"))


def _written(params: types.ElicitRequestParams) -> tuple[str, dict[str, Json], str]:
    """Return a question as its message, the schema of the answer, and the address of a page.

    A form has an empty address; a page has an empty schema.
    """
    message = params.message[:MAX_MESSAGE_CHARACTERS]
    if isinstance(params, ElicitRequestURLParams):
        return message, {}, params.url
    return message, params.requested_schema, ""


def _result(known: Json) -> ElicitResult:
    fields = known if isinstance(known, dict) else {}
    try:
        # The SDK cannot send integers of more than 64 bits or lone surrogates, and orjson rejects both.
        orjson.dumps(known)
        return ElicitResult.model_validate({"action": fields.get("action"), "content": fields.get("content")})
    except (ValidationError, orjson.JSONEncodeError):
        return ElicitResult(action=UserAction.CANCEL.value)


def _pages(error: types.ErrorData) -> Iterator[ElicitRequestURLParams]:
    data = error.data if isinstance(error.data, dict) else {}
    pages = data.get("elicitations")
    for page in pages if isinstance(pages, list) else ():
        try:
            yield ElicitRequestURLParams.model_validate(page)
        except ValidationError:
            continue
