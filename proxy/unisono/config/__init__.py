"""Configuration: its sections, the loader, and the registry of models.

Only `load` reads the file and the environment. All other code gets frozen sections. An invalid setting raises
ConfigError with a message that begins with the path of the key. A setting without effect causes a warning.
"""

from unisono.config.config_file import data_folder
from unisono.config.general_settings import GeneralSettings
from unisono.config.litellm_import import imported, own_servers
from unisono.config.load import Loaded, load, parse
from unisono.config.mcp_settings import AllowedHostSettings, McpServerSettings
from unisono.config.model_registry import ModelRegistry, ServedModel
from unisono.config.model_settings import KIND_ALIASES, KINDS, LitellmParams, ModelEntry, ModelInfo, ModelSettings
from unisono.config.root_config import Config, LitellmSettings
from unisono.config.router_settings import RouterSettings
from unisono.config.store_settings import StoreSettings
from unisono.config.telemetry_settings import AlertSettings, RequestFileSettings, RequestRecordSettings, TraceSettings
from unisono.config.unisono_settings import FileSettings, GatewaySettings, HookSettings

__all__ = [
    "KINDS",
    "KIND_ALIASES",
    "AlertSettings",
    "AllowedHostSettings",
    "Config",
    "FileSettings",
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
    "RequestFileSettings",
    "RequestRecordSettings",
    "RouterSettings",
    "ServedModel",
    "StoreSettings",
    "TraceSettings",
    "data_folder",
    "imported",
    "load",
    "own_servers",
    "parse",
]
