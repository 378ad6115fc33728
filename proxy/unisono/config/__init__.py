"""The configuration: what it may say, how it is read, and which models it makes.

`load` is the only reader of the file and of the environment; everything after it works on frozen sections. What is
wrong is a ConfigError whose message begins with the path of the key; what is merely unused is a warning.
"""

from unisono.config.fallbacks import StandIns
from unisono.config.hooks import HookSettings
from unisono.config.litellm_import import imported
from unisono.config.load import Loaded, data_folder, load, parse
from unisono.config.mcp_settings import AllowedHostSettings, McpServerSettings
from unisono.config.model_registry import ModelRegistry, ServedModel
from unisono.config.sections import (
    KIND_ALIASES,
    KINDS,
    Config,
    GatewaySettings,
    GeneralSettings,
    LitellmParams,
    LitellmSettings,
    ModelEntry,
    ModelInfo,
    ModelSettings,
    RouterSettings,
    StoreSettings,
)
from unisono.config.telemetry_settings import TraceSettings

__all__ = [
    "KINDS",
    "KIND_ALIASES",
    "AllowedHostSettings",
    "Config",
    "GatewaySettings",
    "GeneralSettings",
    "HookSettings",
    "LitellmParams",
    "LitellmSettings",
    "Loaded",
    "McpServerSettings",
    "ModelEntry",
    "ModelInfo",
    "ModelRegistry",
    "ModelSettings",
    "RouterSettings",
    "ServedModel",
    "StandIns",
    "StoreSettings",
    "TraceSettings",
    "data_folder",
    "imported",
    "load",
    "parse",
]
