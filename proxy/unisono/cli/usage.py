"""Implementation of `unisono usage`: prints usage as table, chart, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from unisono.api.admin.spend import from_metrics
from unisono.api.usage_report import to_usage_fields
from unisono.cli.opened_store import run_on_store
from unisono.cli.remote_keys import AdminClient
from unisono.cli.terminal import on_one_line, table_lines
from unisono.config import load
from unisono.core.quotas import MILLION, SHARED_TENANT, LedgerLine, TokenUsage

# Length of the longest bar, in characters.
WIDTH: Final = 40

# For each value of --by, the function that returns the row to which usage is added. Usage without a virtual key is
# added to a row with its tenant in brackets.
BY: Final[Mapping[str, Callable[[LedgerLine], str]]] = {
    "key": lambda entry: entry.account.key or f"({entry.account.tenant})",
    "model": lambda entry: entry.model,
    "served-model": lambda entry: entry.served_model,
    "day": lambda entry: entry.day,
    "tenant": lambda entry: entry.account.tenant,
}

# For each value of --by, the field with the parts of a day in `/user/daily/activity`; empty for the whole day.
REMOTE_BY: Final[Mapping[str, str]] = {"key": "api_keys", "model": "models", "day": ""}
# Maximum number of days in one answer.
PAGE_SIZE: Final = 1000

HEADINGS: Final = ("REQUESTS", "ERRORS", "INPUT", "CACHED", "OUTPUT", "REASONING", "USD")


def days_of(since: datetime | None, until: datetime | None) -> tuple[str, str]:
    """Return the first and the last day of a period as YYYY-MM-DD.

    None means the first or the last day of the calendar. Raises `BadParameter` if the period ends before it begins.
    """
    first, last = (since or datetime.min).date().isoformat(), (until or datetime.max).date().isoformat()
    if last < first:
        raise click.BadParameter(f"{last} is before --since {first}", param_hint="--until")
    return first, last


def form_of(**given: bool) -> str:
    """Return the name of the output form whose option is True; `table` if no option is True.

    Raises `UsageError` if several options are True.
    """
    forms = [name for name, is_given in given.items() if is_given]
    if len(forms) > 1:
        raise click.UsageError(f"Options '--{forms[0]}' and '--{forms[1]}' cannot be used together.")
    return forms[0] if forms else "table"


def show(config_path: Path, by: str, since: str, until: str, form: str) -> None:
    """Print usage. `form` is table, chart, csv or json.

    `since` and `until` are days as YYYY-MM-DD, both inclusive.
    """
    entries = run_on_store(
        load(config_path).config,
        lambda store: store.ledger(since, until),
        if_memory="other processes cannot read usage from a store in memory",
    )
    sums: dict[str, TokenUsage] = {}
    for entry in entries:
        # The usage of shared budgets is already contained in the usage of keys.
        if entry.account.tenant == SHARED_TENANT:
            continue
        name = BY[by](entry)
        sums[name] = sums.get(name, TokenUsage()) + entry.used
    rows = sorted(sums.items())
    click.echo(FORMS[form](by, rows), nl=False)


def show_remote(url: str, key_env: str, by: str, since: str, until: str, form: str) -> None:
    """Print the usage that a gateway shows to the key in the environment variable `key_env`."""
    if by not in REMOTE_BY:
        raise click.BadParameter(
            f"with --url, it must be one of {', '.join(REMOTE_BY)}; {by!r} works only with --config", param_hint="--by"
        )
    client = AdminClient(url, key_env)
    with client.reading():
        click.echo(FORMS[form](by, sorted(_remote_sums(client, by, since, until).items())), nl=False)


def _remote_sums(client: AdminClient, by: str, since: str, until: str) -> dict[str, TokenUsage]:
    sums: dict[str, TokenUsage] = {}
    page, has_more = 1, True
    while has_more:
        path = f"/user/daily/activity?start_date={since}&end_date={until}&page_size={PAGE_SIZE}&page={page}"
        report = client.send(path)
        for day in report["results"]:
            parts = {day["date"]: day} if by == "day" else day["breakdown"][REMOTE_BY[by]]
            for name, part in parts.items():
                sums[name] = sums.get(name, TokenUsage()) + from_metrics(part["metrics"])
        page, has_more = page + 1, report["metadata"]["has_more"]
    return sums


Rows = Sequence[tuple[str, TokenUsage]]


def to_table(by: str, rows: Rows) -> str:
    """Return a table with one row per name and a total."""
    total = sum((used for _, used in rows), TokenUsage())
    cells = [(by.upper(), *HEADINGS), *(_cells(name, used) for name, used in (*rows, ("TOTAL", total)))]
    return "\n".join(table_lines(cells, numbers_from=1)) + "\n"


def _cells(name: str, used: TokenUsage) -> tuple[str, ...]:
    counts = (used.requests, used.errors, used.input, used.cached, used.output, used.reasoning)
    return (name, *(f"{count:,}" for count in counts), _usd(used))


def to_chart(by: str, rows: Rows) -> str:
    """Return a bar chart of tokens, in proportion to the largest value."""
    most = max((used.tokens for _, used in rows), default=0)
    width = max((len(on_one_line(name)) for name, _ in rows), default=0)
    lines = []
    for name, used in rows:
        # Unicode has blocks of one to seven eighths of a character.
        eighths = round(used.tokens * WIDTH * 8 / most) if most else 0
        bar = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
        lines.append(f"{on_one_line(name).ljust(width)}  {bar.ljust(WIDTH)}  {used.tokens:,} tokens, {_usd(used)} USD")
    return "".join(line + "\n" for line in lines)


def to_csv(by: str, rows: Rows) -> str:
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow([by, *to_usage_fields(TokenUsage())])
    for name, used in rows:
        table.writerow([_escape_formula(name), *(to_usage_fields(used) | {"cost_usd": _usd(used)}).values()])
    return written.getvalue()


def to_json(by: str, rows: Rows) -> str:
    documents: list[dict[str, Any]] = [{by: name, **to_usage_fields(used)} for name, used in rows]
    return json.dumps(documents, ensure_ascii=False, indent=2) + "\n"


FORMS: Final[Mapping[str, Callable[[str, Rows], str]]] = {
    "table": to_table,
    "chart": to_chart,
    "csv": to_csv,
    "json": to_json,
}


def _usd(used: TokenUsage) -> str:
    return f"{used.cost // MILLION}.{used.cost % MILLION:06d}"


def _escape_formula(name: str) -> str:
    # Spreadsheets execute cells that start with these characters.
    return f"'{name}" if name[:1] in "=+-@" and name else name
