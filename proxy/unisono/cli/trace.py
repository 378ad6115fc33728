"""`unisono trace`: prints, replays or forks recordings from the store or from a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from unisono.bootstrap.engine import violation
from unisono.cli.backends import open_backends
from unisono.cli.opened_store import run_on_store
from unisono.cli.terminal import harmless, has_colour, on_one_line
from unisono.cli.trace_view import painted
from unisono.config import Config, load
from unisono.config.config_file import text_of
from unisono.core.access import LOCAL_TENANT, MASTER_TENANT
from unisono.core.conversation import Effort
from unisono.core.events import Closed, Event, HostedCall, Repaired, ToolCall
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason, OutputForm, Sampling
from unisono.core.json_syntax import is_well_formed, parsed_json
from unisono.core.recordings import StoredTrace
from unisono.core.state_store import Store
from unisono.engine.replay import Replay, replay_answer, to_request
from unisono.errors import UnisonoError
from unisono.fidelity.runner import generate
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.observe.recording import Document, checked, output_records, unpacked
from unisono.web.trace_fork import MORE_TOKENS, Fork, ForkChanges, common_length, first_difference, fork_of

# Exit codes of a replay with a different result, and of a replay that is not possible.
DIFFERENT, UNREPLAYABLE = 1, 2
# Exceptions that a damaged recording can cause, because its fields may be missing or have any type.
DAMAGED: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

Result = TypeVar("Result")


class Unreplayable(click.ClickException):
    exit_code = UNREPLAYABLE


def trace(name: str | None, config_path: Path | None, tenant: str, *, as_json: bool, replay: bool, last: int) -> None:
    """Print or replay a recording. `name` is its id or file; None lists the last recordings.

    Without a `tenant`, the search includes the operator's own tenant and all tenants of keys in the store.
    """
    if name is None:
        _list(config_path, tenant, last, as_json=as_json)
        return
    document = document_of(name, config_path, tenant)
    if replay:
        _replay(document, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(document))
    else:
        try:
            click.echo("\n".join(painted(document, load_encoding())), color=has_colour())
        except (*DAMAGED, UnisonoError) as error:
            raise click.ClickException("this recording is damaged") from error


# -- sources of recordings


def document_of(name: str, config_path: Path | None, tenant: str) -> Document:
    """Load a recording. `name` is the path of a file, or an id in the store.

    Raises ClickException if there is no readable recording.
    """
    if _is_file(name):
        return _from_file(Path(name))
    if not is_well_formed(name):
        raise click.BadParameter(f"{name!r} is not valid UTF-8", param_hint="ID")
    return _from_store(name, config_path, tenant)


def _is_file(name: str) -> bool:
    # Ids contain no slash.
    return name.endswith(".json") or "/" in name


def _from_file(path: Path) -> Document:
    try:
        return checked(parsed_json(text_of(path)))
    except ValueError as error:
        raise click.ClickException(f"{path}: not a readable recording: {error}") from error


def _from_store(id: str, config_path: Path | None, tenant: str) -> Document:
    config = _config(config_path)

    async def looked(store: Store) -> StoredTrace | None:
        for owner in await _tenants(config, store, tenant):
            if found := await store.trace(owner, id):
                return found
        return None

    found = _with_store(config, looked)
    if found is None:
        of = f" of tenant {on_one_line(tenant)!r}" if tenant else ""
        raise click.ClickException(
            f"there is no recording {on_one_line(id)!r}{of}; it may have expired, or `unisono.traces.mode` may exclude "
            "this answer"
        )
    try:
        return unpacked(found.document)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def newest_documents(config_path: Path | None, last: int) -> list[Document]:
    """Return the newest `last` recordings of all tenants together.

    Damaged recordings are left out.
    """
    config = _config(config_path)

    async def looked(store: Store) -> list[StoredTrace]:
        owners = await _tenants(config, store, "")
        about = [one for owner in owners for one in await store.traces(owner, last)]
        newest = sorted(about, key=lambda one: one.at, reverse=True)[:last]
        found = [await store.trace(one.tenant, one.id) for one in newest]
        return [one for one in found if one is not None]

    documents = []
    for found in _with_store(config, looked):
        with suppress(ValueError):
            documents.append(unpacked(found.document))
    return documents


def _list(config_path: Path | None, tenant: str, last: int, *, as_json: bool) -> None:
    config = _config(config_path)

    async def looked(store: Store) -> list[StoredTrace]:
        found = [one for owner in await _tenants(config, store, tenant) for one in await store.traces(owner, last)]
        return sorted(found, key=lambda one: one.at, reverse=True)[:last]

    found = _with_store(config, looked)
    rows = [{"id": one.id, "at": one.at, "tenant": one.tenant, **json.loads(one.about)} for one in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        of = f" of tenant {on_one_line(tenant)!r}" if tenant else ""
        click.echo(f"There are no recordings{of}.", err=True)
    several = len({row["tenant"] for row in rows}) > 1
    for row in rows:
        at = datetime.fromtimestamp(row["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        ended = row["error"] or row["finish"] or row["outcome"]
        tokens = f"{row['generated']} tokens, {row['ended_s']:.2f} s"
        what = ", ".join([*row["recoveries"], *(["failover"] if row["failovers"] else [])])
        unmet = ["unmet"] if row["unmet"] else []
        tenant_column = [row["tenant"]] if several else []
        line = "  ".join(
            [row["id"], at, *tenant_column, row["model"], ended, tokens, *([what] if what else []), *unmet]
        )
        click.echo(on_one_line(line))


def _config(path: Path | None) -> Config:
    return Config() if path is None else load(path).config


async def _tenants(config: Config, store: Store, tenant: str) -> list[str]:
    """Return only `tenant`; if it is empty, the tenants of the operator and of all keys.

    Revoked keys are included.
    """
    if tenant:
        return [tenant]
    # The store has no list of tenants. The records of keys name their tenants, and remain after a revocation.
    own = LOCAL_TENANT if config.general_settings.master_key is None else MASTER_TENANT
    return list(dict.fromkeys([own, *(record.tenant for record in await store.keys())]))


def _with_store(config: Config, work: Callable[[Store], Awaitable[Result]]) -> Result:
    return run_on_store(config, work, if_memory="other processes cannot read recordings from a store in memory")


# -- replay


def read_document(document: Document) -> Replay:
    """Parse the tokens of a recording with the current parser, and return the resulting events.

    Raises Unreplayable if the recording is damaged, or lacks the request, tokens or recorded events.
    """
    try:
        # A replay needs the request, all tokens, and the recorded events to compare with.
        missing = {"asked", "output", "said"} & set(document.get("left_out", ()))
        if missing or document.get("asked") is None:
            raise Unreplayable("this recording is incomplete because of its size limit and cannot be replayed")
        request = to_request(document["model"], document["asked"])
        output = [int(number) for number in document["output"]]
        finish = None
        if document["outcome"] == "completed" and document["finish"]:
            # The parser needs the reason that the backend gave for the last step. `finish` is the reason in the answer
            # to the client, which may differ.
            ended = document["steps"][-1]["finish"] if document["steps"] else ""
            finish = FinishReason(ended or document["finish"])
        encoding = load_encoding()
        return replay_answer(encoding, Renderer(encoding), request, output, finish, violation)
    except UnisonoError as error:
        raise Unreplayable(f"this recording cannot be replayed: {error.message}") from error
    except DAMAGED as error:
        raise Unreplayable("this recording is damaged") from error


def is_as_recorded(document: Mapping[str, Any], again: Replay) -> bool:
    """Return True if a replay yields the recorded events.

    If the answer was not completed, the replay may yield more events than were emitted. The excess is ignored.
    """
    recorded, now = document["said"], output_records(again.events)
    if document["outcome"] != "completed":
        now = now[: len(recorded)]
    return again.fits and now == recorded


def _replay(document: Document, *, as_json: bool) -> None:
    again = read_document(document)
    try:
        now, recorded = output_records(again.events), document["said"]
        same = is_as_recorded(document, again)
        events = [event for event in again.events if isinstance(event, Closed | Repaired)]
        lines = _compared(events, now, recorded)
        text = json.dumps({"same": same, "now": now, "recorded": recorded}) if as_json else "\n".join(lines)
        click.echo(text, color=has_colour())
    except DAMAGED as error:
        raise Unreplayable("this recording is damaged") from error
    if not as_json:
        click.echo("The same as recorded." if same else "Not the same as recorded.", err=True)
    if not same:
        raise SystemExit(DIFFERENT)


def _compared(events: Sequence[Event], now: Sequence[object], recorded: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that describe the replayed events, next to recorded events that differ."""
    lines = []
    for at, event in enumerate(events):
        if at < len(recorded) and now[at] == recorded[at]:
            lines.append(f"  {_describe(event)}")
            continue
        lines.append(click.style(f"+ {_describe(event)}", fg="green"))
        if at < len(recorded):
            lines.append(click.style(f"- {_describe_recorded(recorded[at])}", fg="red"))
    return lines + [click.style(f"- {_describe_recorded(record)}", fg="red") for record in recorded[len(events) :]]


