"""Several configuration files, and credentials that entries share."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from unisono.config import imported, load
from unisono.errors import ConfigError

MODEL = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": "http://127.0.0.1:1"}}
OTHER = {**MODEL, "model_name": "gpt-oss-other"}


def written(folder: Path, **files: object) -> Path:
    """Write the files and return the path of `main`."""
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return folder / "main.yaml"


def test_lists_are_appended_and_sections_are_merged(tmp_path: Path) -> None:
    main = {
        "include": ["models.yaml", "access.yaml"],
        "model_list": [MODEL],
        "router_settings": {"num_retries": 1},
    }
    access = {
        "general_settings": {"master_key": "os.environ/OPERATOR_KEY"},
        "router_settings": {"timeout": 7, "num_retries": 1},
    }
    path = written(tmp_path, main=main, models={"model_list": [OTHER]}, access=access)
    loaded = load(path, {"OPERATOR_KEY": "sk-from-the-environment"})
    assert [entry.model_name for entry in loaded.config.model_list] == ["gpt-oss", "gpt-oss-other"]
    assert (loaded.config.router_settings.timeout, loaded.config.router_settings.num_retries) == (7, 1)
    # Secrets of included files are resolved, and are secrets.
    key = loaded.config.general_settings.master_key
    assert key is not None
    assert key.get_secret_value() == "sk-from-the-environment"
    assert "sk-from" not in repr(loaded.config)
    # An imported file contains the files that it included.
    text = imported(path)
    assert "include" not in yaml.safe_load(text)
    assert len(yaml.safe_load(text)["model_list"]) == 2


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"router_settings": {"num_retries": 2}}, "part.yaml: router_settings.num_retries: another file sets"),
        ({"include": ["x.yaml"]}, "part.yaml: an included file must not include further files"),
        ("- 1", "part.yaml: an included file must be a mapping"),
        ("a: [", "include: {folder}/part.yaml, line 1"),
        (None, "include: {folder}/part.yaml: cannot read the file"),
    ],
    ids=str,
)
def test_mistakes_name_the_included_file(tmp_path: Path, part: object, message: str) -> None:
    main = {"include": ["part.yaml"], "model_list": [MODEL], "router_settings": {"num_retries": 1}}
    path = written(tmp_path, main=main, **({} if part is None else {"part": part}))
    with pytest.raises(ConfigError) as raised:
        load(path, {})
    assert message.format(folder=tmp_path) in str(raised.value)


def test_errors_of_values_name_the_included_file(tmp_path: Path) -> None:
    wrong = {"model_name": "gpt-oss-2", "litellm_params": {**MODEL["litellm_params"], "api_bse": "x"}}  # type: ignore[dict-item]
    part = {"model_list": [MODEL, wrong], "router_settings": {"num_retries": "many", "alowed_fails": 1}}
    main = {"include": ["part.yaml"], "model_list": [MODEL], "router_settings": {"timeout": "long"}}
    path = written(tmp_path, main=main, part=part)
    with pytest.raises(ConfigError) as raised:
        load(path, {})
    errors = {line.strip().split(":")[0]: line for line in str(raised.value).split("\n")[1:]}
    assert errors.keys() == {
        "model_list[2].litellm_params.api_bse",
        "router_settings.num_retries",
        "router_settings.alowed_fails",
        "router_settings.timeout",
    }
    named = {key for key, line in errors.items() if line.endswith(f"(in {tmp_path / 'part.yaml'})")}
    assert named == errors.keys() - {"router_settings.timeout"}


def test_files_that_refer_to_themselves_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "main.yaml").write_text("include: [part.yaml]\nstore: &a {url: *a}\n")
    (tmp_path / "part.yaml").write_text("store: &a {url: *a}\n")
    with pytest.raises(ConfigError, match=r"part\.yaml: a YAML alias"):
        load(tmp_path / "main.yaml", {})


def test_entries_take_values_from_a_credential(tmp_path: Path) -> None:
    params = {"model": "vllm/tiny", "litellm_credential_name": "box"}
    main = {
        "credential_list": [
            {
                "credential_name": "box",
                "credential_values": {"api_base": "http://127.0.0.1:1", "api_key": "os.environ/BOX_KEY"},
                "credential_info": {"description": "the box"},
            }
        ],
        "model_list": [
            {"model_name": "gpt-oss", "litellm_params": params},
            {"model_name": "gpt-oss-2", "litellm_params": {**params, "base_url": "http://127.0.0.1:2"}},
            {"model_name": "gpt-4o", "litellm_params": {**params, "model": "openai/gpt-4o"}},
        ],
    }
    path = written(tmp_path, main=main)
    loaded = load(path, {"BOX_KEY": "sk-of-the-box"})
    read = [entry.litellm_params for entry in loaded.config.model_list]
    assert [each.api_base for each in read] == ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1"]
    assert {each.api_key.get_secret_value() for each in read if each.api_key} == {"sk-of-the-box"}
    assert not loaded.warnings
    assert "sk-of" not in repr(loaded.config)
    assert yaml.safe_load(imported(path))["credential_list"]


def test_an_unknown_credential_is_an_error(tmp_path: Path) -> None:
    params = {**MODEL["litellm_params"], "litellm_credential_name": "box"}  # type: ignore[dict-item]
    path = written(tmp_path, main={"model_list": [{"model_name": "gpt-oss", "litellm_params": params}]})
    with pytest.raises(ConfigError, match=r"model_list\[0\]\.litellm_params\.litellm_credential_name: .*`box`"):
        load(path, {})
