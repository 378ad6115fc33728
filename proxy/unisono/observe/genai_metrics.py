"""Metrics with the names of OpenTelemetry's conventions for generative AI.

`gen_ai.server.*` describe answers of this gateway, `gen_ai.client.*` its attempts on backends. Prometheus writes the
dots of the names as underscores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from unisono.core.observer import GenerationDone, GenerationOutcome, StepDone
from unisono.observe.metric_definitions import KnownHistogram
from unisono.observe.spans import LEFT, PROVIDER, operation_of

# Bounds that the conventions recommend.
DURATION_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKENS: Final = tuple(4.0**power for power in range(14))
FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
ERROR_LABEL: Final = "error_type"
TOKEN_LABEL: Final = "gen_ai_token_type"  # noqa: S105 - the name of a label
# Names of the metrics and labels in OpenTelemetry, by their names in Prometheus.
METRIC_NAMES: Final[Mapping[str, str]] = {
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "gen_ai_client_operation_duration_seconds": "gen_ai.client.operation.duration",
    "gen_ai_client_operation_time_to_first_chunk_seconds": "gen_ai.client.operation.time_to_first_chunk",
    "gen_ai_client_token_usage": "gen_ai.client.token.usage",
}
LABEL_NAMES: Final[Mapping[str, str]] = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "gen_ai_response_model": "gen_ai.response.model",
    TOKEN_LABEL: "gen_ai.token.type",
    ERROR_LABEL: "error.type",
}


class GenAiMetrics:
    """Histograms of the conventions.

    `model_label` returns the label value for a model name. `kinds` maps names of deployments to backend kinds.
    """

    def __init__(self, registry: CollectorRegistry, model_label: Callable[[str], str]) -> None:
        def histogram(name: str, about: str, bounds: tuple[float, ...], *more: str) -> KnownHistogram:
            return KnownHistogram(f"gen_ai_{name}", about, (*LABELS, *more), registry=registry, buckets=bounds)

        self._model_label = model_label
        self.kinds: Mapping[str, str] = {}
        self._request = histogram(
            "server_request_duration_seconds", "Duration of answers of the gateway.", DURATION_S, ERROR_LABEL
        )
        self._first = histogram(
            "server_time_to_first_token_seconds", "Time to the first token of a completed answer.", FIRST_TOKEN_S
        )
        self._next = histogram(
            "server_time_per_output_token_seconds",
            "Time per token after the first one of a completed answer.",
            OUTPUT_TOKEN_S,
        )
        self._operation = histogram(
            "client_operation_duration_seconds", "Duration of attempts on backends.", DURATION_S, ERROR_LABEL
        )
        self._chunk = histogram(
            "client_operation_time_to_first_chunk_seconds",
            "Time to the first tokens of an attempt on a backend.",
            DURATION_S,
        )
        self._tokens = histogram("client_token_usage", "Tokens of attempts on backends.", TOKENS, TOKEN_LABEL)

    def observe(self, done: GenerationDone) -> None:
        operation, model = operation_of(done.start), self._model_label(done.start.model)
        models = {attempt.deployment: self._model_label(attempt.model) for attempt in done.tries}
        answered = (operation, PROVIDER, model, models.get(done.backend, ""))
        error = LEFT if done.outcome is GenerationOutcome.LEFT else done.error
        self._request.series[*answered, error].observe(done.ended_s)
        if done.outcome is GenerationOutcome.COMPLETED and done.first_s is not None:
            self._first.series[answered].observe(done.first_s)
            rest = -1
            for step in done.steps:
                rest += step.generated
            if rest > 0:
                self._next.series[answered].observe((done.ended_s - done.first_s) / rest)
        for step in done.steps:
            provider = self.kinds.get(step.deployment, PROVIDER)
            self._observe_attempt(step, (operation, provider, model, models.get(step.deployment, "")))

    def _observe_attempt(self, step: StepDone, labels: tuple[str, str, str, str]) -> None:
        self._operation.series[*labels, step.failure].observe(step.ended_s - step.started_s)
        if step.first_token_s is not None:
            self._chunk.series[labels].observe(step.first_token_s - step.started_s)
        self._tokens.series[*labels, "input"].observe(step.prompt_tokens)
        self._tokens.series[*labels, "output"].observe(step.generated)
