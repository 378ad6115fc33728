"""Prometheus metrics of generations, requests, backends and the store.

Event handlers only count. A separate task samples the state that must be polled: deployments, the process, and the lag
of the event loop.
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final, Protocol

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from unisono.core.answer_faults import faults_by_deployment
from unisono.core.deployments import DeploymentState, FidelityState, FidelityStatus
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, Observer, StepDone
from unisono.core.request_record import RequestRecord
from unisono.observe.genai_metrics import GenAiMetrics
from unisono.observe.metric_definitions import Instruments
from unisono.observe.owner_metrics import OTHER, OwnerMetrics

# Interval between two samples of backends and the process, in seconds.
LOOK_S: Final = 1.0
# Interval between two measurements of event loop lag, in seconds.
BEAT_S: Final = 0.1
# Any other method is counted as `other`: clients choose methods, and each label value costs memory.
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Request fields that are counted by name if they have no effect. Any other field is counted as `other`, because clients
# can send any name. Positions in lists are removed from the names.
NOTED_FIELDS: Final = frozenset(
    (
        *("access_programs", "background", "background_options", "billing_policy", "cache_control", "container"),
        *("context_management", "diagnostics", "fallback_credit_token", "guided_decoding_backend"),
        *("guided_whitespace_pattern", "image", "include", "inference_geo", "max_tool_calls", "metadata"),
        *("mm_processor_kwargs", "moderation", "num_retries", "output_config.task_budget", "prediction", "priority"),
        *("prompt", "prompt_cache_options", "prompt_cache_retention", "provider", "reasoning.context"),
        *("reasoning.mode", "reasoning.summary", "repetition_detection", "response_format", "safety_identifier"),
        *("seed", "service_tier", "speed", "store", "stream_options.include_obfuscation", "tags", "text.verbosity"),
        *("thinking.block_binding", "timeout", "tool_choice", "tools", "tools.allowed_callers"),
        *("tools.allowed_domains", "tools.async", "tools.blocked_domains", "tools.citations"),
        *("tools.container.file_ids", "tools.container.memory_limit", "tools.container.network_policy"),
        *("tools.custom.format", "tools.default_config.defer_loading", "tools.defer_loading"),
        *("tools.eager_input_streaming", "tools.external_web_access", "tools.filters", "tools.format"),
        *("tools.input_examples", "tools.max_content_tokens", "tools.max_uses", "tools.output_schema"),
        *("tools.response_inclusion", "tools.search_content_types", "tools.search_context_size", "tools.strict"),
        *("tools.tools", "tools.tools.allowed_callers", "tools.tools.async", "tools.tools.defer_loading"),
        *("tools.tools.format", "tools.tools.output_schema", "tools.url_sources", "tools.use_cache"),
        *("tools.user_location", "top_k", "transforms", "truncation", "user", "verbosity", "vllm_xargs"),
        *("web_search_options.search_context_size", "web_search_options.user_location"),
    )
)
# Position in the path of a field.
_POSITION: Final = re.compile(r"\.\d+(?=\.|$)")
CIRCUITS: Final = {"closed": 0, "half-open": 1, "open": 2}
FIDELITY_STATES: Final = {FidelityState.HEALTHY: 0, FidelityState.WARNING: 1, FidelityState.QUARANTINED: 2}
STATE: Final = Path("/proc/self/statm")
# Gauge of the queue that all deployments of a model share. The other gauge of models counts answers in progress.
QUEUE_LENGTH: Final = "unisono_queue_length"


class DeploymentMetrics(Protocol):
    """State of a deployment at one moment (`routing.status.DeploymentStatus`)."""

    @property
    def model(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def foreign(self) -> int: ...
    @property
    def circuits(self) -> Mapping[str, str]: ...
    @property
    def quality(self) -> _Weighted: ...
    @property
    def fidelity(self) -> FidelityStatus | None: ...
    @property
    def hedges(self) -> int: ...
    @property
    def hedges_won(self) -> int: ...


class _Weighted(Protocol):
    @property
    def weight(self) -> float: ...


class Metrics(Observer):
    """Metrics of this process. `owners` are the metrics of keys, teams and budgets."""

    def __init__(self, version: str) -> None:
        self._all = Instruments()
        self._all.build.series[version].set(1)
        self.owners = OwnerMetrics(self._all, self._model_label)
        self._genai = GenAiMetrics(self._all.registry, self._model_label)
        self._servers: frozenset[str] = frozenset()
        self._models: frozenset[str] = frozenset()
        self._backends: frozenset[tuple[str, str]] = frozenset()
        self._watch_task: asyncio.Task[None] | None = None
        self._sample_now: Callable[[], None] = lambda: None
        self._cpu_s = 0.0
        self._hedges: dict[tuple[str, str, str], int] = {}
        self._circuits: set[tuple[str, str, str]] = set()

    def know(
        self,
        models: Collection[str],
        backends: Collection[tuple[str, str]],
        servers: Collection[str],
        kinds: Mapping[str, str],
    ) -> None:
        """Set the configured names.

        `backends` are pairs of model name and deployment name. `servers` are the names of tool servers. `kinds` maps
        deployment names to backend kinds.

        Requests for models and tool servers that were never configured get the label `other`. Gauges of removed
        backends, and of the queues of removed models, are no longer exported.
        """
        # Answers of a removed model may still be in progress. They must end with the label with which they started.
        self._models |= frozenset(models)
        self._servers |= frozenset(servers)
        self._backends = frozenset(backends)
        self._genai.kinds = kinds

    # -- generations

    def generation_started(self, began: GenerationStarted) -> None:
        self._all.in_flight.series[self._model_label(began.model)].inc()

    def ended(self, done: GenerationDone) -> None:
        every, model, surface = self._all, self._model_label(done.start.model), done.start.surface
        every.in_flight.series[model].dec()
        every.requests.series[model, surface, done.outcome, done.error].inc()
        every.duration.series[model, surface].observe(done.ended_s)
        for step in done.steps:
            if step.first_token_s is not None:
                every.first.series[model, surface].observe(step.first_token_s)
                break
        if done.waits:
            every.queue.series[model].observe(done.waited_s)
        # The metric counts answers, so failovers of one answer count once, and those of a failed request not at all.
        if done.failovers and done.outcome is not GenerationOutcome.FAILED:
            every.failovers.series[model].inc()
        if done.unmet:
            every.unmet.series[model].inc()
        self._count_tokens(done, model)
        if done.recoveries or done.repairs:
            self._count_recoveries(done, model)
        for step in done.steps:
            self._count_step(step, model)
        for backend, faults in faults_by_deployment(done).items():
            for fault in faults:
                every.faulty.series[model, backend, fault.value].inc()
        for refused in done.refused_constraints:
            every.refused_constraints.series[model, refused.deployment, refused.reason].inc()
        for tool in done.tools:
            server = tool.server if tool.server in self._servers else OTHER
            every.tools.series[server, tool.outcome.value].inc()
            every.tools_s.series[server].observe(tool.ended_s - tool.started_s)
        self.owners.ended(done)
        self._genai.observe(done)

    def _model_label(self, model: str) -> str:
        return model if model in self._models else OTHER

    def _count_tokens(self, done: GenerationDone, model: str) -> None:
        every, usage = self._all, done.usage
        prompt = usage.prompt_tokens if usage is not None else next((step.prompt_tokens for step in done.steps), 0)
        if not done.start.resumed:
            every.prompt.series[model].inc(prompt)
        if usage is not None:
            every.cached.series[model].inc(usage.cached_tokens)
            every.tool_output.series[model].inc(usage.tool_output_tokens)
        # Tokens outside of all channels: headers, markers, and messages that were cut off.
        other = 0
        for step in done.steps:
            other += step.generated
        for channel, tokens in done.channels.items():
            every.tokens.series[model, channel].inc(tokens)
            other -= tokens
        if other > 0:
            every.tokens.series[model, OTHER].inc(other)

    def _count_recoveries(self, done: GenerationDone, model: str) -> None:
        for repair in done.repairs:
            self._all.recoveries.series[repair.rule, model, done.backend].inc()
        seen = {repair.rule for repair in done.repairs}
        for rule in done.recoveries if not done.start.resumed else ():
            if rule not in seen:
                self._all.recoveries.series[rule, model, done.backend].inc()

    def _count_step(self, step: StepDone, model: str) -> None:
        every, backend = self._all, step.deployment
        every.generations.series[model, backend, step.failure or "ok"].inc()
        every.prefilled.series[model, backend].inc(step.prompt_tokens)
        if step.cached_tokens:
            every.prefilled_cached.series[model, backend].inc(step.cached_tokens)
        if step.first_token_s is not None:
            every.backend_first.series[model, backend].observe(step.first_token_s - step.started_s)
            every.gaps.series[model, backend].add(step.gaps, step.gaps_s)

    # -- requests and the store

    def answered(self, record: RequestRecord) -> None:
        """Count one HTTP request."""
        for field in record.notes:
            field = _POSITION.sub("", field)
            self._all.notes.series[field if field in NOTED_FIELDS else OTHER].inc()
        route = record.route or OTHER
        method = record.method if record.method in METHODS else OTHER
        self._all.http.series[route, method, str(record.status)].inc()
        self._all.http_s.series[route].observe(record.duration_s)
        self.owners.answered(record)

    def stored(self, operation: str, took_s: float, error: str = "") -> None:
        """Count one operation of the store, and its error code if it failed."""
        self._all.store_s.series[operation].observe(took_s)
        if error:
            self._all.store_errors.series[operation, error].inc()

    def spans(self, outcome: str, count: int) -> None:
        """Count spans by outcome.

        Outcomes: `exported`, `dropped` because the queue was full, or `failed` to be sent.
        """
        self._all.spans.series[outcome].inc(count)

    def request_records(self, outcome: str, count: int) -> None:
        """Count records of requests by outcome.

        Outcomes: `kept`, `dropped` because the queue was full, or `failed` to be stored.
        """
        self._all.request_records.series[outcome].inc(count)

    def request_files(self, outcome: str, count: int) -> None:
        """Count records of requests in files, with the outcomes of `request_records`."""
        self._all.request_files.series[outcome].inc(count)

    def alerts(self, outcome: str, count: int) -> None:
        """Count alerts by outcome: `sent`, `failed`, or `dropped` because the queue was full."""
        self._all.alerts.series[outcome].inc(count)

    def fidelity_samples(self, model: str, backend: str, outcome: str) -> None:
        """Count an answer that was sampled for the continuous fidelity check.

        Outcomes: `scored`, `failed`, `dropped` because the queue was full, or `over_budget`.
        """
        self._all.fidelity_samples.series[model, backend, outcome].inc()

    def exports(self, outcome: str, count: int) -> None:
        """Count exports of the metrics by outcome: `exported` or `failed`."""
        self._all.metric_exports.series[outcome].inc(count)

    def traces(self, outcome: str, count: int) -> None:
        """Count recordings by outcome.

        Outcomes: `kept`, `dropped` because the queue was full, or `failed` to be written.
        """
        self._all.traces.series[outcome].inc(count)

    def hook_failed(self, hook: str, call: str) -> None:
        """Count a hook call that failed unexpectedly; `call` is `before` or `after`."""
        self._all.hooks.series[hook, call].inc()

    # -- sampled state

    def watch(
        self,
        backends: Callable[[], Iterable[DeploymentMetrics]],
        store_works: Callable[[], bool],
        unaccounted: Callable[[], int] = lambda: 0,
    ) -> asyncio.Task[None]:
        """Sample these sources instead of the previous ones until the returned task is cancelled.

        `backends` returns the deployments, `store_works` whether the store is available, and `unaccounted` the number
        of usage records that are not stored yet.
        """
        if self._watch_task is not None:
            self._watch_task.cancel()
        self._sample_now = lambda: self.sample(backends(), store_works=store_works(), unaccounted=unaccounted())
        self._watch_task = asyncio.create_task(self._sample_regularly(), name="metrics")
        return self._watch_task

    async def _sample_regularly(self) -> None:
        while True:
            self._sample_now()
            next_look = monotonic() + LOOK_S
            while (now := monotonic()) < next_look:
                await asyncio.sleep(BEAT_S)
                self._all.lag.observe(max(monotonic() - now - BEAT_S, 0.0))

    def sample(self, backends: Iterable[DeploymentMetrics], *, store_works: bool, unaccounted: int = 0) -> None:
        every = self._all
        every.store_up.set(int(store_works))
        every.unaccounted.set(unaccounted)
        open_now: set[tuple[str, str, str]] = set()
        for backend in backends:
            of = (backend.model, backend.name)
            every.up.series[of].set(int(backend.state == DeploymentState.READY))
            every.drained.series[of].set(int(backend.state == DeploymentState.DRAINED))
            every.running.series[of].set(backend.running)
            every.claimed.series[of].set(backend.tokens)
            every.foreign.series[of].set(backend.foreign)
            every.quality.series[of].set(backend.quality.weight)
            self._sample_fidelity(of, backend.fidelity)
            self._count_hedges(of, {"sent": backend.hedges, "won": backend.hedges_won})
            every.waiting.series[backend.model].set(backend.waiting)
            for kind, phase in backend.circuits.items():
                every.circuit.series[*of, kind].set(CIRCUITS.get(phase, 2))
                open_now.add((*of, kind))
        for closed in self._circuits - open_now:
            every.circuit.series[closed].set(0)
        self._circuits |= open_now
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime
        every.cpu.inc(cpu_s - self._cpu_s)
        self._cpu_s = cpu_s
        with suppress(OSError):
            every.memory.set(int(STATE.read_text().split()[1]) * resource.getpagesize())

    def _count_hedges(self, of: tuple[str, str], totals: Mapping[str, int]) -> None:
        for result, total in totals.items():
            known = self._hedges.get((*of, result), 0)
            # A deployment that replaces another one starts again at 0.
            self._all.hedges.series[*of, result].inc(max(total - known, 0))
            self._hedges[*of, result] = total

    def _sample_fidelity(self, of: tuple[str, str], fidelity: FidelityStatus | None) -> None:
        if fidelity is None:
            return
        self._all.fidelity_state.series[of].set(FIDELITY_STATES[fidelity.state])
        for gauge, value in (
            (self._all.fidelity_agreement, fidelity.agreement),
            (self._all.fidelity_divergence, fidelity.divergence),
        ):
            if value is not None:
                gauge.series[of].set(value)

    # -- output

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this process."""
        yield from _Present(self._all.registry.collect, self._backends).collect()

    async def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        self._sample_now()
        # Reading the files of several workers takes a while and must not block the loop.
        return await asyncio.to_thread(
            generate_latest, _Present(self._all.registry_to_scrape().collect, self._backends)
        )


class _Present:
    """Collector without the gauges of removed backends and queues."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], backends: frozenset[tuple[str, str]]) -> None:
        self._collect = collect
        self._backends = backends
        self._models = frozenset(model for model, _ in backends)

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            if metric.type == "gauge":
                metric.samples = [sample for sample in metric.samples if self._is_present(metric.name, sample.labels)]
            yield metric

    def _is_present(self, name: str, labels: Mapping[str, str]) -> bool:
        if name == QUEUE_LENGTH:
            return labels["model"] in self._models
        return "backend" not in labels or (labels["model"], labels["backend"]) in self._backends
