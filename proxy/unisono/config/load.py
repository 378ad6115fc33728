"""From a file (or a mapping) and the environment to a Config: the only reader of either.

YAML or JSON, which is YAML. `os.environ/NAME` reads the environment. Every mistake is a ConfigError that begins with
the key's path and never shows a value; keys that are known but unused come back as warnings.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from unisono.config.litellm_keys import UNSERVED, is_handed_on, why_default, why_unused
from unisono.config.mcp_settings import McpServerSettings
from unisono.config.sections import Config, LitellmParams, ModelEntry, is_of_litellm
from unisono.core.surrogates import is_well_formed, well_formed
from unisono.errors import ConfigError

ENVIRONMENT_PREFIX = "os.environ/"
MASTER_KEY_VARIABLE = "UNISONO_MASTER_KEY"
DATA_HOME = "XDG_DATA_HOME"
PROVIDER = "provider"
"""What of an entry is handed to litellm, in `LitellmParams`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """`warnings` are sentences for the operator, in the order of the file."""

    config: Config
    warnings: tuple[str, ...] = ()


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, which plain YAML lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} stands twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path, environ: Mapping[str, str] | None = None) -> Loaded:
    """Read the configuration file at `path`; `environ` is the process's environment unless given. Raises
    ConfigError."""
    return parse(read(path), os.environ if environ is None else environ)


def read(path: Path) -> object:
    """What stands in a file, as YAML has it. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    try:
        raw = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        # Only place and problem: the excerpt YAML adds may hold a secret.
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path}: not YAML") from None
    return {} if raw is None else raw


def data_folder(environ: Mapping[str, str] | None = None) -> str:
    """Where this user's data belongs: an absolute path, or one that begins with `~`. `environ` as for `load`."""
    home = (os.environ if environ is None else environ).get(DATA_HOME, "")
    # The XDG specification has relative paths ignored.
    return f"{home if Path(home).is_absolute() else '~/.local/share'}/unisono"


def parse(raw: object, environ: Mapping[str, str]) -> Loaded:
    """Check a parsed file. Raises ConfigError."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the configuration is {_described(raw)}, not a mapping of sections")
    reading = _Reading({**environ, **_own_environment(raw)})
    tree = reading.all_of(raw)
    _refuse_halves(tree, "")
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ConfigError(f"{_path(first['loc'])}: {_sentence(first['msg'])}") from None
    hints = (
        f"model_list[{index}].litellm_params.model: {entry.harmony_hint}"
        for index, entry in enumerate(config.model_list)
        if entry.harmony_hint
    )
    return Loaded(config, (*reading.warnings, *hints))


def used(raw: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What of a parsed file has an effect, with references to the environment as they stand, and a sentence for each
    key that has none. Raises ConfigError."""
    reading = _Reading({}, resolves=False)
    tree = reading.all_of(raw)
    _refuse_halves(tree, "")
    assert isinstance(tree, dict)
    return tree, tuple(reading.warnings)


def _own_environment(raw: Mapping[Any, Any]) -> dict[str, str]:
    """LiteLLM's `environment_variables` section: they win over the environment, as there."""
    own = raw.get("environment_variables") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"environment_variables: {_described(own)}, not a mapping of names to values")
    return {str(name): str(value) for name, value in own.items()}


