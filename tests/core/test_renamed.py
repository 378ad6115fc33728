"""Names that adapters imported before: each still works, with a warning that names the new one."""

from __future__ import annotations

import importlib

import pytest

RENAMED = {
    ("unisono.core.generation", "Generation"): "CompletionJob",
    ("unisono.core.generation", "Form"): "OutputForm",
    ("unisono.core.ports", "PassingBackend"): "PassthroughBackend",
    ("unisono.core.ports", "PassingFactory"): "PassthroughFactory",
    ("unisono_adapters._examine", "Subject"): "Subject",
}


@pytest.mark.parametrize(("module", "name"), RENAMED)
def test_an_old_name_works_and_warns(module: str, name: str) -> None:
    new = RENAMED[module, name]
    with pytest.warns(DeprecationWarning, match=f"{name} was renamed to {new}"):
        found = getattr(importlib.import_module(module), name)
    assert found.__name__ == new


def test_any_other_name_is_missing() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        importlib.import_module("unisono.core.generation").nothing  # noqa: B018
