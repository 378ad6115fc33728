"""Old names in imports of adapters still work, with a deprecation warning."""

from __future__ import annotations

import importlib

import pytest

from unisono.core.probe import Check

RENAMED = {
    ("unisono.core.generation", "Generation"): "CompletionJob",
    ("unisono.core.generation", "Form"): "OutputForm",
    ("unisono.core.ports", "PassingBackend"): "PassthroughBackend",
    ("unisono.core.ports", "PassingFactory"): "PassthroughFactory",
    ("unisono_adapters._examine", "Subject"): "Subject",
    ("unisono_adapters._http", "Wire"): "BackendHttp",
}


@pytest.mark.parametrize(("module", "name"), RENAMED)
def test_an_old_name_works_and_warns(module: str, name: str) -> None:
    new = RENAMED[module, name]
    with pytest.warns(DeprecationWarning, match=f"{name} was renamed to {new}"):
        imported = getattr(importlib.import_module(module), name)
    assert imported.__name__ == new


def test_the_old_name_of_a_check_works() -> None:
    assert Check.PROMPT_KEPT is Check.PROMPT_WHOLE
    assert list(Check).count(Check.PROMPT_WHOLE) == 1


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        importlib.import_module("unisono.core.generation").nothing  # noqa: B018
