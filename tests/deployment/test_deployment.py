"""Compose files, image and chart match the gateway: configuration, ports, paths, timeouts, version."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from tests.deployment.manifests import CHART, COMPOSE, DOCKER, RENDERINGS, ROOT, instructions, rendered, words_of
from tests.docs.pages import commands
from tests.e2e.gateway import config_of
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import FakeVllm
from unisono import __version__
from unisono.app import build
from unisono.cli import main
from unisono.config import Config, GatewaySettings, load

UID = "10001"
EXAMPLE = (DOCKER / "env.example").read_text()


def configurations() -> Iterator[tuple[str, str]]:
    for path in sorted((DOCKER / "config").glob("*.yaml")):
        yield path.name, path.read_text()
    for name in RENDERINGS:
        yield f"chart {name}", rendered(name)["ConfigMap"]["data"]["config.yaml"]


def loaded(text: str, tmp_path: Path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    environ = dict.fromkeys(re.findall(r"os\.environ/(\w+)", text), "a-secret-of-this-test")
    result = load(path, environ | {"UNISONO_STORE_URL": "redis://127.0.0.1:1/0"})
    assert result.warnings == ()
    return result.config


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in configurations()])
def test_a_configuration_is_valid_and_has_a_master_key(text: str, tmp_path: Path) -> None:
    config = loaded(text, tmp_path)
    assert config.general_settings.master_key is not None
    assert config.store.url is not None
    assert config.store.url.get_secret_value().startswith("redis://")
    build(config)


# -- the image


def test_the_image_label_has_the_current_version() -> None:
    [label] = [rest for word, rest in instructions() if word == "LABEL"]
    assert f'org.opencontainers.image.version="{__version__}"' in label


def test_the_image_runs_an_existing_command() -> None:
    check_command([*words_of("ENTRYPOINT"), *words_of("CMD")])


def check_command(words: list[str]) -> dict[str, Any]:
    program, name, *rest = words
    assert program == "unisono"
    context = click.Context(main)
    command = main.get_command(context, name)
    assert command is not None
    options, arguments, _ = command.make_parser(context).parse_args(rest)
    assert arguments == []
    assert (options["host"], options["port"], options["config_path"]) == ("0.0.0.0", "4000", "/etc/unisono/config.yaml")
    return dict(options)


def test_the_image_runs_without_root_and_writes_only_to_its_volume() -> None:
    arguments = dict(instructions())
    assert arguments["USER"] == f"{UID}:{UID}"
    assert f"--uid {UID} --gid {UID}" in arguments["RUN"]
    assert arguments["VOLUME"] == "/var/lib/unisono"
    [*_, environment] = [rest for word, rest in instructions() if word == "ENV"]
    assert re.findall(r"XDG_\w+=(\S+)", environment) == ["/var/lib/unisono/state", "/var/lib/unisono/cache"]


def test_the_health_check_of_the_image_uses_an_existing_path(tmp_path: Path) -> None:
    [health] = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    [(port, path)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", health)
    assert port == "4000"
    assert path in health_paths(tmp_path)


def health_paths(tmp_path: Path) -> set[str]:
    app = build(loaded((DOCKER / "config" / "vllm.yaml").read_text(), tmp_path))
    return {path for path in map(str, _route_paths(app.routes)) if path.startswith(("/health", "/metrics"))}


def _route_paths(routes: Any) -> Iterator[str]:
    for route in routes:
        inner = getattr(route, "app", None)
        if hasattr(route, "path") and hasattr(route, "endpoint"):
            yield route.path
        elif hasattr(inner, "routes"):
            yield from _route_paths(inner.routes)


# -- compose

SERVICES = [
    pytest.param(service, id=f"{file} {name}")
    for file, compose in COMPOSE.items()
    for name, service in compose["services"].items()
]
GATEWAYS = [pytest.param(compose["services"]["unisono"], id=file) for file, compose in COMPOSE.items()]


@pytest.mark.parametrize("service", SERVICES)
def test_a_compose_service_has_minimal_privileges(service: dict[str, Any]) -> None:
    assert not service.keys() & {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode", "userns_mode"}
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert not any("docker.sock" in volume for volume in service.get("volumes", ()))
    assert re.search(r":v?\d", service["image"])


@pytest.mark.parametrize("service", GATEWAYS)
def test_the_gateway_service_matches_the_image_and_configuration(service: dict[str, Any]) -> None:
    assert service["image"].removesuffix("-demo") == f"unisono:{__version__}"
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["ports"] == ["127.0.0.1:4000:4000"]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    [mount] = [volume for volume in service["volumes"] if volume.startswith("./")]
    source, target, mode = mount.split(":")
    text = (DOCKER / source).read_text()
    assert (target, mode) == (words_of("CMD")[-1], "ro")
    assert set(re.findall(r"os\.environ/(\w+)", text)) == set(service["environment"])


@pytest.mark.parametrize("service", GATEWAYS)
def test_the_stop_grace_period_covers_the_shutdown(service: dict[str, Any], tmp_path: Path) -> None:
    [mount] = [volume for volume in service["volumes"] if volume.startswith("./")]
    settings = loaded((DOCKER / mount.split(":")[0]).read_text(), tmp_path).unisono
    assert int(service["stop_grace_period"].removesuffix("s")) >= settings.shutdown_grace_s + 10


@pytest.mark.parametrize("file", COMPOSE)
def test_the_variables_of_a_compose_file_are_documented(file: str) -> None:
    variables = set(re.findall(r"\$\{(\w+)", (DOCKER / file).read_text()))
    assert variables
    assert variables <= set(re.findall(r"^(\w+)=", EXAMPLE, re.M))
    assert "docker/.env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("file", COMPOSE)
def test_every_host_of_a_configuration_is_a_service_on_its_network(file: str) -> None:
    services = COMPOSE[file]["services"]
    [mount] = [volume for volume in services["unisono"]["volumes"] if volume.startswith("./")]
    hosts = set(re.findall(r"\w+://(\w+):\d+", (DOCKER / mount.split(":")[0]).read_text()))
    assert hosts == services.keys() - {"unisono"}
    assert all(set(services[host]["networks"]) & set(services["unisono"]["networks"]) for host in hosts)


# -- the chart

CHARTS = [pytest.param(rendered(name), id=name) for name in RENDERINGS]


@pytest.mark.parametrize("chart", CHARTS)
def test_the_pod_matches_the_image_and_its_ports(chart: dict[str, Any], tmp_path: Path) -> None:
    pod = chart["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"].endswith(f"unisono:{__version__}")
    check_command([*words_of("ENTRYPOINT"), *container["args"]])
    assert container["ports"] == [{"name": "http", "containerPort": 4000}]
    [port] = chart["Service"]["spec"]["ports"]
    assert port["targetPort"] == "http"
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"/health/liveness", "/health/readiness"}
    assert probes <= health_paths(tmp_path)
    [mounted] = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    assert words_of("CMD")[-1].startswith(mounted["mountPath"] + "/")


@pytest.mark.parametrize("chart", CHARTS)
def test_the_termination_grace_period_covers_the_shutdown(chart: dict[str, Any], tmp_path: Path) -> None:
    settings = loaded(chart["ConfigMap"]["data"]["config.yaml"], tmp_path).unisono
    seconds = chart["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert seconds >= settings.shutdown_grace_s + settings.shutdown_delay_s + 10


@pytest.mark.parametrize("chart", CHARTS)
def test_the_pod_has_minimal_privileges(chart: dict[str, Any]) -> None:
    pod = chart["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert {str(pod["securityContext"][key]) for key in ("runAsUser", "runAsGroup", "fsGroup")} == {UID}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("chart", CHARTS)
def test_all_selectors_match_the_same_pods(chart: dict[str, Any]) -> None:
    deployment = chart["Deployment"]["spec"]
    selectors = [
        deployment["selector"]["matchLabels"],
        chart["Service"]["spec"]["selector"],
        chart["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector == selectors[0] for selector in selectors)
    assert selectors[0].items() <= deployment["template"]["metadata"]["labels"].items()


def test_the_autoscaler_targets_the_deployment() -> None:
    plain, everything = (rendered(name) for name in RENDERINGS)
    assert plain.keys() == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}
    added = {"HorizontalPodAutoscaler", "ScaledObject", "ServiceMonitor", "NetworkPolicy", "Ingress", "Job"}
    assert everything.keys() == {*plain, *added}
    assert "replicas" not in everything["Deployment"]["spec"]
    target = everything["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == everything["Deployment"]["metadata"]["name"]


def test_network_policy_and_ingress_lead_to_the_gateway() -> None:
    chart = rendered("everything")
    policy = chart["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == chart["Deployment"]["spec"]["selector"]["matchLabels"]
    [container] = chart["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert policy["ingress"][0]["ports"][0]["port"] in {port["name"] for port in container["ports"]}
    # The job for the first key is a client too, whatever the other clients are.
    [other, job] = policy["ingress"][0]["from"]
    assert other == {"namespaceSelector": {"matchLabels": {"team": "search"}}}
    assert job == {"podSelector": {"matchLabels": chart["Job"]["spec"]["template"]["metadata"]["labels"]}}
    [rule] = chart["Ingress"]["spec"]["rules"]
    service = rule["http"]["paths"][0]["backend"]["service"]
    assert service["name"] == chart["Service"]["metadata"]["name"]
    assert service["port"]["name"] in {port["name"] for port in chart["Service"]["spec"]["ports"]}


async def test_the_job_creates_the_first_key_once(tmp_path: Path) -> None:
    """Run the script of the chart against a gateway several times, as after upgrades."""
    pod = rendered("everything")["Job"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    async with FakeVllm() as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, _):
        environ = {"GATEWAY": running.url, "FIRST_KEY_ALIAS": "first", "UNISONO_MASTER_KEY": MASTER}
        assert await exit_code(container["args"], environ) == 0
        assert await exit_code(container["args"], environ) == 0
        assert await exit_code(container["args"], {**environ, "UNISONO_MASTER_KEY": "sk-wrong"}) == 1
        again = await running.post("/key/generate", b'{"key_alias": "first"}', **bearing(MASTER))
        assert (await running.get("/v1/models", **bearing(again.body["key"]))).status == 200
        [key] = (await running.get("/key/list", **bearing(MASTER))).body["keys"]
        # From now on, /key/generate refuses the alias.
        await running.post("/key/regenerate", json.dumps({"key": key}).encode(), **bearing(MASTER))
        assert await exit_code(container["args"], environ) == 0
        assert (await running.get("/key/list", **bearing(MASTER))).body["keys"] == [key]


async def exit_code(arguments: list[str], environ: dict[str, str]) -> int:
    command = (sys.executable, "-c", *arguments)
    job = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.DEVNULL)
    return await job.wait()


def test_chart_values_match_their_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    more = yaml.safe_load((Path(__file__).parent / "everything.values.yaml").read_text())
    validator = jsonschema.Draft7Validator(schema)
    assert not list(validator.iter_errors(values))
    assert not list(validator.iter_errors(more))
    for wrong in ({"replica": 2}, {"service": {"port": "80a"}}, {"ingress": {"hosts": []}}, {"replicas": -1}):
        assert list(validator.iter_errors(wrong)), wrong


def test_the_systemd_unit_runs_an_existing_command() -> None:
    unit = (DOCKER / "systemd" / "unisono.service").read_text()
    [command] = re.findall(r"^ExecStart=/opt/unisono/bin/unisono (.*)$", unit, re.M)
    options, arguments, _ = main.commands["serve"].make_parser(click.Context(main)).parse_args(command.split()[1:])
    assert (options["config_path"], arguments) == ("/etc/unisono/config.yaml", [])
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    settings = GatewaySettings()
    assert int(seconds) >= settings.shutdown_grace_s + settings.shutdown_delay_s + 10


def test_backends_are_scaled_by_existing_metrics(tmp_path: Path) -> None:
    from tests.observe.test_files import LABELS

    chart = rendered("everything")
    config = loaded(chart["ConfigMap"]["data"]["config.yaml"], tmp_path)
    names = []
    for trigger in chart["ScaledObject"]["spec"]["triggers"]:
        [(name, label, model)] = re.findall(r'(unisono_\w+)\{(\w+)="([^"]+)"\}', trigger["metadata"]["query"])
        assert label in LABELS[name]
        assert model in {entry.model_name for entry in config.model_list}
        names.append(name)
    assert names == ["unisono_queue_length", "unisono_backend_requests_running"]
    [endpoint] = chart["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["path"] in health_paths(tmp_path)


def test_backend_scaling_uses_queue_length_and_running_requests(tmp_path: Path) -> None:
    """A queue forms only if each backend has a slot limit.

    Scaling by queue length alone would remove busy backends as soon as the queue is empty.
    """
    chart = rendered("everything")
    scaled = chart["ScaledObject"]["spec"]
    _, running = (int(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"])
    entries = [
        entry.litellm_params
        for entry in loaded(chart["ConfigMap"]["data"]["config.yaml"], tmp_path).model_list
        if entry.model_name in scaled["triggers"][0]["metadata"]["query"]
    ]
    assert len(entries) == scaled["maxReplicaCount"]
    assert all(entry.max_parallel_requests is not None and running < entry.max_parallel_requests for entry in entries)
    assert scaled["minReplicaCount"] >= 1
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert 0 < behavior["scaleDown"]["stabilizationWindowSeconds"] <= 3600


def test_the_chart_has_the_current_version() -> None:
    text = (DOCKER / "helm" / "unisono" / "Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (\S+)$", text, re.M) == [__version__, __version__]


def test_the_documented_secret_has_all_variables_of_the_chart() -> None:
    variables = set(re.findall(r"os\.environ/(\w+)", rendered("default")["ConfigMap"]["data"]["config.yaml"]))
    for page in (ROOT / "docs" / "operations.md", DOCKER / "helm" / "unisono" / "values.yaml"):
        assert variables == set(re.findall(r"--from-literal=(\w+)=", page.read_text()))


def test_the_pages_set_only_existing_chart_values() -> None:
    values = yaml.safe_load((DOCKER / "helm" / "unisono" / "values.yaml").read_text())
    settings = [word for _, words in commands("helm") for flag, word in pairwise(words) if flag == "--set"]
    paths = [word.partition("=")[0] for word in settings]
    assert paths
    for path in paths:
        part = values
        for key in path.split("."):
            part = part[key]
