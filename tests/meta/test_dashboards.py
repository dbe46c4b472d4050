"""The dashboard and the alerts ask for metrics, and labels of them, that a server has; the guide lists them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.live_server import LiveServer

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "quire.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
GUIDE = ROOT / "docs" / "observability.md"
ADDED = {"instance", "job", "le"}  # labels that Prometheus adds, or that belong to buckets
FUNCTIONS = {
    "and", "by", "histogram_quantile", "increase", "label_values", "max", "min", "on", "or", "rate", "sum", "up"
}  # fmt: skip
# There only after an engine was replaced, and only where adapters are served.
RARE = {"quire:connections_open", "quire:engine_last_recovery_seconds", "vllm:lora_requests_info"}

Samples = dict[str, set[str]]


@pytest.fixture(scope="module")
def scraped() -> Iterator[tuple[Samples, dict[str, str]]]:
    """The names of all samples, with their labels; and the kinds of all metrics."""
    server = LiveServer()
    server.http.post("/v1/completions", json={"model": "fake", "prompt": "abc"})
    families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    server.close()
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    yield samples, {family.name: family.type for family in families if not family.name.endswith("_created")}


def panels() -> list[dict[str, Any]]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str, list[str]]]:
    """Return (where, expression, labels that its legend or text names) of everything that is asked."""
    found = []
    for panel in panels():
        for target in panel["targets"]:
            legend = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            found.append((panel["title"], target["expr"], legend))
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            found.append((variable["name"], variable["query"]["query"], []))
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        text = " ".join(rule["annotations"].values())
        found.append((rule["alert"], rule["expr"], re.findall(r"\$labels\.(\w+)", text)))
    return found


def parse(expression: str) -> tuple[set[str], set[str]]:
    """Return the names of metrics and of labels in an expression."""
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        labels |= set(re.split(r"[,\s]+", group))
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)", " ", expression)
    given = re.match(r"label_values\([\w:]+, (\w+)\)", plain)
    if given:
        labels.add(given[1])
        plain = plain.replace(given[1], "")
    names = {name for name in re.findall(r"[a-z_][\w:]*", plain) if name not in FUNCTIONS}
    return names, labels


@pytest.mark.parametrize(("where", "expression", "shown"), queries())
def test_what_is_asked_for_exists(
    scraped: tuple[Samples, dict[str, str]], where: str, expression: str, shown: list[str]
) -> None:
    samples, _ = scraped
    names, labels = parse(expression)
    assert names or expression.startswith("up{"), where
    assert names <= samples.keys(), where
    known = set().union(*(samples[name] for name in names)) | ADDED
    assert labels <= known, where
    grouped = re.findall(r"\b(?:by) \(([^)]*)\)", expression)
    for label in shown:
        assert label in known, where
        assert not grouped or any(label in group for group in grouped), f"{where}: {label} was summed away"


def test_queries_are_taken_apart_rightly() -> None:
    names, labels = parse('sum by (le, kind) (rate(a:b_total{x=~"$y",z="1"}[5m])) / sum (c)')
    assert names == {"a:b_total", "c"} and labels == {"le", "kind", "x", "z"}
    assert parse("label_values(a:b, model_name)") == ({"a:b"}, {"model_name"})


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["title"] and board["uid"] and board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24 and not cells & places, panel["title"]
        places |= cells
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == [
        "Traffic", "Latency", "KV cache", "Queue", "Engine health", "HTTP"
    ]  # fmt: skip


def test_the_guide_lists_every_metric_and_no_other(scraped: tuple[Samples, dict[str, str]]) -> None:
    samples, kinds = scraped
    text = GUIDE.read_text()
    rows = dict(re.findall(r"^\| `((?:vllm:|quire:|http_)\w+)` \| (\w+) \|", text, re.MULTILINE))
    expected = {
        name + "_total" * (kind == "counter"): kind for name, kind in kinds.items() if not name.startswith("process_")
    }
    assert {name: kind for name, kind in rows.items() if name not in RARE} == expected
    for name, shown in re.findall(r"^\| `((?:vllm:|quire:|http_)\w+)` \| \w+ \| ([^|]*) \|", text, re.MULTILINE):
        if name in RARE:
            continue
        labels = set(re.findall(r"`(\w+)`", shown))
        known = set().union(*(samples[key] for key in samples if key in {name, f"{name}_bucket"})) - {"le", "engine"}
        assert labels == known - {"model_name"}, name


def test_the_example_of_prometheus_names_the_alerts() -> None:
    settings = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    assert settings["rule_files"] == [ALERTS.name]
    assert settings["scrape_configs"][0]["job_name"] == "quire"