@dataclass(slots=True)
class _Reading:
    """One pass over the raw tree beside the models: takes out unused keys, reads the environment, names unknown
    keys."""

    environ: Mapping[str, str]
    warnings: list[str] = field(default_factory=list)
    resolves: bool = True

    def all_of(self, raw: object) -> object:
        """Raises ConfigError."""
        try:
            return self.section(raw, Config, "")
        except RecursionError:
            raise ConfigError("the configuration refers to itself, by an alias inside of its own anchor") from None

    def section(self, raw: object, model: type[BaseModel], path: str) -> object:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{path}: {_described(raw)}, not a mapping")
        kept: dict[str, object] = {}
        more: dict[str, object] = {}
        handed = model is LitellmParams and is_of_litellm(raw.get("model"))
        for key, value in self._spelled(raw, model, path).items():
            here = f"{path}.{key}" if path else str(key)
            if not path and key == "environment_variables":
                kept[str(key)] = dict(_own_environment(raw))
                continue
            if handed and key not in model.model_fields and is_handed_on(str(key)):
                more[str(key)] = self._resolved(value, here)
                if why_unused(_general(path), str(key)) is None:
                    self.warnings.append(f"{here}: nobody here knows this key; litellm gets it as it stands")
            elif key not in model.model_fields:
                self._unused(_general(path), str(key), here, tuple(model.model_fields))
            elif (why := why_default(_general(path), str(key), value)) is not None:
                self.warnings.append(f"{here}: {value!r} {why}")
            elif value is not None or _may_be_empty(model, str(key)):
                kept[str(key)] = self._value(value, model, str(key), here)
        return {**kept, PROVIDER: more} if more else kept

    def _spelled(self, raw: Mapping[Any, Any], model: type[BaseModel], path: str) -> Mapping[Any, Any]:
        """Keys by the names they have here. Raises ConfigError for one that stands there by both of its names."""
        if model is not LitellmParams or "base_url" not in raw:
            return raw
        if raw.get("api_base") is not None:
            raise ConfigError(f"{path}.base_url: another name of api_base, which stands there too")
        return {("api_base" if key == "base_url" else key): value for key, value in raw.items()}

    def _value(self, value: object, model: type[BaseModel], key: str, path: str) -> object:
        inner = model.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return self.section(value, inner, path)
        if (model, key) == (Config, "model_list"):
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise ConfigError(f"{path}: {_described(value)}, not a list of models")
            entries = ((f"{path}[{index}]", entry) for index, entry in enumerate(value))
            return [self.section(entry, ModelEntry, here) for here, entry in entries if not self._left_out(entry, here)]
        if (model, key) == (Config, "mcp_servers"):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}: {_described(value)}, not a mapping of labels to servers")
            return {label: self.section(entry, McpServerSettings, f"{path}.{label}") for label, entry in value.items()}
        return self._resolved(value, path)

    def _left_out(self, entry: object, path: str) -> bool:
        """Whether an entry is for something that is not served here, which is said."""
        info = entry.get("model_info") if isinstance(entry, Mapping) else None
        mode = info.get("mode") if isinstance(info, Mapping) else None
        if mode not in UNSERVED:
            return False
        self.warnings.append(f"{path}.model_info.mode: {mode!r} is not served here; the entry is left out")
        return True

    def _resolved(self, value: object, path: str) -> object:
        """`value` with every `os.environ/NAME` in it read."""
        match value:
            case str() if value.startswith(ENVIRONMENT_PREFIX) and self.resolves:
                name = value.removeprefix(ENVIRONMENT_PREFIX)
                if name not in self.environ:
                    raise ConfigError(f"{path}: the environment has no variable {name}")
                return self.environ[name]
            case Mapping():
                return {key: self._resolved(inner, f"{path}.{key}") for key, inner in value.items()}
            case list():
                return [self._resolved(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
            case date():
                # YAML takes `api_version: 2024-02-01` for one.
                return value.isoformat()
            case _:
                return value

    def _unused(self, section: str, key: str, path: str, fields: Sequence[str]) -> None:
        reason = why_unused(section, key)
        if reason is not None:
            self.warnings.append(f"{path}: {reason}")
            return
        close = get_close_matches(key, fields, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{path}: nobody knows this key{meant}")


def _refuse_halves(value: object, path: str) -> None:
    """Raise ConfigError for text that is none: nothing could send it."""
    match value:
        case str() if not is_well_formed(value):
            raise ConfigError(f"{path}: holds half a surrogate pair, or bytes that are no UTF-8")
        case Mapping():
            for key, inner in value.items():
                here = f"{path}.{key}".lstrip(".")
                _refuse_halves(key, well_formed(here))
                _refuse_halves(inner, here)
        case list():
            for index, inner in enumerate(value):
                _refuse_halves(inner, f"{path}[{index}]")


def _may_be_empty(model: type[BaseModel], key: str) -> bool:
    """Whether nothing behind a key means something; otherwise it is as if the key were not there."""
    return type(None) in get_args(model.model_fields[key].annotation)


def _general(path: str) -> str:
    """A path without indices and names: `model_list[3].unisono` is `model_list[].unisono`."""
    if path.startswith("mcp_servers."):
        return "mcp_servers[]"
    head, bracket, rest = path.partition("[")
    return f"{head}[]{rest.partition(']')[2]}" if bracket else path


def _path(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        if part == PROVIDER:
            # In the file all of it stands one level up.
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _sentence(message: str) -> str:
    # Lists are frozen as tuples here, which is no word of YAML.
    message = message.removeprefix("Value error, ").replace("a valid tuple", "a list")
    return message[:1].lower() + message[1:]


def _described(value: object) -> str:
    names = {"NoneType": "empty", "str": "a text", "int": "a number", "float": "a number", "bool": "a yes or no"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
