"""Construction of a gateway's metrics, spans, recordings, request records and alerts.

Part of the composition root. Metrics count from the start of the process, also after a reload. The exporter and the
metrics listener stay open during a reload if their settings are unchanged. Libraries are imported only for features
that are enabled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from unisono import __version__
from unisono.api.asgi_layers import HEALTH_PATHS
from unisono.api.metrics import MetricsListener
from unisono.bootstrap.alerts import Alerting, build_alerts
from unisono.bootstrap.deployments import deployment_names
from unisono.bootstrap.fidelity import FidelityWatch, build_fidelity
from unisono.bootstrap.shared_resources import SharedResource, reuse_or_build
from unisono.config import (
    AlertSettings,
    Config,
    GatewaySettings,
    ModelRegistry,
    RequestFileSettings,
)
from unisono.core.alerts import Alert
from unisono.core.frozen import dataclass
from unisono.core.install_commands import install_command
from unisono.core.observer import Observer
from unisono.core.quotas import QuotaObserver
from unisono.core.recordings import TraceStore
from unisono.core.request_record import RecordSink
from unisono.core.request_store import RequestStore
from unisono.core.state_store import Store
from unisono.errors import ConfigError, UnisonoError
from unisono.middleware.hook_gates import Failed
from unisono.middleware.telemetry import GenerationObservation, spans_of
from unisono.observe.recent_stats import RecentStats
from unisono.observe.request_records import GenerationRecords, RequestFile, RequestLog, RequestWriter
from unisono.observe.spans import RefusalSpans
from unisono.routing.pool import RoutingPool
from unisono.routing.quality import QualityObserver
from unisono.store.health_monitor import Upkeep

if TYPE_CHECKING:
    from unisono.observe.metrics import Metrics
    from unisono.observe.otlp_exporter import Exporter
    from unisono.observe.otlp_metrics import MetricsExporter
    from unisono.observe.recorder import Recorder

# Store operations that wait for an event. They are not timed, because their duration says nothing about the store.
WAITING = frozenset({"events"})

# Routes for health checks, metrics scrapers and browsers that load the web page. Of the requests to these routes, only
# those with a wrong key are recorded.
PROBES = HEALTH_PATHS | {"/metrics", "/", "/docs", "/page/{name:path}", "/ping"}

# Routes that the web page reads every few seconds. Requests to them are recorded only if they fail.
PAGE_READS = frozenset(
    prefix + path
    for prefix in ("/v1", "")
    for path in (
        "/status", "/traces", "/traces/{id}", "/requests", "/requests/stats", "/requests/{id}", "/requests/{id}/tokens",
        "/inspect", "/usage", "/audit", "/health", "/key/list", "/key/info", "/team/list", "/v2/team/list",
        "/team/info", "/spend/keys", "/global/spend/report", "/model/info",
        "/user/daily/activity", "/openapi.json",
    )
)  # fmt: skip

# Store operations at the start and at the end of the process. They are not timed, because they delay no request.
ALWAYS_ON = frozenset({"start", "aclose"})


@dataclass(frozen=True, slots=True)
class Observing:
    """Components that observe a gateway. A component is None if its feature is disabled."""

    metrics: Metrics | None
    exporter: SharedResource[Exporter] | None
    listener: SharedResource[MetricsListener] | None
    sample: float = 1.0
    recent: RecentStats = field(default_factory=RecentStats)
    request_log: RequestLog | None = None
    # True if spans contain the messages of requests and answers.
    has_content: bool = False
    metrics_export: SharedResource[MetricsExporter] | None = None

    def gates(
        self,
        pool: RoutingPool,
        fidelity: FidelityWatch,
        recorder: Recorder | None,
        sinks: Sequence[RecordSink],
        *,
        background: bool = False,
    ) -> GenerationObservation:
        """Return an object that reports every generation to all observers.

        In addition to the observers in this object, `pool` learns the quality of answers, `fidelity` detects drift, and
        `recorder` records answers. `sinks` receive the records of requests; if `sinks` is empty, generations are not
        added to records. `background` is True for generations for which no request waits.
        """
        observers: list[Observer] = [self.recent, QualityObserver(pool.record_answer), fidelity]
        if self.metrics is not None:
            observers.append(self.metrics)
        if sinks:
            observers.append(GenerationRecords())
        if self.exporter is not None:
            observers.append(self.exporter.value)
        if recorder is not None:
            observers.append(recorder)
        new_trace = None if self.exporter is None else spans_of(self.sample)
        recorded = recorder is not None
        return GenerationObservation(
            observers,
            background=background,
            recorded=recorded,
            new_trace=new_trace,
            with_content=self.has_content,
            with_prompts=fidelity.models,
        )

    def recorder(self, config: Config, store: TraceStore) -> Recorder | None:
        """Return the recorder of answers, or None if recording is off."""
        settings = config.unisono.traces
        if settings.mode == "off" or config.litellm_settings.turn_off_message_logging:
            return None
        from unisono.observe.recorder import Recorder

        count = _uncounted if self.metrics is None else self.metrics.traces
        bounds = {"max_bytes": settings.max_bytes, "most": settings.keep}
        return Recorder(store, settings.mode, for_s=settings.ttl_s, gateway=__version__, count=count, **bounds)

    def writers(self, settings: GatewaySettings, store: RequestStore) -> Sequence[RequestWriter | RequestFile]:
        """Return the writers of request records to the store and to files.

        Raises ConfigError if the folder of the files cannot be written.
        """
        writers: list[RequestWriter | RequestFile] = []
        if (records := settings.request_records).keep:
            count = _uncounted if self.metrics is None else self.metrics.request_records
            routes = {"probes": PROBES, "unrecorded": PAGE_READS}
            writers.append(RequestWriter(store, for_s=records.ttl_s, most=records.keep, count=count, **routes))
        if settings.request_files is not None:
            writers.append(self._request_file(settings.request_files))
        return writers

    def _request_file(self, settings: RequestFileSettings) -> RequestFile:
        path = Path(settings.path).expanduser()
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"unisono.request_files.path: the folder {path.parent} does not exist or is not writable; create it, "
                "or change its permissions"
            )
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise ConfigError(
                f"unisono.request_files.path: {path} is a folder or is not writable; name a file, or change its "
                "permissions"
            )
        count = _uncounted if self.metrics is None else self.metrics.request_files
        routes = {"probes": PROBES, "unrecorded": PAGE_READS}
        return RequestFile(path, max_bytes=settings.max_bytes, keep=settings.keep, count=count, **routes)

    def alerts(
        self, settings: AlertSettings | None, pool: RoutingPool, store: Store, upkeep: Upkeep
    ) -> Alerting | None:
        """Return the alerts, or None if they are not configured."""
        if settings is None:
            return None
        count = _uncounted if self.metrics is None else self.metrics.alerts
        return build_alerts(settings, pool, store, upkeep, count)

    def fidelity(self, config: Config, pool: RoutingPool, alerting: Alerting | None) -> FidelityWatch:
        """Return the monitors that compare backends by live answers.

        Raises ConfigError if the configuration names a backend that does not exist.
        """
        count = _uncounted if self.metrics is None else self.metrics.fidelity_samples
        return build_fidelity(config, pool, _unsent if alerting is None else alerting.webhook, count)

    def sinks(self, writers: Sequence[RequestWriter | RequestFile]) -> Sequence[RecordSink]:
        """Return the receivers of request records."""
        sinks: list[RecordSink] = [] if self.request_log is None else [self.request_log]
        if self.exporter is not None:
            sinks.append(RefusalSpans(self.exporter.value.add, spans_of(self.sample), PROBES))
        return [*sinks, *writers]

    def quota_observers(self, alerting: Alerting | None) -> Sequence[QuotaObserver]:
        """Return the observers of quotas and budgets."""
        metrics = () if self.metrics is None else (self.metrics.owners,)
        return metrics if alerting is None else (*metrics, alerting.budgets)

    @property
    def hook_failed(self) -> Failed | None:
        return None if self.metrics is None else self.metrics.hook_failed

    def store(self, store: Store) -> Store:
        """Return `store`, wrapped so that the duration of each operation is reported to the metrics."""
        return store if self.metrics is None else cast(Store, _Timed(store, self.metrics.stored))

    async def metrics_page(self) -> bytes | None:
        """Return the metrics in Prometheus format, or None if metrics are off."""
        return None if self.metrics is None else await self.metrics.text()

    @asynccontextmanager
    async def watching(
        self,
        config: Config,
        catalogue: ModelRegistry,
        pool: RoutingPool,
        upkeep: Upkeep,
        unaccounted: Callable[[], int],
    ) -> AsyncIterator[None]:
        """Observe these components while the context is open.

        `unaccounted` returns the number of usage records that are not written to the store yet.
        """
        async with AsyncExitStack() as opened:
            for resource in (self.listener, self.exporter, self.metrics_export):
                if resource is not None:
                    await opened.enter_async_context(resource)
            if self.exporter is not None:
                # After a reload, the exporter may be the same although the deployments are different.
                self.exporter.value.kinds = kinds_of(config)
            if self.metrics is not None:
                metrics = self.metrics
                metrics.know(
                    models=[model.name for model in catalogue.groups()],
                    backends=pool.names(),
                    servers=config.mcp_servers,
                    kinds=kinds_of(config),
                )
                looking = metrics.watch(pool.status, lambda: not upkeep.reason, unaccounted)
                opened.callback(looking.cancel)
            yield


def share_metrics(config: Config, place: int) -> None:
    """Share the metrics of this process with the other workers.

    `place` is the number of this worker.
    """
    if config.unisono.metrics:
        from unisono.observe.metric_definitions import share_values

        share_values(place)


def build_observing(config: Config, old: Observing | None, share: int = 1) -> Observing:
    """Build the components that observe a gateway, or reuse those in `old`.

    `share` is the number of processes. Raises ConfigError for contradicting settings.
    """
    settings = config.unisono
    # The counters continue after a reload. If they started at zero again, that would look like a restart.
    metrics = old.metrics if old is not None else None
    if settings.metrics and metrics is None:
        from unisono.observe.metrics import Metrics

        metrics = Metrics(__version__)
    on = metrics if settings.metrics else None
    if on is not None:
        on.owners.is_per_key = settings.metrics_per_key
        on.owners.limit_labels(settings.metrics_max_keys)
    listener: SharedResource[MetricsListener] | None = None
    if settings.metrics_listen is not None:
        if on is None:
            raise ConfigError(
                "unisono.metrics_listen: metrics are off; set `unisono.metrics: true`, or remove this setting"
            )
        text, at = on.text, settings.metrics_listen

        def listen() -> SharedResource[MetricsListener]:
            # If there are several workers, each accepts connections on the port and reports the metrics of all workers.
            listening = MetricsListener(at, text, shared=share > 1)
            return SharedResource(listening, at, start=listening.start, close=listening.aclose)

        listener = reuse_or_build(None if old is None else old.listener, at, listen)
    exporter = _exporter(config, None if old is None else old.exporter, metrics)
    sample = settings.otel.sample if settings.otel is not None else 1.0
    recent = RecentStats() if old is None else old.recent
    request_log = RequestLog(settings.request_log, PROBES) if settings.request_log.enabled else None
    is_off = config.litellm_settings.turn_off_message_logging
    has_content = settings.otel is not None and settings.otel.content and not is_off
    metrics_export = _metrics_export(config, None if old is None else old.metrics_export, on)
    return Observing(on, exporter, listener, sample, recent, request_log, has_content, metrics_export)


def _exporter(
    config: Config, old: SharedResource[Exporter] | None, metrics: Metrics | None
) -> SharedResource[Exporter] | None:
    settings = config.unisono.otel
    if settings is None:
        return None
    try:
        from unisono.observe.otlp_exporter import Exporter
    except ImportError as error:
        raise ConfigError(
            f"unisono.otel: the extra for spans is not installed; run `{install_command('otel')}`: {error}"
        ) from error

    def build() -> SharedResource[Exporter]:
        exporter = Exporter(
            endpoint=None if settings.endpoint is None else settings.endpoint.get_secret_value(),
            headers={name: value.get_secret_value() for name, value in settings.headers.items()},
            service=settings.service_name,
            version=__version__,
            timeout_s=settings.timeout_s,
            most=settings.max_queue,
            count=_uncounted if metrics is None else metrics.spans,
            content_bytes=settings.content_max_bytes,
        )
        return SharedResource(exporter, settings, start=exporter.start, close=exporter.aclose)

    return reuse_or_build(old, settings, build)


def _metrics_export(
    config: Config, old: SharedResource[MetricsExporter] | None, metrics: Metrics | None
) -> SharedResource[MetricsExporter] | None:
    settings = config.unisono.otel
    if settings is None or not settings.metrics:
        return None
    if metrics is None:
        raise ConfigError("unisono.otel.metrics: metrics are off; set `unisono.metrics: true`, or remove this setting")
    from unisono.observe.otlp_metrics import MetricExportOptions, MetricsExporter

    def build() -> SharedResource[MetricsExporter]:
        options = MetricExportOptions(
            endpoint=settings.metrics_url(),
            headers={name: value.get_secret_value() for name, value in settings.headers.items()},
            service=settings.service_name,
            version=__version__,
            timeout_s=settings.timeout_s,
            interval_s=settings.metrics_interval_s,
        )
        exporter = MetricsExporter(options, metrics.collect, metrics.exports)
        return SharedResource(exporter, settings, start=exporter.start, close=exporter.aclose)

    return reuse_or_build(old, settings, build)


def _unsent(alert: Alert) -> None:
    """Discard an alert. Used if there is no webhook."""


def _uncounted(*_: object) -> None:
    """Discard a count. Used if metrics are off."""


def kinds_of(config: Config) -> dict[str, str]:
    """Return the backend kind of each deployment, by the name of the deployment."""
    names = deployment_names(config.model_list)
    return {name: entry.kind for name, entry in zip(names, config.model_list, strict=True)}


class _Timed:
    """Wrapper around a store that reports the duration and the error of each operation."""

    def __init__(self, store: Store, report: Callable[[str, float, str], None]) -> None:
        self._store = store
        self._observers = report

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name.startswith("_") or name in WAITING | ALWAYS_ON or not asyncio.iscoroutinefunction(found):
            return found
        timed = self._timed(name, found)
        # Later look-ups bypass `__getattr__`.
        setattr(self, name, timed)
        return timed

    def _timed(self, name: str, operation: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def timed(*arguments: Any, **options: Any) -> Any:
            started_at, error = monotonic(), ""
            try:
                return await operation(*arguments, **options)
            # Other exceptions, such as a cancellation, say nothing about the store.
            except UnisonoError as failure:
                error = failure.code
                raise
            finally:
                self._observers(name, monotonic() - started_at, error)

        return timed
