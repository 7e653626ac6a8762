"""The metrics page and the Grafana dashboard name the server's series: all of them, and no others."""

import itertools
import json
import re
from pathlib import Path

import pytest
from quick import loop

from nextn.decoding.records import SequenceRound
from nextn.serve.metrics import ServerMetrics
from nextn.serve.request import EngineStats, GenerationChunk

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "reference" / "metrics.md").read_text()
DASHBOARD = json.loads((DOCS / "assets" / "grafana-nextn.json").read_text())
NAME = re.compile(r"nextn:[a-z0-9_]+")


@pytest.fixture(scope="module")
def series():
    """Sample names of a server that has seen a request and an error -> their labels."""
    metrics = ServerMetrics("tiny", lambda: EngineStats(1, 2, 3, 4, 5, 6, 7, 8))
    one = SequenceRound(0, (1, 2), 1, (1, 3), "eos")
    copied = SequenceRound(0, (1, 2), 1, (1, 3), "eos", copied=True)
    metrics.observe(GenerationChunk("x", (one, copied), finish="eos"), since_submitted=0.1, since_chunk=0.1)
    metrics.count_error(400)
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        name, _, labels = line.partition(" ")[0].partition("{")
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def base(name):
    """Without the suffix of a histogram's samples."""
    return re.sub("_(bucket|sum|count|created)$", "", name)


def expressions():
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*panels, *re.findall(r"`([^`]*rate\([^`]*)`", PAGE)]


def test_the_page_lists_every_series(series):
    listed = set(re.findall(r"^\| `(nextn:[a-z_0-9]+)` \|", PAGE, re.MULTILINE))
    assert listed == {base(name) for name in series if not name.endswith("_created")}


def test_the_types_and_labels_of_the_page(series):
    """The third cell has the labels beside model_name."""
    rows = re.findall(r"^\| `(nextn:\w+)` \| (\w+) \| ([^|]*)\|", PAGE, re.MULTILINE)
    for name, kind, labels in rows:
        samples = [each for each in series if base(each) == name and not each.endswith("_created")]
        own = set().union(*(series[each] for each in samples)) - {"model_name", "le"}
        assert set(re.findall(r"`(\w+)`", labels)) == own, name
        assert kind == ("histogram" if len(samples) > 1 else "counter" if name.endswith("_total") else "gauge")


@loop("expression", expressions())
def test_queries_name_series_and_labels_that_exist(expression, series):
    names = NAME.findall(expression)
    assert names
    assert set(names) <= set(series)
    labels = {label for name in names for label in series[name]}
    used = re.findall(r'(\w+)=~?"', expression) + re.findall(r"(?:by|ignoring) \(?\((\w+)\)", expression)
    assert set(used) <= labels
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_shows_every_series(series):
    shown = {base(name) for panel in DASHBOARD["panels"] for t in panel["targets"] for name in NAME.findall(t["expr"])}
    assert shown == {base(name) for name in series if not name.endswith("_created")}


def test_the_dashboard_can_be_imported():
    """The fields that Grafana requires; panels have unique ids and do not overlap."""
    assert DASHBOARD["schemaVersion"] >= 36
    assert {"uid", "title", "panels", "templating", "time"} <= set(DASHBOARD)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    ids, cells = set(), set()
    for panel in DASHBOARD["panels"]:
        assert {"id", "type", "title", "description", "gridPos", "targets", "fieldConfig", "options"} <= set(panel)
        assert panel["datasource"]["uid"] == "${datasource}"
        ids.add(panel["id"])
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        area = set(itertools.product(range(x, x + width), range(y, y + height)))
        assert not area & cells
        assert x + width <= 24
        cells |= area
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
    assert len(ids) == len(DASHBOARD["panels"])