def _describe(event: Event) -> str:
    match event:
        case Repaired():
            return f"^ {event.rule} at {event.position}" + (
                f", {event.dropped} characters dropped" if event.dropped else ""
            )
        case Closed(item=item):
            [record] = output_records([event])
            name = f" {on_one_line(item.name)}" if isinstance(item, ToolCall | HostedCall) else ""
            return f"{record['closed']}{name}{'' if event.complete else ' (incomplete)'}: {on_one_line(event.text)}"
        case _:
            return ""


def _describe_recorded(record: Mapping[str, Any]) -> str:
    if "repaired" in record:
        return on_one_line(f"^ {record['repaired']} at {record['position']}")
    name = f" {record['name']}" if record["name"] else ""
    cut = "" if record["complete"] else " (incomplete)"
    return on_one_line(
        f"{record['closed']}{name}{cut}: {record['characters']} characters, sha256 {record['digest']}..."
    )


# -- fork


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """Options of a fork.

    `position` is the 0-based index of the first token of the answer that is generated again. An empty `backend` means
    the deployment that generated the answer. None leaves the effort or the tool result unchanged.
    """

    position: int
    backend: str = ""
    temperature: float = 0.0
    effort: str | None = None
    tool_result: str | None = None


def fork(document: Document, options: ForkOptions, config_path: Path | None, *, as_json: bool) -> None:
    """Generate the forked answer, and print it next to the recorded answer."""
    try:
        effort = None if options.effort is None else Effort(options.effort)
        start = fork_of(document, ForkChanges(options.position, None, effort, options.tool_result))
        tokens = asyncio.run(_generate(start, options, options.backend or str(document["backend"]), config_path))
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    except LookupError as error:
        raise click.ClickException("this recording is damaged") from error
    same = common_length(start.recorded, tokens)
    is_equal = first_difference(start.recorded, tokens) is None
    if as_json:
        found = {"same": is_equal, "first_difference": None if is_equal else options.position + same}
        click.echo(json.dumps(found | {"recorded": list(start.recorded), "forked": tokens}))
        return
    click.echo(f"in both from token {options.position}: {_decoded(tokens[:same])}")
    if is_equal:
        click.echo("The fork is the same as the recording.")
        return
    click.echo(f"first difference at token {options.position + same}")
    click.echo(f"recorded: {_decoded(start.recorded[same:])}")
    click.echo(f"forked:   {_decoded(tokens[same:])}")


async def _generate(start: Fork, options: ForkOptions, name: str, config_path: Path | None) -> list[int]:
    async with open_backends([name], config_path) as [live]:
        capabilities = (await live.backend.probe()).capabilities
        if not capabilities.prompt is capabilities.output is OutputForm.IDS:
            raise click.ClickException(f"{name}: a fork needs a backend with token ids, such as vllm, llamacpp or mlx")
        sampling = Sampling(temperature=options.temperature)
        return await generate(live.backend, start.prompt, len(start.recorded) + MORE_TOKENS, live.timeouts, sampling)


def _decoded(tokens: Sequence[int]) -> str:
    return harmless(load_encoding().decode(tokens))
