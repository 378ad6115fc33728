"""The included dashboard and alert rules use existing metrics and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from unisono.observe.metric_definitions import Instruments

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "unisono.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DOCKER / "alerts" / "unisono.yml").read_text())["groups"]
    for rule in group["rules"]
]
NAME = re.compile(r"\bunisono_[a-z_]+")
# Labels that Prometheus adds.
EXTERNAL_LABELS = {"instance"}


def instruments() -> Iterator[MetricWrapperBase]:
    return (each for each in vars(Instruments()).values() if isinstance(each, MetricWrapperBase))


LABELS = {}
for each in instruments():
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(each._type, [""])
    LABELS |= {each._name + end: {*each._labelnames, *(["le"] if end == "_bucket" else [])} for end in ends}

EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
} | {rule["alert"]: rule["expr"] for rule in RULES}


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_uses_existing_metrics_and_labels(expression: str) -> None:
    names = NAME.findall(expression)
    assert names
    assert set(names) <= LABELS.keys()
    for name, matchers in re.findall(r"\b(unisono_[a-z_]+)\{([^}]*)\}", expression):
        assert set(re.findall(r"([a-z_]+) *(?:=~|!=|!~|=)", matchers)) <= LABELS[name]
    for grouped, inner in re.findall(r"by \(([^)]*)\) \((?:[a-z]+\()?(unisono_[a-z_]+)", expression):
        assert {label.strip() for label in grouped.split(",")} - EXTERNAL_LABELS <= LABELS[inner]
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_every_alert_has_a_severity_and_a_description() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        used = set(re.findall(r"\$labels\.([a-z]+)", rule["annotations"]["summary"]))
        grouped = re.search(r"by \(([^)]*)\)", rule["expr"])
        available = (
            {label.strip() for label in grouped[1].split(",")} if grouped else LABELS[NAME.findall(rule["expr"])[0]]
        )
        assert used <= available


def test_the_documentation_lists_every_metric_with_its_labels() -> None:
    text = (DOCKER.parent / "docs" / "observability.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `unisono_")]
    documented = {name: labels for _, names, labels, *_ in rows for name in re.findall(r"`(\w+)`", names)}
    ends = {"counter": "_total"}
    assert documented.keys() == {each._name + ends.get(each._type, "") for each in instruments()}
    for each in instruments():
        labels = documented[each._name + ends.get(each._type, "")]
        assert set(each._labelnames) <= set(re.findall(r"\w+", labels)), each._name


def test_dashboard_panels_do_not_overlap() -> None:
    occupied: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & occupied
        assert position["x"] + position["w"] <= 24
        occupied |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
