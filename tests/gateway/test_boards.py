"""The Grafana board and Prometheus' rules ask for metrics and labels that a gateway and an engine really show."""

import asyncio
import json
import re
from importlib.resources import files
from typing import Any

import httpx
import pytest

from tests.engine.fake_model import fake_model
from tests.engine.serving import complete, serving
from tests.gateway.running import running_gateway

BOARD = files("dashboards") / "grafana" / "farthing.json"
RULES = files("dashboards") / "prometheus" / "farthing.rules.yaml"
SCRAPE_LABELS = {"instance", "job"}
"""That Prometheus adds."""


def board_queries() -> list[str]:
    board = json.loads(BOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])] + [
        variable["definition"].replace('{__name__=~"', "").replace('"}', "")
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]


def asked(query: str) -> dict[str, set[str]]:
    """Metrics that a query names -> labels that it matches."""
    found: dict[str, set[str]] = {}
    for name, matchers in re.findall(r"\b(farthing_[a-z_]+)(?:\{([^}]*)\})?", query):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    return found


def added_up_by(query: str) -> set[str]:
    return {label for each in re.findall(r"\bby \(([^)]*)\)", query) for label in re.split(r",\s*", each)}


def shown(text: str) -> dict[str, set[str]]:
    """Metrics of Prometheus' text format -> their labels."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(farthing_[a-z_]+)(?:\{(.*)\})? ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def values(text: str, label: str) -> set[str]:
    return set(re.findall(rf'\b{label}="([^"]*)"', text))


def engine_metrics() -> str:
    with serving(fake_model()) as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert complete(http, "hello").status_code == 200
        return http.get("/metrics").text


@pytest.fixture
async def metrics(settings: dict[str, Any]) -> str:
    """Of a gateway and an engine that have answered."""
    settings["models"]["tiny"]["response_cache"] = {"seconds": 60}
    async with running_gateway(settings) as gateway:
        for changes in ({}, {"stream": True}, {"model": "nobody"}):
            await gateway.chat(**changes)
        of_gateway = (await gateway.http.get("/metrics")).text
    return of_gateway + await asyncio.to_thread(engine_metrics)


async def test_every_metric_and_label_that_is_asked_for_is_shown(metrics: str) -> None:
    there = shown(metrics)
    queries = [*board_queries(), *re.findall(r"expr: (>-(?:\n {10,}.*)+|.*)", RULES.read_text())]
    assert len(queries) > 40
    for query in queries:
        wanted = asked(query)
        assert wanted
        for name, labels in wanted.items():
            assert name in there, f"nobody shows {name}: {query}"
            assert labels <= there[name] | SCRAPE_LABELS, f"{name} has other labels: {query}"
        assert added_up_by(query) <= set().union(SCRAPE_LABELS, *(there[name] for name in wanted)), query


async def test_every_value_that_is_asked_for_exists(metrics: str) -> None:
    text = BOARD.read_text().replace('\\"', '"') + RULES.read_text()
    assert values(text, "token_class") - {"input_.*"} <= {"input_cached"} <= values(metrics, "token_class")
    assert values(text, "state") <= values(metrics, "state")
    assert values(text, "status") <= {"ok", "client_closed", "upstream_error", "refused", "invalid"}
