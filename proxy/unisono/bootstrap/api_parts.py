"""Parts shared by all APIs that send requests to models."""

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

# `system_fingerprint` of answers.
FINGERPRINT = f"unisono-{__version__}"


@dataclass(frozen=True, slots=True)
class ApiParts:
    """Gateway, generation service, background responses, and readers of images and files.

    `describer` is None if no model has a vision model. `passing_files` reads the files of pass-through requests;
    it is None if no hook or guardrail inspects their text.
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
    """Return the date for prompts as YYYY-MM-DD; empty for none."""
    if settings.current_date == "none":
        return ""
    day = datetime.now(UTC).date() if settings.current_date == "today" else settings.current_date
    return day.isoformat()
