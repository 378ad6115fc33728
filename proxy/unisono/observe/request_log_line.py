"""Request log: one line per request, without content."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from random import random
from typing import Protocol

from unisono.core.request_record import RequestRecord, to_facts

log = logging.getLogger("unisono.requests")


class RequestLogOptions(Protocol):
    """Options of the log.

    `sample` is the fraction of successful requests to log, from 0 to 1. Failed requests are always logged. `fields` are
    the logged fields; None means all. With `probes`, successful requests for health, metrics and the web page are
    logged too.
    """

    @property
    def sample(self) -> float: ...
    @property
    def fields(self) -> Sequence[str] | None: ...
    @property
    def probes(self) -> bool: ...


class RequestLog:
    """Receiver of request records that writes each one to the log.

    `probes` are the routes for health checks, metrics and the files of the web page.
    """

    def __init__(self, options: RequestLogOptions, probes: Collection[str] = ()) -> None:
        self._sample = options.sample
        self._fields = None if options.fields is None else frozenset(options.fields)
        self._quiet = frozenset() if options.probes else frozenset(probes)

    def __call__(self, record: RequestRecord) -> None:
        has_failed = record.status >= 400 or bool(record.error)
        # S311: the random number is not a secret
        if not has_failed and (record.route in self._quiet or random() >= self._sample):  # noqa: S311
            return
        facts = to_facts(record)
        if self._fields is not None:
            facts = {name: value for name, value in facts.items() if name in self._fields}
        log.info(summary(record), extra={"request": facts})


def summary(record: RequestRecord) -> str:
    """Return the record as one readable line."""
    parts = (record.method, record.route or "(unknown path)", str(record.status or ""))
    line = [" ".join([*filter(None, parts), f"in {record.duration_s:.3g} s"])]
    if record.error:
        line.append(record.error)
    if record.deployment:
        line.append(f"{record.served_model or record.model} on {record.deployment}")
    elif record.model:
        line.append(record.model)
    if record.output_tokens:
        line.append(f"{record.input_tokens} + {record.output_tokens} tokens")
    if record.first_token_s is not None:
        line.append(f"first token after {record.first_token_s:.3g} s")
    if record.key:
        line.append(f"key {record.key_name or record.key}")
    if record.recoveries:
        line.append(f"repaired: {' '.join(record.recoveries)}")
    return ", ".join(line)
