"""Components that all APIs for requests to models share."""

from __future__ import annotations

from datetime import UTC, datetime

from unisono import __version__
from unisono.api.image_descriptions import ImageDescriber
from unisono.bootstrap.background import BackgroundResponses
from unisono.bootstrap.files import build_file_reader
from unisono.bootstrap.gateway import Gateway
from unisono.config import GatewaySettings
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.engine.request import GenerationService

# Value of `system_fingerprint` in responses.
FINGERPRINT = f"unisono-{__version__}"


@dataclass(frozen=True, slots=True)
class ApiParts:
    """Components that all APIs for requests to models share.

    `describer` describes images; None if no model has a vision model. `files` reads the files in requests.
    `passing_files` reads the files in pass-through requests; None if no hook or guardrail checks their texts.
    """

    gateway: Gateway
    service: GenerationService
    background: BackgroundResponses
    describer: ImageDescriber | None
    files: FileReader | None
    passing_files: FileReader | None

    def today(self) -> str:
        return current_date(self.gateway.config.unisono)


def build_api_parts(gateway: Gateway, service: GenerationService, background: BackgroundResponses) -> ApiParts:
    config, parts = gateway.config, gateway.parts
    has_vision_model = any(model.settings.media_model for model in gateway.catalogue.groups())
    files = build_file_reader(config.unisono.files, parts.file_texts)
    return ApiParts(
        gateway,
        service,
        background,
        describer=ImageDescriber(service, parts.descriptions) if has_vision_model else None,
        files=files,
        passing_files=files if config.unisono.hooks or config.guardrails else None,
    )


def current_date(settings: GatewaySettings) -> str:
    """Return the date for prompts as YYYY-MM-DD, or an empty string if prompts contain no date."""
    if settings.current_date == "none":
        return ""
    day = datetime.now(UTC).date() if settings.current_date == "today" else settings.current_date
    return day.isoformat()
