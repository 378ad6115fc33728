"""`unisono check`: probes every backend of a configuration and the store.

The probes are the same as in `serve`. The output is for operators: it includes addresses and messages of backends, but
no keys. Exit code 0: every deployment and the store are usable; 1: some are not; 2: the configuration is invalid.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from urllib.parse import urlsplit

import click

from unisono.app import build
from unisono.bootstrap.deployments import build_pool, deployment_names
from unisono.bootstrap.models import rules_by_model
from unisono.bootstrap.store import build_store, store_address
from unisono.cli.resolve_config import prepared
from unisono.config import Config, ModelRegistry
from unisono.core.deployments import finding_fields
from unisono.core.frozen import dataclass
from unisono.core.probe import Check, Finding, Probe, Severity, unreached
from unisono.core.state_store import Store
from unisono.errors import BackendUnfit, ConfigError, ConfigErrors, UnisonoError
from unisono.observe.redaction import Secrets, secrets_of
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import PROBES_AT_ONCE

# Labels of findings in the output, by severity.
WORDS = {None: "ok", Severity.NOTE: "no", Severity.WARNING: "warn", Severity.FATAL: "FAIL"}
# Symbol for a check that was not made.
UNEXAMINED = "-"
LEGEND = {"no": "no: not supported and not required", UNEXAMINED: "-: not checked"}
WIDTH_WITHOUT_TERMINAL = 100
NARROWEST = 40
UNUSABLE, MISCONFIGURED = 1, 2


class Misconfigured(click.ClickException):
    exit_code = MISCONFIGURED


@dataclass(frozen=True, slots=True)
class DeploymentReport:
    """Probe results of one deployment. `address` contains no credentials."""

    name: str
    model: str
    kind: str
    address: str
    findings: Sequence[Finding]
    first_token_s: float | None = None
    context: int | None = None

    @property
    def usable(self) -> bool:
        return all(finding.weight is not Severity.FATAL for finding in self.findings)


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Probe results of the store.

    `address` contains no credentials. `trouble` is the reason if the store is unusable, otherwise empty. `warnings`
    describe server settings that can make the store lose state.
    """

    address: str
    trouble: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return not self.trouble


def check(config_path: Path | None, *, as_json: bool) -> None:
    """Probe everything, print a table or JSON, and exit with the exit code."""
    # Exit code 1 means unusable backends. click would use it for its own errors too, so these errors are converted.
    loaded = None
    try:
        ready = prepared(config_path)
        loaded = ready.loaded
        # Raises ConfigError for everything that would prevent the gateway from starting.
        build(loaded.config)
        check_commands(loaded.config)
        reports, store = asyncio.run(probe_all(loaded.config))
    except ConfigError as error:
        raise Misconfigured(str(error if loaded is None else loaded.explained(error))) from error
    except click.ClickException as error:
        raise Misconfigured(error.message) from error
    for line in (*ready.remarks, *loaded.warnings):
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(to_json(reports, store), indent=2))
    else:
        width = max(shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns, NARROWEST)
        for line in (*table(reports, width), *about_store(store, width), *advice(reports, width)):
            click.echo(line)
    if not usable(reports, store):
        raise SystemExit(UNUSABLE)


def check_commands(config: Config) -> None:
    """Raise ConfigError if programs of tool servers are not installed on this machine.

    The exception names all missing programs. The gateway starts even without these programs, but calls to their tool
    servers fail.
    """
    errors = ConfigErrors()
    for label, server in config.mcp_servers.items():
        path = server.env.get("PATH")
        search = None if path is None else path.get_secret_value()
        with errors:
            if server.command is not None and shutil.which(server.command, path=search) is None:
                raise ConfigError(
                    f"mcp_servers.{label}.command: the program `{server.command}` was not found on this machine; "
                    "install it, or correct the path"
                )
    errors.raise_all()


def usable(reports: Sequence[DeploymentReport], store: StoreReport) -> bool:
    return store.usable and all(report.usable for report in reports)


async def probe_all(config: Config) -> tuple[list[DeploymentReport], StoreReport]:
    """Return reports of all deployments, in the order of the configuration, and of the store.

    Raises ConfigError if the configuration has no models or is invalid.
    """
    if not config.model_list:
        raise ConfigError("`model_list` is empty; add a model")
    # The report contains everything that the probes would log.
    logging.getLogger("unisono").addHandler(logging.NullHandler())
    store = build_store(config.store)
    try:
        secrets = Secrets(secrets_of(config))
        reports = [_redacted(secrets, report) for report in await _probe_deployments(config)]
        stored = await _probe_store(store, store_address(config.store))
        return reports, replace(stored, trouble=secrets.redact(stored.trouble))
    finally:
        await store.aclose()


async def _probe_store(store: Store, address: str) -> StoreReport:
    # User and password end at the last `@`. The query may contain a password too.
    scheme, _, rest = address.partition("?")[0].partition("://")
    public_address = f"{scheme}://{rest.rpartition('@')[2]}"
    try:
        return StoreReport(public_address, warnings=await store.start())
    except UnisonoError as error:
        cause = str(error.__cause__ or "")
        return StoreReport(public_address, str(error) if cause in str(error) else f"{error} ({cause})")


