"""Compose files and the rendered chart, checked with the schemas of compose-spec and Kubernetes.

The validators are in a separate environment, locked in `tools`. Custom resources (ScaledObject, ServiceMonitor) have no
schema there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deployment.manifests import (
    CHART,
    COMPOSE,
    DOCKER,
    RENDERED,
    RENDERINGS,
    ROOT,
    TOOLS,
    helm,
    manifests,
    render,
    rendered,
)

pytestmark = pytest.mark.slow

WITHOUT_SCHEMA = {"ScaledObject", "ServiceMonitor"}
VERSIONS = ("1.31", "1.37")
HAS_HELM_PACKAGE = sys.platform == "linux" and platform.machine() == "x86_64"
NEEDS_HELM = pytest.mark.skipif(
    not HAS_HELM_PACKAGE and shutil.which("helm") is None, reason="helm is not installed, and has no package here"
)


@pytest.fixture(scope="module")
def tools() -> Path:
    """Install the validators and return the folder of their commands."""
    uv = shutil.which("uv") or str(ROOT / ".cache" / "uv" / "bin" / "uv")
    subprocess.run(
        [uv, "sync", "--quiet", "--locked", "--project", str(Path(__file__).parent / "tools")],
        env={**os.environ, "UV_PROJECT_ENVIRONMENT": str(TOOLS)},
        check=True,
        timeout=300,
    )
    return TOOLS / "bin"


def test_compose_files_match_the_compose_specification(tools: Path) -> None:
    paths = [str(DOCKER / name) for name in COMPOSE]
    run(tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *paths)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RENDERINGS)
def test_the_rendered_chart_matches_the_kubernetes_schemas(name: str, version: str, tools: Path) -> None:
    output = run(tools / "kubernetes-validate", "--strict", "-k", version, str(RENDERED / f"{name}.yaml"))
    passed = [line for line in output.splitlines() if " passed for resource " in line]
    assert len(passed) == len(rendered(name).keys() - WITHOUT_SCHEMA)


@NEEDS_HELM
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("name", RENDERINGS)
def test_the_rendered_chart_is_up_to_date(name: str) -> None:
    assert rendered(name) == manifests(render(name)), "python -m tests.deployment.manifests"


SECRETS = {
    "config.general_settings.master_key": "1234567890",
    "config.unisono.salt_key": "0123456789abcdef",
    "config.model_list[0].litellm_params.api_key": "sk-0123456789abcdef",
    "config.store.url": "redis://:password@redis:6379/0",
}


@NEEDS_HELM
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(("path", "secret"), SECRETS.items(), ids=SECRETS)
def test_a_secret_in_the_chart_values_is_rejected_without_being_printed(path: str, secret: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render("default", "--set", f"{path}={secret}")
    assert path.replace("[0]", ".0") in refused.value.stderr
    assert secret not in refused.value.stderr
    render("default", "--set", f"{path}=os.environ/NAME")


@NEEDS_HELM
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("name", ["shutdown_grace_s", "shutdown_delay_s"])
def test_the_chart_refuses_a_time_to_stop_that_it_cannot_read(name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render("default", "--set", f"config.unisono.{name}=os.environ/NAME")
    assert f"config.unisono.{name}: must be a number" in refused.value.stderr


# Texts that YAML reads as other types if they are not quoted.
NAMES = ("123", "on", "null", "1e3")


@NEEDS_HELM
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("name", NAMES)
def test_names_in_the_chart_stay_texts(name: str) -> None:
    values = (
        *("secret", "priorityClassName", "scaleBackends.name", "scaleBackends.kind", "serviceMonitor.interval"),
        *("serviceMonitor.key.name", "ingress.className", "ingress.tlsSecret"),
    )
    switches = ("scaleBackends", "serviceMonitor", "ingress", "firstKey")
    options = [f"{value}={json.dumps(name)}" for value in values] + [f"{each}.enabled=true" for each in switches]
    sets = [word for option in options for word in ("--set-json", option)]
    text = render("default", *sets, "--set", "ingress.host=localhost")
    found = [value for document in yaml.safe_load_all(text) if document for value in leaves(document)]
    assert found.count(name) == len(values) + 2  # the job and the monitor also refer to the Secret
    assert all(type(value) is str for value in found if str(value) == name)


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


@NEEDS_HELM
@pytest.mark.usefixtures("tools")
def test_an_empty_scrape_interval_is_left_out() -> None:
    options = ("--set", "serviceMonitor.enabled=true", "--set", "serviceMonitor.interval=")
    assert "interval" not in manifests(render("default", *options))["ServiceMonitor"]["spec"]["endpoints"][0]


@NEEDS_HELM
@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("model", ["gpt #1", "team: gpt", 'the "best"', "back\\slash", "größe"])
def test_queries_of_the_chart_contain_the_whole_model_name(model: str) -> None:
    options = ("--set", "scaleBackends.enabled=true", "--set-json", f"scaleBackends.model={json.dumps(model)}")
    triggers = manifests(render("default", *options))["ScaledObject"]["spec"]["triggers"]
    label = '"{}"'.format(model.replace("\\", "\\\\").replace('"', '\\"'))
    assert [trigger["metadata"]["query"] for trigger in triggers] == [
        f"sum(unisono_queue_length{{model={label}}})",
        f"sum(unisono_backend_requests_running{{model={label}}})",
    ]


@NEEDS_HELM
@pytest.mark.usefixtures("tools")
def test_the_chart_passes_helm_lint() -> None:
    run(helm(), "lint", "--strict", str(CHART))


def run(*command: str | Path) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr
