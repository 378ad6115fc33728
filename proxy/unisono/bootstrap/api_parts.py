"""Components that all APIs for requests to models share: services, rules, files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from unisono import __version__
from unisono.access.failed_authentications import FailedAuthentications
from unisono.access.model_access import fallback_model
from unisono.api.caller_options import ApplyEndUser, RequestRules
from unisono.api.image_descriptions import ImageDescriber
from unisono.api.routing_fields import RoutingFields
from unisono.bootstrap.background import BackgroundResponses
from unisono.bootstrap.gateway import Gateway
from unisono.config import Config, FileSettings, GatewaySettings, ModelRegistry
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.core.request_record import RecordSink
from unisono.documents.extractor import FileLimits
from unisono.documents.reader import DocumentReader, TextCache
from unisono.engine.request import GenerationService
from unisono.net.client_addresses import ClientNetworks
from unisono.net.ssrf_guard import SsrfGuard


def build_file_reader(settings: FileSettings, cache: TextCache) -> DocumentReader:
    """Build the reader. After a reload of the configuration, the old reader's `cache` is reused."""
    limits = FileLimits(
        max_bytes=settings.max_bytes,
        max_pages=settings.max_pages,
        max_characters=settings.max_characters,
        timeout_s=settings.timeout_s,
        memory=settings.memory_bytes,
    )
    return DocumentReader(limits, SsrfGuard([host.rule() for host in settings.allowed_hosts]), cache)


# Value of `system_fingerprint` in responses.
FINGERPRINT = f"unisono-{__version__}"


@dataclass(frozen=True, slots=True)
class ApiParts:
    """Components that all APIs for requests to models share.

    `describer` describes images; None if no model has a vision model. `files` reads the files in requests.
    `passthrough_files` reads the files in pass-through requests; None if no hook or guardrail checks their texts.
    `sinks` receive the records of requests.
    """

    gateway: Gateway
    service: GenerationService
    background: BackgroundResponses
    describer: ImageDescriber | None
    files: FileReader | None
    passthrough_files: FileReader | None
    sinks: Sequence[RecordSink]

    def today(self) -> str:
        return current_date(self.gateway.config.unisono)


def build_api_parts(
    gateway: Gateway, service: GenerationService, background: BackgroundResponses, sinks: Sequence[RecordSink]
) -> ApiParts:
    config, parts = gateway.config, gateway.parts
    has_vision_model = any(model.settings.media_model for model in gateway.catalogue.groups())
    files = build_file_reader(config.unisono.files, parts.file_texts)
    return ApiParts(
        gateway,
        service,
        background,
        describer=ImageDescriber(service, parts.descriptions) if has_vision_model else None,
        files=files,
        passthrough_files=files if config.unisono.hooks or config.guardrails else None,
        sinks=sinks,
    )


def current_date(settings: GatewaySettings) -> str:
    """Return the date for prompts as YYYY-MM-DD, or an empty string if prompts contain no date."""
    if settings.current_date == "none":
        return ""
    day = datetime.now(UTC).date() if settings.current_date == "today" else settings.current_date
    return day.isoformat()


def build_failed_authentications(config: Config) -> FailedAuthentications | None:
    """Return the limiter for requests with invalid keys, or None if there is no limit."""
    settings = config.unisono.failed_authentication
    if not settings.max_per_minute:
        return None
    proxies = settings.trusted_proxies or config.general_settings.proxies
    return FailedAuthentications(settings.max_per_minute, ClientNetworks(proxies))


def request_rules(config: Config, catalogue: ModelRegistry, apply_end_user: ApplyEndUser | None = None) -> RequestRules:
    """Return the rules for requests to models.

    `apply_end_user` applies the settings of the end user that a request names; None if there are no such settings.
    """
    return RequestRules(
        needs_user=config.general_settings.enforce_user_param,
        guardrails=frozenset(guardrail.guardrail_name for guardrail in config.guardrails),
        routing=RoutingFields(partial(fallback_model, catalogue), config.router_settings.enable_tag_filtering),
        apply_end_user=apply_end_user,
    )