async def _probe_deployments(config: Config) -> list[DeploymentReport]:
    catalogue = ModelRegistry(config)
    rules_by_model(catalogue)
    pool = build_pool(config, catalogue)
    places = asyncio.Semaphore(PROBES_AT_ONCE)

    async def asked(deployment: LiveDeployment) -> Probe | UnisonoError:
        async with places:
            try:
                return await deployment.check()
            except BackendUnfit as error:
                # The probe itself succeeded and excludes the backend. All its findings are reported, not only the fatal
                # one.
                return deployment.examined or error
            except UnisonoError as error:
                return error

    try:
        live = {deployment.name: deployment for group in pool.members().values() for deployment in group}
        names = [name for name in deployment_names(config.model_list) if name in live]
        answers = dict(zip(names, await asyncio.gather(*(asked(live[name]) for name in names)), strict=True))
    finally:
        await pool.aclose()
    entries = zip(config.model_list, deployment_names(config.model_list), strict=True)
    return [
        _report(name, entry.model_name, entry.display_kind, _address(entry.litellm_params.api_base), answers[name])
        for entry, name in entries
        if name in answers
    ]


def _redacted(secrets: Secrets, report: DeploymentReport) -> DeploymentReport:
    """Redact secrets in messages of backends. Some backends repeat a rejected key."""
    findings = [
        replace(finding, backend_message=secrets.redact(finding.backend_message)) for finding in report.findings
    ]
    return replace(report, findings=findings)


def _report(name: str, model: str, kind: str, address: str, answer: Probe | UnisonoError) -> DeploymentReport:
    if isinstance(answer, UnisonoError):
        return DeploymentReport(name, model, kind, address, [unreached(answer)])
    # Providers are not probed, because that costs money.
    findings = [Finding(Check.REACHABLE, ok=True), *answer.findings] if answer.findings else []
    return DeploymentReport(name, model, kind, address, findings, answer.first_token_s, answer.capabilities.context)


def _address(api_base: str | None) -> str:
    """Remove user, password and query, which may contain keys."""
    if not api_base:
        return ""
    parts = urlsplit(api_base)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def to_json(reports: Sequence[DeploymentReport], store: StoreReport) -> dict[str, object]:
    """Return the reports as JSON data. `result` is one of ok, note, warning, fatal."""
    return {
        "usable": usable(reports, store),
        "store": {
            "address": store.address,
            "usable": store.usable,
            "detail": store.trouble,
            "warnings": list(store.warnings),
        },
        "deployments": [
            {
                "name": report.name,
                "model": report.model,
                "kind": report.kind,
                "address": report.address or None,
                "usable": report.usable,
                "first_token_s": report.first_token_s,
                "context": report.context,
                "findings": [
                    {**finding_fields(finding), "said": finding.backend_message} for finding in report.findings
                ],
            }
            for report in reports
        ],
    }


def table(reports: Sequence[DeploymentReport], width: int) -> Iterator[str]:
    """Yield table lines with one row per check and one column per deployment.

    Columns that exceed `width` continue in further tables.
    """
    checks = [c for c in Check if any(finding.check is c for report in reports for finding in report.findings)]
    labels = ["CHECK", *(check.value for check in checks), "first token", "window", "usable"]
    columns = [[report.name, *_cells(report, checks)] for report in reports]
    first = max(map(len, labels))
    while columns:
        # At least one column is printed even if it exceeds the width.
        count, room = 0, width - first
        while count < len(columns) and (count == 0 or room >= 2 + max(map(len, columns[count]))):
            room -= 2 + max(map(len, columns[count]))
            count += 1
        visible, columns = columns[:count], columns[count:]
        widths = [max(map(len, column)) for column in visible]
        for row, label in enumerate(labels):
            cells = (column[row].ljust(size) for column, size in zip(visible, widths, strict=True))
            yield "  ".join([label.ljust(first), *cells]).rstrip()
        yield ""
    used = {cell for report in reports for cell in _cells(report, checks)}
    yield from wrap("   ".join(text for word, text in LEGEND.items() if word in used), width)


def _cells(report: DeploymentReport, checks: Sequence[Check]) -> list[str]:
    found = {finding.check: WORDS[finding.weight] for finding in report.findings}
    return [
        *(found.get(check, UNEXAMINED) for check in checks),
        UNEXAMINED if report.first_token_s is None else f"{report.first_token_s:.2f} s",
        UNEXAMINED if report.context is None else str(report.context),
        "yes" if report.usable else "NO",
    ]


def about_store(store: StoreReport, width: int) -> Iterator[str]:
    """Yield lines about the store: whether it is usable, why not, and warnings about lost state."""
    word = WORDS[None if store.usable else Severity.FATAL]
    yield ""
    yield from wrap(f"store {store.address}: {word}", width)
    for severity, words in ((Severity.FATAL, store.trouble), *((Severity.WARNING, w) for w in store.warnings)):
        if words:
            head = f"  {WORDS[severity]:4} store: "
            yield from wrap(_sentence(words), width, initial_indent=head, subsequent_indent=" " * 7)


def advice(reports: Sequence[DeploymentReport], width: int) -> Iterator[str]:
    """Yield every failure and warning, with advice."""
    for report in reports:
        serious = [f for f in report.findings if f.weight in (Severity.FATAL, Severity.WARNING)]
        if not serious:
            continue
        at = f" at {report.address}" if report.address else ""
        yield ""
        yield from wrap(f"{report.name} ({report.kind}{at}) for {report.model}", width)
        for finding in serious:
            head = f"  {WORDS[finding.weight]:4} {finding.check.value}: "
            yield from wrap(_sentence(finding.text), width, initial_indent=head, subsequent_indent=" " * 7)
            yield from wrap(_sentence(finding.advises), width, initial_indent="       -> ", subsequent_indent=" " * 10)
            if finding.backend_message:
                # Message of the backend, or of the library that failed to reach it.
                cause = f"Cause: {finding.backend_message}"
                yield from wrap(cause, width, initial_indent=" " * 10, subsequent_indent=" " * 10)


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
