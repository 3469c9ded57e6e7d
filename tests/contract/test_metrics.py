"""/metrics as Prometheus reads it: names, types, figures, bounded labels, and what it says when the state is away."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse
from sqlalchemy import text

import floodmark as fm
from floodmark.report.overview import overview
from floodmark.serve.http import metrics
from floodmark.serve.http.metrics import OTHERS, Metrics, lake_families
from tests.conftest import Place, rows
from tests.contract.test_http_api import asked, make_lake

OPEN = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        make_lake(lake)
        yield lake


@pytest.fixture
def client(lake: fm.Lake) -> Iterator[httpx.Client]:
    with asked(lake) as client:
        yield client


def scrape(client: httpx.Client) -> dict[str, float]:
    """Every sample by its name and labels, as they are written."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in parse(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, "twice"
            found[name] = sample.value
    return found


def test_the_lake_in_figures(lake: fm.Lake, client: httpx.Client) -> None:
    found = scrape(client)
    status = lake.status()
    assert found["floodmark_state_readable"] == found["floodmark_ready"] == 1
    assert found["floodmark_healthy"] == 0, "a job has failed"
    assert found["floodmark_lake_version"] == found["floodmark_commits_total"] == status["version"]
    assert found["floodmark_table_rows{table=events}"] == 5
    assert found["floodmark_table_rows{table=people}"] == 2
    assert found["floodmark_table_files{table=events}"] == found["floodmark_table_small_files{table=events}"] == 2
    assert found["floodmark_table_index_segments{table=people}"] == 1
    assert found["floodmark_table_index_segments{table=events}"] == 0
    assert found["floodmark_table_index_broken_segments{table=people}"] == 0
    assert found["floodmark_table_index_bytes{table=people}"] == lake.indexes.status("people")[0].bytes
    assert found["floodmark_sink_lag_rows{sink=out}"] == 2
    assert found["floodmark_sink_lag_seconds{sink=out}"] > 0
    assert found["floodmark_sink_rows_total{sink=out}"] == 5
    assert found["floodmark_sink_units_total{sink=out}"] == 2
    assert found["floodmark_rows_committed_total{change=added,table=events}"] == 5
    assert {name: value for name, value in found.items() if name.startswith("floodmark_jobs{") and value} == {
        "floodmark_jobs{state=failed}": 1,
        "floodmark_jobs{state=running}": 1,
    }
    assert (found["floodmark_job_processed{job=years}"], found["floodmark_job_wanted{job=years}"]) == (4, 9)
    assert (found["floodmark_daemon_alive"], found["floodmark_quarantined_rows"]) == (0, 0)


def test_names_and_types_follow_the_conventions(client: httpx.Client) -> None:
    client.get("/api/status")
    for family in parse(client.get("/metrics").text):
        assert re.fullmatch(r"floodmark_[a-z_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert family.type in ("gauge", "counter", "histogram"), family.name
        if family.type == "gauge":
            assert not family.name.endswith(("_total", "_count", "_sum")), family.name
    # The strict parser of the other format refuses what does not fit it.
    answer = client.get("/metrics", headers={"Accept": OPEN})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert len(list(parse_open(answer.text))) > 30


def test_every_metric_is_in_the_docs_with_its_type(lake: fm.Lake) -> None:
    lake.catalog.daemon.take(None)
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    listed = dict(re.findall(r"^\| `(floodmark_\w+)` \| (\w+) \|", page, flags=re.MULTILINE))
    with asked(lake) as client:
        found = {
            f"{family.name}_total" if family.type == "counter" else family.name: family.type
            for family in parse(client.get("/metrics").text)
        }
    assert found == listed


def test_requests_are_counted_by_route_never_by_path(client: httpx.Client) -> None:
    for path in ("/api/tables/events", "/api/tables/people", "/api/tables/nobody", "/no/such/place", "/api/status"):
        client.get(path)
    client.request("BREW", "/api/status")
    found = scrape(client)
    assert found["floodmark_http_requests_total{method=GET,route=/api/tables/{table},status=200}"] == 2
    assert found["floodmark_http_requests_total{method=GET,route=/api/tables/{table},status=404}"] == 1
    assert found["floodmark_http_request_seconds_count{method=GET,route=/api/status}"] == 1
    assert not any("nobody" in name or "/no/such" in name or "BREW" in name for name in found)


def test_rows_are_counted_for_a_bounded_number_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.serve.http.metrics.LABELS_MAX", 2)
    metrics = Metrics()
    for table in ("a", "b", "c", "d", "a"):
        metrics.accepted(table, 10)
    samples = [one for family in metrics.collect() for one in family.samples if one.name.endswith("accepted_total")]
    assert {one.labels["table"]: one.value for one in samples} == {"a": 20, "b": 10, OTHERS: 20}


def test_tables_beyond_the_bound_are_one_series(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LABELS_MAX", 1)
    found = {family.name: family for family in lake_families(overview(lake.catalog), True)}
    shown = {one.labels["table"]: one.value for one in found["floodmark_table_rows"].samples}
    assert shown == {"events": 5, OTHERS: 2}, "the largest have their own"
    assert metrics.LABELS_MAX == 1


def test_rows_of_a_commit_are_counted_once_and_add_up(lake: fm.Lake, client: httpx.Client) -> None:
    name = "floodmark_rows_committed_total{change=added,table=events}"
    before = scrape(client)[name]
    lake.append("events", rows(6, 7, 8))
    assert [scrape(client)[name] - before for _ in range(2)] == [3, 3]


def test_without_the_state_nothing_is_said_of_the_lake_but_that(lake: fm.Lake, client: httpx.Client) -> None:
    client.get("/api/status")
    with lake.catalog.database.write() as tx:
        tx.execute(text("ALTER TABLE fm_heads RENAME TO away"))
    found = scrape(client)
    assert (found["floodmark_state_readable"], found["floodmark_ready"]) == (0, 0)
    assert found["floodmark_http_requests_total{method=GET,route=/api/status,status=200}"] == 1
    others = [name for name in found if not name.startswith(("floodmark_http_", "floodmark_event_"))]
    assert sorted(others) == ["floodmark_ready", "floodmark_state_readable"]
