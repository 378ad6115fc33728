"""Every setting of the installed LiteLLM is known by name; a new one in a newer version fails here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Set
from pathlib import Path

import litellm
import pytest
from pydantic import BaseModel

from unisono.config import Config
from unisono.config.general_settings import GeneralSettings
from unisono.config.ineffective_settings import keys_of
from unisono.config.mcp_settings import McpServerSettings
from unisono.config.model_settings import LitellmParams, ModelEntry, ModelInfo
from unisono.config.root_config import LitellmSettings
from unisono.config.router_settings import RouterSettings

UNCLASSIFIED = "classify these keys in ineffective_settings.yaml"
PACKAGE = Path(litellm.__file__).parent
# Attributes of the module that are data of LiteLLM and no settings.
DATA_SUFFIXES = ("_models", "_llms")
DATA = frozenset(
    (
        *("adapters", "aclient_session", "argilla_transformation_object", "client_session", "config_path", "email"),
        *("error_logs", "in_memory_llm_clients_cache", "initialized_langfuse_clients", "logging", "model_cost"),
        *("model_list", "model_list_set", "models_by_provider", "retry", "token"),
    )
)


def class_fields(path: str, names: Set[str]) -> set[str]:
    """Return the fields of classes in a module, and the parameters of their constructors."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if not isinstance(node, ast.ClassDef) or node.name not in names:
            continue
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                found.add(member.target.id)
            elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
                found |= {argument.arg for argument in member.args.args + member.args.kwonlyargs} - {"self", "params"}
    return found


def router_parameters() -> set[str]:
    """Return the parameters of the router, which `router_settings` sets."""
    tree = ast.parse((PACKAGE / "router.py").read_text())
    router = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Router")
    functions = {node.name: node for node in router.body if isinstance(node, ast.FunctionDef)}
    # Newer versions collect the arguments and pass them to another method.
    constructor = functions.get("_router_init") or functions["__init__"]
    arguments = constructor.args.posonlyargs + constructor.args.args + constructor.args.kwonlyargs
    names = {argument.arg for argument in arguments} - {"self", "model_list"}
    return {name for name in names if not name.startswith("_")}


def module_settings() -> set[str]:
    """Return the attributes of the module, which `litellm_settings` sets."""
    found: set[str] = set()
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if re.fullmatch("[a-z][a-z0-9_]*", name) and not name.endswith(DATA_SUFFIXES)} - DATA


# Strings that are not keys. The source of LiteLLM looks for them in values, as in `"slack" in alerting`.
NO_KEYS = frozenset(("email", "ms_teams", "slack"))


def keys_read(section: str) -> set[str]:
    """Return the keys that the source of LiteLLM reads from a section, as a literal or as a constant."""
    texts = [path.read_text("utf-8") for path in PACKAGE.rglob("*.py")]
    constants = dict(
        match for text in texts for match in re.findall(r"^([A-Z_]+)(?:: Final)? = \"(\w+)\"$", text, re.M)
    )
    access = rf"{section}(?:_view)?(?:\(\))?(?: or {{}}\))?(?:\.get\(|\[)\s*(\"?)(\w+)\b\1"
    read = [match for text in texts for match in re.findall(access, text)]
    read += [('"', name) for text in texts for name in re.findall(rf"\"(\w+)\" (?:not )?in {section}\b", text)]
    return {name if quote else constants[name] for quote, name in read if quote or name in constants} - NO_KEYS


PARAMS = {"GenericLiteLLMParams", "LiteLLM_Params", "CredentialLiteLLMParams"}
SECTIONS: dict[str, tuple[type[BaseModel], Iterable[str]]] = {
    "model_list[].litellm_params": (LitellmParams, class_fields("types/router.py", PARAMS)),
    "model_list[].model_info": (ModelInfo, class_fields("types/router.py", {"ModelInfo"})),
    "general_settings": (GeneralSettings, class_fields("proxy/_types.py", {"ConfigGeneralSettings"})),
    "litellm_settings": (LitellmSettings, module_settings()),
    "router_settings": (RouterSettings, router_parameters()),
    "mcp_servers[]": (McpServerSettings, class_fields("types/mcp_server/mcp_server_manager.py", {"MCPServer"})),
    "": (Config, class_fields("proxy/_types.py", {"ConfigYAML"})),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_of_litellm_is_supported_or_listed(section: str) -> None:
    model, names = SECTIONS[section]
    entry_limits = {"rpm", "tpm"} if section == "model_list[].model_info" else set()
    known = {*model.model_fields, *keys_of(section), *ModelEntry.model_fields, *entry_limits}
    assert set(names)
    assert sorted(set(names) - known) == [], UNCLASSIFIED


@pytest.mark.parametrize("section", ["general_settings", "litellm_settings", "router_settings"])
def test_every_key_that_litellm_reads_from_a_section_is_supported_or_listed(section: str) -> None:
    model, _ = SECTIONS[section]
    read = keys_read(section)
    assert read
    assert sorted(read - {*model.model_fields, *keys_of(section)}) == [], UNCLASSIFIED
