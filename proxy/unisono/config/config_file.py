"""Reader of configuration files, with the files that `include` names.

The file is YAML; JSON is valid YAML. Errors contain no value, because values may be secret.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml

from unisono.core.frozen import dataclass
from unisono.errors import ConfigError

INCLUDE = "include"
DATA_HOME = "XDG_DATA_HOME"


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys. Plain YAML lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            # `<<` may occur more than once.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key `{key}`; remove one of them", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Parsed configuration file, merged with the files that it includes.

    `origins` maps the paths of keys and list elements from included files to these files: `router_settings.timeout`,
    `model_list.2`.
    """

    tree: object
    origins: dict[str, Path] = field(default_factory=dict)

    def with_origins(self, error: ConfigError) -> ConfigError:
        """Return the error with the included file behind each line about one of its keys."""
        return ConfigError(*map(self._with_origin, error.messages))

    def _with_origin(self, line: str) -> str:
        path = line.split(":", 1)[0].replace("[", ".").replace("]", "")
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return f"{line} (in {self.origins[path]})" if path else line


def read(path: Path) -> ConfigFile:
    """Parse a configuration file and the files that it includes. Raises ConfigError.

    Lists of an included file are appended, and its sections are merged. A key that has different values in both
    files is an error.
    """
    tree = _parsed(path)
    read_file = ConfigFile(tree)
    if not isinstance(tree, dict) or tree.get(INCLUDE) is None:
        return read_file
    names = tree[INCLUDE]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{INCLUDE}: must be a list of file names")
    for name in names:
        file = path.parent / name
        part = _parsed(file)
        if not isinstance(part, dict):
            raise ConfigError(f"{file}: an included file must be a mapping of sections")
        if INCLUDE in part:
            raise ConfigError(f"{file}: an included file must not include others; list them in {path}")
        try:
            _merge(tree, part, file, "", read_file.origins)
        except RecursionError:
            raise ConfigError(
                f"{file}: a YAML alias (`*name`) is inside the value of its own anchor (`&name`); remove it"
            ) from None
    return read_file


def _parsed(path: Path) -> object:
    try:
        # Editors on Windows begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8 text; save it as UTF-8") from None
    # A name with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the file: {getattr(error, 'strerror', None) or error}") from None
    try:
        raw = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        # Report only position and problem: the excerpt that YAML adds may contain a secret.
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: invalid YAML: {error.problem or 'syntax error'}") from None
    # The parser recurses, so deeply nested input exceeds the recursion limit of Python.
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path}: the file is not valid YAML") from None
    return {} if raw is None else raw


def _merge(tree: dict[Any, Any], part: dict[Any, Any], file: Path, at: str, origins: dict[str, Path]) -> None:
    """Merge `part`, read from `file`, into `tree`, and record its keys in `origins`.

    `at` is the path of both.
    """
    for key, value in part.items():
        key_path = f"{at}.{key}".lstrip(".")
        known = tree.get(key)
        if known is None:
            tree[key] = value
            origins[key_path] = file
        elif isinstance(known, list) and isinstance(value, list):
            # A new list, because aliases in the file may share the old one.
            tree[key] = [*known, *value]
            origins.update({f"{key_path}.{len(known) + index}": file for index in range(len(value))})
        elif isinstance(known, dict) and isinstance(value, dict):
            tree[key] = {**known}
            _merge(tree[key], value, file, key_path, origins)
        elif value is not None and known != value:
            raise ConfigError(f"{file}: {key_path}: another file sets this key to a different value; remove one")


def data_folder(environ: Mapping[str, str] | None = None) -> str:
    """Return the folder for data of this user: an absolute path, or one that begins with `~`.

    `environ` is the environment of the process by default.
    """
    home = (os.environ if environ is None else environ).get(DATA_HOME, "")
    # The XDG specification requires that relative paths are ignored.
    return f"{home if Path(home).is_absolute() else '~/.local/share'}/unisono"
