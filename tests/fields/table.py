"""Generator of the page on request fields, from their outcomes on a running gateway.

`python -m tests.fields.table > docs/fields.md` regenerates the page.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from tests.fields.cases import WORD, unseen_effect
from tests.fields.outcomes import ANSWER, SDKS, Measurement, Outcome, recorded, rows, unversioned
from tests.mcp.conftest import start_upstream
from tests.toolservers.running import started

COMMAND: Final = "python -m tests.fields.table > docs/fields.md"
HEAD: Final = """# Request fields

This page lists what the gateway does with each field of a request.
`{command}` generates the page.

A program sent every field that the types of openai {openai} and anthropic {anthropic} declare to a running gateway. It
sent each field with each value that the types allow, and with values such as `false`, `0` and `""`. The gateway had two
models, an MCP server, and servers for web search and code.

| result | meaning |
|---|---|
| in effect | The field changes the prompt, the request to the backend, the answer or the stored state. |
| note | The field has no effect. `unisono.notes`, `x-unisono-notes` and `unisono_notes_total` report this. |
| error | The request returns an HTTP error that names the field. Errors for empty values are not listed. |

- `tools[function].strict` is the field `strict` of a tool with the type `function`.
- If a whole object is refused or has no effect, the table has one row for the object and no rows for its fields.
- An empty object or list has the same meaning as an absent field.
- The table does not contain the content of `messages`, `input` and `system`.
- [api.md](api.md) describes fields of vLLM, OpenRouter and LiteLLM.
"""
TITLES: Final = {
    "chat": "Chat Completions",
    "responses": "Responses",
    "completions": "Completions",
    "messages": "Messages",
}
# Maximum characters of an error and of a value in the table.
MAX_CHARACTERS: Final = 150
MAX_VALUE_CHARACTERS: Final = 30
# Values that many fields refuse, which needs no mention.
EMPTY: Final[tuple[Any, ...]] = ("", 0, {}, [])


@dataclass(frozen=True)
class Measured:
    """Values of a field with their outcomes."""

    api: str
    path: str
    outcomes: list[tuple[Any, Outcome]]

    def values_with(self, kind: str) -> list[Any]:
        return [value for value, outcome in self.outcomes if outcome.kind == kind]

    @property
    def unseen(self) -> str:
        """Result for values whose effect no answer shows; "" without such values."""
        if self.values_with("in effect"):
            return ""
        return next(filter(None, (unseen_effect(self.api, self.path, value) for value, _ in self.outcomes)), "")

    @property
    def silent(self) -> list[Any]:
        """Values with neither an effect nor a note nor an error.

        An empty object or list asks for nothing. Beside a value with an effect, another may be the default.
        """
        if self.values_with("in effect"):
            return []
        unseen = [value for value in self.values_with("none") if value not in ({}, [])]
        return [value for value in unseen if not unseen_effect(self.api, self.path, value)]


async def measured() -> list[Measured]:
    """Return the outcomes of all fields.

    The gateway has a scripted backend, a browser, Python, and an MCP server that is also configured.
    """
    with (
        TemporaryDirectory() as folder,
        start_upstream(Path(folder)) as (_, upstream),
        started("browser", "--folder", folder) as browser,
        started("python") as python,
    ):
        url = upstream.urls["modern"]
        async with FakeVllm(tokens=ANSWER) as fake:
            models = config_of(f"vllm@{fake.url}")
            other = {**models["model_list"][0], "model_name": "gpt-oss-2"}
            config = {
                **models,
                "model_list": [*models["model_list"], other],
                "mcp_servers": {WORD: {"url": url}, "pages": {"url": browser}, "runs": {"url": python}},
                "unisono": {
                    "raw_completions": True,
                    "builtin_tools": {"browser": "pages", "python": "runs"},
                    "mcp_allowed_hosts": [{"host": "127.0.0.1", "ports": [], "plain_http": True, "private": True}],
                },
            }
            async with gateway(config) as running:
                measurement = Measurement(running, fake, url)
                return [Measured(api, row["path"], await measurement.outcomes(api, row)) for api, row in rows()]


def page(fields: Iterable[Measured]) -> str:
    """Return the page with a table for each API."""
    fields = list(fields)
    versions = {sdk: recorded(sdk)["version"] for sdk in SDKS}
    parts = [HEAD.format(command=COMMAND, **versions)]
    for api, title in TITLES.items():
        lines = [
            f"| `{path}` | {result} |" for path, result in _rows([each for each in fields if each.api == api]).items()
        ]
        parts.append("\n".join([f"## {title}\n", "| field | result |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def _rows(fields: list[Measured]) -> dict[str, str]:
    """Return the results by path: one for an object if all of its fields have the same note or error."""
    found: dict[str, str] = {}
    hidden: list[str] = []
    for each in fields:
        path, result = unversioned(each.path), _result(each)
        if path not in found and any(path.startswith(prefix) for prefix in hidden):
            continue
        tool = re.match(r"tools\[[^\]]*\]", path)
        same = _common([other for other in fields if tool and unversioned(other.path).startswith(tool[0])])
        if tool is not None and same:
            found[tool[0]] = same
            hidden.append(tool[0])
            continue
        found[path] = result
        if _common([each]):
            hidden += (f"{path}.", f"{path}[")
    return found


def _common(fields: list[Measured]) -> str:
    """Return the result if all values of all fields have the same note or the same error, and otherwise ""."""
    outcomes = {outcome for each in fields for _, outcome in each.outcomes}
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"noted"}:
        return "note"
    same = {unversioned(outcome.detail) for outcome in outcomes}
    return _error(same.pop()) if kinds == {"refused"} and len(same) == 1 else ""


def _result(each: Measured) -> str:
    noted, refused = each.values_with("noted"), each.values_with("refused")
    unseen = each.unseen
    if all(value in EMPTY for value, _ in each.outcomes) and not noted:
        return unseen or "in effect"
    if unseen or len(noted) + len(refused) < len(each.outcomes):
        parts = [unseen or "in effect"]
    elif not noted:
        return _error(each.outcomes[0][1].detail)
    else:
        parts = []
    if noted:
        parts.append("note" if len(noted) == len(each.outcomes) else f"note for {_values(noted)}")
    if refused and not all(value in EMPTY for value in refused):
        parts.append(f"error for {_values(refused)}")
    return "; ".join(parts)


def _values(values: list[Any]) -> str:
    written = [json.dumps(value) for value in values]
    short = [f"`{each}`" for each in written if len(each) <= MAX_VALUE_CHARACTERS]
    return ", ".join(short if len(short) == len(written) else [*short, "other values"])


def _error(message: str) -> str:
    # The row names the field already.
    text = re.sub(r"^(Invalid value for )?'[^']+': ", "", unversioned(message)).replace("|", "\\|")
    return "error: " + (text if len(text) <= MAX_CHARACTERS else text[: text.rindex(" ", 0, MAX_CHARACTERS)] + " …")


if __name__ == "__main__":
    print(page(asyncio.run(measured())), end="")
