"""Outcomes of every field of the newest SDKs' request types, measured against a running gateway.

Each row of `openai.json` and `anthropic.json` is sent with each of its values, and once without the field. A field is
in effect if the prompt, the parameters for the backend or the answer differ. Otherwise it must be refused or noted.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.e2e.gateway import Answer, Gateway
from tests.fakes import FakeVllm
from tests.fields.cases import UPSTREAM, WORD, case_of
from unisono.harmony.encoding import load_encoding

Json = dict[str, Any]
FOLDER: Final = Path(__file__).parent
SDKS: Final = ("openai", "anthropic")
ANSWER: Final = load_encoding().encode_marked(
    "<|channel|>analysis<|message|>What is a cup made of?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is made of porcelain.<|return|>"
)
USER: Final = [{"role": "user", "content": "What is a cup made of?"}]
REQUESTS: Final[dict[str, tuple[str, Json]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "responses": ("/v1/responses", {"input": "What is a cup made of?"}),
    "completions": ("/v1/completions", {"prompt": "What is a cup made of?", "max_tokens": 100}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 100}),
}
# Values that differ in every answer.
_VOLATILE: Final = re.compile(r'"(?:id|item_id|response_id|created|created_at|completed_at|request_id)":"?[^",}]*"?')


# Kinds of objects in a path, and positions in the path of a note.
_KIND: Final = re.compile(r"\[[^\]]*\]")
_INDEX: Final = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Outcome:
    """Outcome of one value of a field.

    `kind` is `refused`, `noted`, `in effect` or `none`. `detail` is the refused field, the note, or what has changed.
    """

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Measured:
    status: int
    # Parameters of each request to the backend.
    asked: list[Any]
    answer: Answer


def recorded(sdk: str) -> Any:
    """Return the version of an SDK and its rows by API."""
    return json.loads((FOLDER / f"{sdk}.json").read_text())


def rows() -> Iterator[tuple[str, Json]]:
    """Yield the rows of both SDKs with their APIs.

    Of tools with several versions, the newest one that has a field counts. The gateway reads all of them in the same
    way.
    """
    for sdk in SDKS:
        for api, found in recorded(sdk).items():
            if api != "version":
                newest = {unversioned(row["path"]): row for row in found}
                yield from ((api, row) for row in newest.values())


def unversioned(text: str) -> str:
    """Return a text without the versions of Anthropic's tools."""
    return re.sub(r"_20\d{6}\b", "", text)


def with_value(row: Json, value: Any) -> Json:
    """Return the fields of a row with a value of its field."""
    fields = copy.deepcopy(row["body"])
    *path, last = row["at"]
    inner: Any = fields
    for step in path:
        inner = inner[step]
    inner[last] = value
    return fields


class Measurement:
    """A gateway with a scripted backend, to which the rows are sent one after another.

    `upstream` is the address of its MCP server.
    """

    def __init__(self, running: Gateway, fake: FakeVllm, upstream: str) -> None:
        self._running = running
        self._fake = fake
        self._upstream = upstream
        self._without: dict[str, Measured] = {}

    async def outcomes(self, api: str, row: Json) -> list[tuple[Any, Outcome]]:
        """Return each value of a row with its outcome."""
        case = case_of(api, row["path"])
        row = {**row, "body": _merged(case.fields, row["body"])}
        values = row["values"] if case.values is None else case.values
        key = f"{api} {json.dumps(row['body'], sort_keys=True)}"
        if key not in self._without:
            self._without[key] = await self._ask(api, row["body"])
        usual = self._without[key]
        return [
            (value, self._outcome(api, row, usual, await self._ask(api, with_value(row, value)))) for value in values
        ]

    async def _ask(self, api: str, fields: Json) -> Measured:
        path, usual = REQUESTS[api]
        self._fake.requests.clear()
        body = json.dumps({"model": "gpt-oss", **usual, **fields}).replace(UPSTREAM, self._upstream)
        answer = await self._running.post(path, body.encode())
        if answer.status == 200 and answer.body and answer.body.get("status") in ("queued", "in_progress"):
            await self._finished(answer.body["id"])
        return Measured(answer.status, [_parameters(seen.json) for seen in self._fake.requests], answer)

    async def _finished(self, response_id: str) -> None:
        """Wait for a background response, whose requests would otherwise be counted for the next row."""
        while (await self._running.get(f"/v1/responses/{response_id}")).body["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)

    def _outcome(self, api: str, row: Json, usual: Measured, measured: Measured) -> Outcome:
        if measured.status != 200:
            error = measured.answer.body["error"]
            if measured.status >= 500:
                return Outcome("failed", f"{measured.status}: {error.get('message')}")
            return Outcome("refused", str(error.get("message")))
        path = _KIND.sub("", row["path"]).replace("NAME", WORD)
        for note in notes_of(measured.answer):
            noted = _INDEX.sub("", note.partition(":")[0])
            # A note on an object is one on all its fields.
            if f"{path}.".startswith(f"{noted}.") or (noted.startswith(path) and note not in notes_of(usual.answer)):
                in_header = note.partition(":")[0] in measured.answer.headers.get("x-unisono-notes", "").split(", ")
                return Outcome("noted", note) if in_header else Outcome("failed", f"not in the header: {note}")
        if usual.status != 200:
            return Outcome("in effect", "required")
        if measured.asked != usual.asked:
            return Outcome("in effect", "request to the backend")
        if answered(api, measured.answer, row) != answered(api, usual.answer, row):
            return Outcome("in effect", "answer")
        return Outcome("none")


def _merged(fields: Any, others: Any) -> Any:
    """Return `fields` with the values of `others` that it does not have."""
    if isinstance(fields, dict) and isinstance(others, dict):
        both = {name: _merged(fields[name], others[name]) for name in fields.keys() & others.keys()}
        return {**others, **fields, **both}
    if isinstance(fields, list) and isinstance(others, list) and fields and others:
        return [_merged(fields[0], others[0]), *fields[1:]]
    return fields


def _parameters(request: Json) -> Json:
    return {name: value for name, value in request.items() if name not in ("request_id", "cache_salt")}


def notes_of(answer: Answer) -> list[str]:
    """Return the notes in a body or in the events of a stream."""
    found: list[str] = []
    for body in [answer.body, *answer.events]:
        for holder in (body, (body or {}).get("response"), (body or {}).get("message")):
            if isinstance(holder, dict) and isinstance(holder.get("unisono"), dict):
                found += holder["unisono"].get("notes") or ()
    return list(dict.fromkeys(found))


def answered(api: str, answer: Answer, row: Json) -> str:
    """Return the answer without values that always differ, and without the repeated field of the request."""
    body = answer.events if answer.body is None else answer.body
    if isinstance(body, dict):
        # A Responses object repeats the fields of its request, whether or not they have an effect.
        hidden = {"unisono", row["at"][0]} if api == "responses" else {"unisono"}
        body = {name: value for name, value in body.items() if name not in hidden}
    return _VOLATILE.sub("", json.dumps(body, sort_keys=True, separators=(",", ":")))
