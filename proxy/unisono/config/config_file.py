"""Reading of a configuration file and of the files that it includes.

The files are YAML; JSON is valid YAML. Error messages contain no values, because values may be secret.
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
    """YAML loader that rejects duplicate keys. PyYAML's own loader silently uses the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            # The merge key `<<` may occur several times.
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

    `origins` maps a key or a list element to the included file from which it comes. The key or element is given as its
    path, such as `router_settings.timeout` or `model_list.2`.
    """

    tree: object
    origins: dict[str, Path] = field(default_factory=dict)

    def with_origins(self, error: ConfigError) -> ConfigError:
        """Append the path of the included file to each message about a key in an included file."""
        return ConfigError(*map(self._with_origin, error.messages))

    def _with_origin(self, line: str) -> str:
        path = line.split(":", 1)[0].replace("[", ".").replace("]", "")
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return f"{line} (in {self.origins[path]})" if path else line


def read(path: Path) -> ConfigFile:
    """Parse a configuration file and the files that it includes.

    Lists of an included file are appended, and its sections are merged. Raises ConfigError if a file cannot be read or
    parsed, or if two files set a key to different values.
    """
    tree = parsed_yaml(path)
    read_file = ConfigFile(tree)
    if not isinstance(tree, dict) or tree.get(INCLUDE) is None:
        return read_file
    names = tree[INCLUDE]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{INCLUDE}: must be a list of file names")
    for name in names:
        file = path.parent / name
        try:
            part = parsed_yaml(file)
        except ConfigError as error:
            raise ConfigError(f"{INCLUDE}: {error}") from None
        if not isinstance(part, dict):
            raise ConfigError(f"{file}: an included file must be a mapping of sections")
        if INCLUDE in part:
            raise ConfigError(f"{file}: an included file must not include further files; list them in {path}")
        try:
            _merge(tree, part, file, "", read_file.origins)
        except RecursionError:
            raise ConfigError(
                f"{file}: a YAML alias (`*name`) is inside the value of its own anchor (`&name`); remove it"
            ) from None
    return read_file


def text_of(path: Path) -> str:
    """Return the text of a file that the user has named, without a byte order mark.

    Raises ConfigError if the file is unreadable or not UTF-8.
    """
    try:
        # Some programs on Windows write a byte order mark at the beginning of a file.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file is not UTF-8 text; save it as UTF-8") from None
    # A path with a null byte raises ValueError.
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the file: {getattr(error, 'strerror', None) or error}") from None


def parsed_yaml(path: Path) -> object:
    """Parse a YAML file; an empty file is an empty mapping.

    Raises ConfigError if the file is unreadable or invalid.
    """
    text = text_of(path)
    try:
        raw = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        # Report only the position and the problem: the excerpt that PyYAML adds may contain a secret.
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: invalid YAML: {error.problem or 'syntax error'}") from None
    # The conversion of a value failed, for example of the date 2026-02-30 or of a number with thousands of digits.
    except (ValueError, LookupError, AttributeError, TypeError):
        raise ConfigError(
            f"{path}: invalid YAML: a value is not valid, such as the date 2026-02-30; correct the value, "
            "or put it in quotes"
        ) from None
    # The parser is recursive, so deeply nested input exceeds Python's recursion limit.
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path}: the file is not valid YAML, or it is nested too deeply") from None
    return {} if raw is None else raw


def _merge(tree: dict[Any, Any], part: dict[Any, Any], file: Path, at: str, origins: dict[str, Path]) -> None:
    """Merge `part`, read from `file`, into `tree`, and record the new keys in `origins`.

    `at` is the path of the two mappings in the configuration. Raises ConfigError if they set a key to different values.
    """
    for key, value in part.items():
        key_path = f"{at}.{key}".lstrip(".")
        known = tree.get(key)
        if known is None:
            tree[key] = value
            origins[key_path] = file
        elif isinstance(known, list) and isinstance(value, list):
            # Make a new list, because YAML aliases may refer to the old list elsewhere in the file.
            tree[key] = [*known, *value]
            origins.update({f"{key_path}.{len(known) + index}": file for index in range(len(value))})
        elif isinstance(known, dict) and isinstance(value, dict):
            tree[key] = {**known}
            _merge(tree[key], value, file, key_path, origins)
        elif value is not None and known != value:
            raise ConfigError(
                f"{file}: {key_path}: another file sets this key to a different value; remove the key from one file"
            )


def data_folder(environ: Mapping[str, str] | None = None) -> str:
    """Return the folder for the user's data: an absolute path, or a path beginning with `~`.

    `environ` replaces the environment of the process.
    """
    home = (os.environ if environ is None else environ).get(DATA_HOME, "")
    # The XDG specification requires that a relative path is ignored.
    return f"{home if Path(home).is_absolute() else '~/.local/share'}/unisono"
