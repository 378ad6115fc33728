"""Questions of a tool to the user during a call, which the protocol calls elicitations.

New servers answer a call with the questions, and get the answers with a repetition of the call. Older ones ask while
the call runs. The gateway then cancels the question and repeats the whole call with the answer, because no call can
stay open until the user has answered. A server may also refuse a call until the user has visited a page.
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
from unisono.core.elicitation import ToolQuestion, UserAction, UserAnswer
from unisono.core.tools import ToolOutcome

# Maximum number of questions of one call. A server could otherwise ask forever.
MAX_QUESTIONS: Final = 16
MAX_MESSAGE_CHARACTERS: Final = 4_000
MAX_URL_CHARACTERS: Final = 2_048
# Keys of the state with which a call continues.
_ASKED, _ANSWERS, _OPEN, _SERVER_STATE = "asked", "answers", "open", "server_state"
# Beginning of the keys of pages, which the server does not learn.
_PAGE: Final = "page "


class Dialogue:
    """Questions and answers of one call. Without `can_ask` every question is declined.

    `question` is the one that the user has to answer before the call can be made again. `declined` are the messages of
    questions that nobody was asked.
    """

    def __init__(self, answer: UserAnswer | None, *, can_ask: bool) -> None:
        state = answer.state if answer is not None and isinstance(answer.state, dict) else {}
        answers = state.get(_ANSWERS)
        self._answers: dict[str, Json] = dict(answers) if isinstance(answers, dict) else {}
        open_questions = state.get(_OPEN)
        self._open: dict[str, Json] = dict(open_questions) if isinstance(open_questions, dict) else {}
        self._server_state = state.get(_SERVER_STATE)
        self._can_ask = can_ask
        self.question: ToolQuestion | None = None
        self.declined: list[str] = []
        if answer is not None and isinstance(asked := state.get(_ASKED), str):
            self._answers[asked] = {"action": answer.action.value, "content": answer.content}
        self._ask_next()

    def is_waiting(self) -> bool:
        """Return whether the user has to answer a question."""
        return self.question is not None

    def _ask_next(self) -> None:
        """Ask the next question that the server has sent already."""
        for key, written in self._open.items():
            # The state comes from the client.
            match written:
                case [str(message), dict(schema), str(url)] if key not in self._answers:
                    self.question = self._asked(key, message, schema, url)
                    return

    def _asked(self, key: str, message: str, schema: dict[str, Json], url: str) -> ToolQuestion:
        state: Json = {_ASKED: key, _ANSWERS: self._answers, _OPEN: self._open, _SERVER_STATE: self._server_state}
        return ToolQuestion(message, schema, url, state)

    # -- a server that asks while the call runs

    def reply(self, params: types.ElicitRequestParams) -> ElicitResult:
        """Return the user's answer to a question.

        A new question is cancelled, and is the next one to ask.
        """
        written = _written(params)
        key = json.dumps(written)
        if (known := self._answers.get(key)) is not None:
            return _result(known)
        if not self._can_ask or len(self._answers) >= MAX_QUESTIONS or not _is_askable(params):
            self.declined.append(written[0])
            return ElicitResult(action="decline")
        self.question = self.question or self._asked(key, *written)
        return ElicitResult(action="cancel")

    # -- a server that answers a call with its questions

    def read(self, result: InputRequiredResult) -> bool:
        """Remember the questions in the answer to a call.

        Returns False if they cannot be asked.
        """
        requests = result.input_requests or {}
        forms = {key: request.params for key, request in requests.items() if isinstance(request, ElicitRequest)}
        if len(forms) < len(requests) or len(forms) > MAX_QUESTIONS:
            return False
        if not self._can_ask or not all(map(_is_askable, forms.values())):
            self.declined += [_written(params)[0] for params in forms.values()]
            return False
        self._server_state = result.request_state
        self._open = {key: list(_written(params)) for key, params in forms.items()}
        # Answers to earlier questions were sent already, and a server may use a key again.
        self._answers = {}
        self._ask_next()
        return True

    def read_pages(self, error: types.ErrorData) -> bool:
        """Remember the pages that the user has to visit first.

        Returns False if the user cannot be asked.
        """
        pages = [page for page in _pages(error) if _is_askable(page)]
        if not pages or not self._can_ask or len(self._answers) + len(pages) > MAX_QUESTIONS:
            return False
        self._open = {f"{_PAGE}{page.url}": list(_written(page)) for page in pages}
        self._ask_next()
        return self.is_waiting()

    def params(self, params: types.CallToolRequestParams) -> types.CallToolRequestParams:
        """Return the parameters of the call, with the answers to its server's questions."""
        keys = [key for key in self._open if key in self._answers and not key.startswith(_PAGE)]
        answers = {key: _result(self._answers[key]) for key in keys}
        state = self._server_state if isinstance(self._server_state, str) else None
        return params.model_copy(update={"input_responses": answers or None, "request_state": state})


def outcome_of(dialogue: Dialogue) -> ToolOutcome:
    """Return the outcome of a call whose tool asks the user."""
    question = dialogue.question
    assert question is not None
    page = f" The user is sent to {question.url}." if question.url else ""
    text = f"The tool asks the user: {question.message}{page} The call is made again with the answer."
    return ToolOutcome(text, question=question)


def text_on_declined(messages: list[str]) -> str:
    """Return what the model reads about questions that nobody was asked."""
    return "\n".join(
        f"[The tool asked the user a question, which cannot be passed on here: {each}]" for each in messages
    )


def _is_askable(params: types.ElicitRequestParams) -> bool:
    """Return False for a page with an address that no user should open."""
    if not isinstance(params, ElicitRequestURLParams):
        return True
    return len(params.url) <= MAX_URL_CHARACTERS and params.url.lower().startswith(("https://", "http://"))


def _written(params: types.ElicitRequestParams) -> tuple[str, dict[str, Json], str]:
    """Return the message, the schema of the answer, and the address of the page."""
    message = params.message[:MAX_MESSAGE_CHARACTERS]
    if isinstance(params, ElicitRequestURLParams):
        return message, {}, params.url
    return message, params.requested_schema, ""


def _result(known: Json) -> ElicitResult:
    fields = known if isinstance(known, dict) else {}
    try:
        # It cannot be sent with an integer of more than 64 bits, or with half of a surrogate pair.
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
