"""The command, the API, the metrics and the page say the same of one lake, since they come from the same functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

import floodmark as fm
import floodmark.serve
from floodmark.testing.children import run_killed
from floodmark.testing.receiver import Fault, Receiver
from tests.acceptance.test_commands import answer
from tests.acceptance.test_commands import command as shown
from tests.conftest import EVENTS, Place, rows
from tests.contract.test_http_api import asked
from tests.contract.test_jobs import start
from tests.contract.test_page_http import Seen
from tests.intake_world import SLOW, bring, intake_of, take

AGES = ("lag_ms", "oldest_ms")
TASK = {
    "name": "files drop",
    "kind": "files",
    "state": "failed",
    "every_s": 5.0,
    "failures": 3,
    "set_aside": 2,
    "last_started": None,
    "last_ended": "2026-11-16T09:00:00.000Z",
    "last_outcome": "failed",
    "next_at": None,
    "last_error": {"kind": "Unavailable", "message": "the folder is away"},
}


def append_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("events", rows(7), batch="late")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[fm.Lake, httpx.Client]]:
    """Something of everything: tables, a sink that is behind with a row in quarantine, jobs, healing, spools, tasks."""
    place = Place(str(tmp_path / "lake"), None)
    with ExitStack() as stack:
        lake = stack.enter_context(place.open(create=True, actor="test"))
        receiver = stack.enter_context(Receiver())
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("events", rows(1, 2, 3))
        lake.merge("people", rows(1, 2))
        lake.sinks.add("web", "http", tables="events", url=receiver.url + "/{table}", part_rows=1, backoff_s_max=0.01)
        receiver.script(Fault(422, when=lambda request: any(row["id"] == 2 for row in request.rows)))
        lake.sinks.run("web")
        assert run_killed(append_batch, place, failpoint="append.sealed")
        lake.recover()
        lake.catalog.jobs.progress(start(lake, "years"), 4, 9, first=True)
        with intake_of(lake) as quick:
            bring(lake, quick, "people", {"id": 3}, {"id": "bad"}, {"id": "worse"})
        intake = stack.enter_context(intake_of(lake, SLOW))
        take(lake, intake, "people", *rows(4, 5, 6))
        lake.catalog.daemon.take("http://127.0.0.1:1")
        lake.catalog.daemon.report(tasks=[TASK])
        client = stack.enter_context(asked(lake, intake=intake))
        yield lake, client
        lake.catalog.daemon.release()


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if name not in AGES}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def command(lake: fm.Lake, *words: str) -> Any:
    folder = Path(lake.location.removeprefix("file://"))
    return timeless(answer(*words, "--lake", folder.name, cwd=folder.parent))


def over_http(client: httpx.Client, path: str) -> Any:
    found = client.get(path)
    assert found.status_code == 200, found.text
    return timeless(found.json())


def scrape(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Samples by their name and their one label."""
    return {
        (sample.name.removeprefix("floodmark_"), ",".join(sample.labels.values())): sample.value
        for family in parse(client.get("/metrics").text)
        for sample in family.samples
    }


def check_agreement(lake: fm.Lake, client: httpx.Client) -> dict[str, Any]:
    status: dict[str, Any] = command(lake, "status")
    whole = over_http(client, "/api/overview")
    assert over_http(client, "/api/status") == status == whole["status"]
    assert over_http(client, "/readyz") == {"ready": True, "health": status["health"]}
    for path, words, name in (
        ("tables", ("tables",), "tables"),
        ("sinks", ("sink", "status"), "sinks"),
        ("jobs", ("backfill", "list", "--all"), "jobs"),
        ("audit", ("audit",), "audit"),
        ("commits", ("history", "--limit", "50"), "commits"),
    ):
        assert over_http(client, f"/api/{path}") == command(lake, *words) == {name: whole[name]}, path
    assert over_http(client, "/api/spools") == command(lake, "spool", "list") == {"spools": status["spools"]}
    assert over_http(client, "/api/tables/people") == command(lake, "show", "people")
    check_metrics(scrape(client), whole)
    check_page(Seen(client.get("/").text).figures, whole)
    return status


