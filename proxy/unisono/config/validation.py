"""Validation of a parsed configuration. One exception reports all errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import field
from typing import Any

from pydantic import ValidationError

from unisono.config.sections import Config
from unisono.core.frozen import dataclass
from unisono.core.json_syntax import is_well_formed
from unisono.errors import ConfigError, well_formed

PROVIDER = "provider"
"""Field of `LitellmParams` that contains the keys that are passed to litellm."""

_ELEMENT = re.compile(r"\b(model_list|guardrails)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class FilePositions:
    """Mapping of list indices in the validated configuration to those in the file.

    The indices differ because the loader leaves out elements without effect. `left_out` maps the name of a list to the
    indices of these elements in the file, from 0.
    """

    left_out: Mapping[str, Set[int]] = field(default_factory=dict)

    def in_file(self, message: str) -> str:
        """Replace the list indices in a message about the configuration with those in the file."""
        return _ELEMENT.sub(self._element, message) if self.left_out else message

    def _element(self, found: re.Match[str]) -> str:
        position, missing = int(found[2]), self.left_out.get(found[1], frozenset())
        for index in sorted(missing):
            position += index <= position
        return f"{found[1]}[{position}]"


def validated(tree: object, errors: Sequence[str], positions: FilePositions) -> Config:
    """Return the validated configuration.

    Raises ConfigError if the validation finds errors. The exception also contains `errors`, the errors found before.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        found = list(errors)
        # Report one error per key, although pydantic reports an error for each type that a value may have.
        places = {line.partition(":")[0] for line in errors}
        # The input is excluded, because it may contain a secret.
        for each in error.errors(include_url=False, include_input=False, include_context=False):
            place = positions.in_file(_path(_place(each["loc"], tree, is_missing=each["type"] == "missing")))
            if place not in places:
                places.add(place)
                is_unknown = each["type"] == "extra_forbidden"
                sentence = f"unknown key `{each['loc'][-1]}`; remove it" if is_unknown else _sentence(each["msg"])
                found.append(f"{positions.in_file(_path(each['loc']))}: {sentence}")
        raise ConfigError(*found) from None


def _place(loc: tuple[int | str, ...], tree: object, *, is_missing: bool) -> tuple[int | str, ...]:
    """Return the part of pydantic's error location that exists in the file.

    pydantic may append the name of a possible type of the value, which is not a key in the file. If a key `is_missing`,
    the result also contains that key.
    """
    node: Any = tree
    for depth, part in enumerate(loc):
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return loc[: depth + is_missing]
    return loc


def _path(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        if part == PROVIDER:
            # In the file, the keys in `provider` are one level up.
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _sentence(message: str) -> str:
    # Lists are validated as tuples, but users of YAML only know lists.
    message = message.removeprefix("Value error, ").replace("a valid tuple", "a list")
    return message[:1].lower() + message[1:]


def refuse_lone_surrogates(value: object, path: str) -> None:
    """Raise ConfigError if a text in `value` is not valid Unicode and cannot be sent."""
    match value:
        case str() if not is_well_formed(value):
            raise ConfigError(f"{path}: the text is not valid Unicode; remove unpaired surrogates and non-UTF-8 bytes")
        case Mapping():
            for key, inner in value.items():
                key_path = f"{path}.{key}".lstrip(".")
                # The key itself may be the invalid text, but the error message must be valid Unicode.
                refuse_lone_surrogates(key, well_formed(key_path))
                refuse_lone_surrogates(inner, key_path)
        case list():
            for index, inner in enumerate(value):
                refuse_lone_surrogates(inner, f"{path}[{index}]")