def check_metrics(found: dict[tuple[str, str], float], whole: dict[str, Any]) -> None:
    status = whole["status"]
    assert found["lake_version", ""] == found["commits_total", ""] == status["version"]
    assert found["quarantined_rows", ""] == status["quarantined"]
    assert (found["healthy", ""], found["ready", ""]) == (status["health"] == "fine", not status["blocking"])
    assert {label: value for (name, label), value in found.items() if name == "recovered_total"} == status["recovered"]
    for table in whole["tables"]:
        for name in ("rows", "files", "bytes", "small_files"):
            assert found[f"table_{name}", table["table"]] == table[name]
    for sink in status["sinks"]:
        assert found["sink_lag_rows", sink["sink"]] == sink["lag_rows"]
        assert found["sink_quarantined_rows", sink["sink"]] == sink["quarantined"]
    for sink in whole["sinks"]:
        assert found["sink_units_total", sink["sink"]] == sum(one["units"] for one in sink["tables"])
    for spool in status["spools"]:
        for name in ("waiting_records", "waiting_rows", "waiting_bytes"):
            assert found[f"spool_{name}", spool["table"]] == spool[name]
        assert found["spool_fed_rows_total", spool["table"]] == spool["fed_rows"]
        assert found["spool_quarantined_rows", spool["table"]] == spool["quarantined"]
    for job in status["jobs"]:
        assert (found["job_processed", job["job"]], found["job_wanted", job["job"]]) == (job["processed"], job["total"])
        assert found["jobs", job["status"]] == sum(one["status"] == job["status"] for one in status["jobs"])
    for task in status["daemon"]["tasks"]:
        assert found["task_failures", task["name"]] == task["failures"]
        assert found["task_files_set_aside", task["name"]] == task["set_aside"]


def check_page(figures: dict[tuple[str, str], str], whole: dict[str, Any]) -> None:
    status = whole["status"]
    for name in ("rows", "tables", "files", "bytes", "version", "quarantined"):
        assert figures[name, ""] == str(status[name])
    for table in whole["tables"]:
        for name in ("rows", "files", "bytes", "waiting_rows"):
            assert figures[name, table["table"]] == str(table[name])
    for sink in status["sinks"]:
        assert figures["lag_rows", sink["sink"]] == str(sink["lag_rows"])
        assert figures["sink_quarantined", sink["sink"]] == str(sink["quarantined"])
    for spool in status["spools"]:
        assert figures["spool_waiting_rows", spool["table"]] == str(spool["waiting_rows"])
        assert figures["spool_fed_rows", spool["table"]] == str(spool["fed_rows"])
        assert figures["spool_quarantined", spool["table"]] == str(spool["quarantined"])


def check_text(lake: fm.Lake) -> None:
    folder = Path(lake.location.removeprefix("file://"))
    text = shown("status", "--lake", folder.name, cwd=folder.parent).stdout
    fields = {line.split()[0]: line.split(None, 1)[1] for line in text.splitlines() if len(line.split()) > 1}
    assert fields["spools"].startswith("people waiting, 3 rows waiting, the oldest for ")
    assert fields["spools"].endswith(", 2 in quarantine")
    assert fields["daemon"].startswith("running on ")
    last = "last failed 2026-11-16T09:00:00.000Z (FAILED 3 times: Unavailable: the folder is away)"
    assert f"files drop failed, {last}" in text


def test_all_answers_agree_and_go_on_agreeing_when_something_changes(world: tuple[fm.Lake, httpx.Client]) -> None:
    lake, client = world
    status = check_agreement(lake, client)
    assert (status["rows"], status["quarantined"], status["recovered"]) == (7, 3, {"rolled_forward": 1})
    assert [(one["table"], one["waiting_rows"], one["quarantined"]) for one in status["spools"]] == [("people", 3, 2)]
    assert [(one["sink"], one["lag_rows"], one["quarantined"]) for one in status["sinks"]] == [("web", 1, 1)]
    assert status["health"] == (
        "attention: task files drop failed (Unavailable, 3 times), 2 bad files of files drop, "
        "2 rows in quarantine of table people, 1 row in quarantine of sink web; see `floodmark status` and "
        "`floodmark spool quarantine list people` and `floodmark sink quarantine list web`"
    )
    check_text(lake)
    lake.append("events", rows(8, 9))
    lake.sinks.drop("web")
    lake.backfill.cancel("years")
    lake.catalog.daemon.report(tasks=[{**TASK, "state": "waiting", "failures": 0, "set_aside": 0, "last_error": None}])
    later = check_agreement(lake, client)
    assert (later["rows"], later["quarantined"], later["version"]) == (9, 2, status["version"] + 1)
    assert later["sinks"][0]["lag_rows"] == 3
    assert later["health"].startswith("attention: 2 rows in quarantine of table people; see")


def test_nobody_but_the_report_asks_the_catalog_for_what_is_shown() -> None:
    """Whoever shows something gets it from the report: a query of one's own would be a second truth."""
    folder = Path(floodmark.serve.__path__[0])
    shown = [folder / "http" / f"{name}.py" for name in ("api", "events", "metrics")]
    shown += [folder / "page" / f"{name}.py" for name in ("handlers", "content")]
    shown += [folder.parent / "report" / "overview.py", folder.parent / "cli" / "state.py"]
    for path in shown:
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not {name for name in names if name.startswith("sqlalchemy") or name == "floodmark.catalog.tables"}, path
