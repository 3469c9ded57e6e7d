"""Questions over HTTP, at a real socket: what each answer is, in its promised shape, and who gets it."""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from sqlalchemy import text, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.jobs import DONE, FAILED
from floodmark.ingest.intake import Intake
from floodmark.json_form import as_json
from floodmark.lookups import FoundRows
from floodmark.report.health import Health
from floodmark.report.jobs import JobReport
from floodmark.report.overview import Overview, overview
from floodmark.report.status import Status
from floodmark.report.tables import TableDetails
from floodmark.serve.app import create_app
from floodmark.serve.http.access import Access, AccessToken, token_hash
from floodmark.serve.http.api import Alive, AuditList, ChangedJob, CommitList, JobList, SinkList, SpoolList, TableList
from floodmark.serve.http.readiness import Ready
from floodmark.serve.http.server import Server, bound
from floodmark.serve.http.service import Service
from floodmark.serve.http.timeseries import STEPS, Figures, RecentFigures
from floodmark.settings.settings import MaintainSettings
from tests.conftest import EVENTS, Place, rows
from tests.contract.test_jobs import find, set_job, start
from tests.history_world import Numbers, history, run
from tests.intake_world import bring, intake_of

ERROR = {"kind": "Unavailable", "message": "the source is away", "facts": {}, "advice": "", "exit_code": 4}
TOKENS = [AccessToken(role, token_hash(f"the {role} token"), role) for role in ("read", "write", "admin")]


@contextmanager
def asked(lake: fm.Lake, *, tokens: bool = False, **options: Any) -> Iterator[httpx.Client]:
    """A client of a server of this lake, which runs in a thread of this process."""
    address: queue.Queue[str] = queue.Queue()
    app = create_app(Service(lake, Access(TOKENS if tokens else ()), **options))
    with bound("127.0.0.1:0") as listening:
        server = Server(app, listening, address.put, grace_s=10)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            with httpx.Client(base_url=address.get(timeout=30), timeout=60) as client:
                client.app, client.stop = app, server.stop  # type: ignore[attr-defined]
                yield client
        finally:
            server.stop()
            thread.join(30)
            assert not thread.is_alive()
            assert app.state.workers.close(10)


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer the {role} token"}


def make_lake(lake: fm.Lake) -> None:
    """Two tables, a sink that is behind, a job that failed and one that is at work."""
    lake.create_table("events", EVENTS)
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("events", rows(1, 2, 3), message="first")
    lake.merge("people", rows(1, 2))
    lake.sinks.add("out", "files", tables=["events", "people"], path=f"{lake.location}-out")
    lake.sinks.run("out")
    lake.append("events", rows(4, 5))
    lake.catalog.jobs.end(start(lake, "failed"), FAILED, 3, 9, ERROR)
    lake.catalog.jobs.end(start(lake, "over"), DONE, 9, 9)
    lake.catalog.jobs.progress(start(lake, "years"), 4, 9, first=True)


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        make_lake(lake)
        yield lake


@pytest.fixture
def client(lake: fm.Lake) -> Iterator[httpx.Client]:
    with asked(lake) as client:
        yield client


def got(client: httpx.Client, path: str, shape: type | None = None, status: int = 200) -> Any:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    if shape is not None:
        in_shape(shape, answer.content)
    return answer.json()


def in_shape(shape: type, text: bytes | str) -> None:
    """Every field is there, of its type, and no other."""
    TypeAdapter(shape).validate_json(text, strict=True)


def told(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) >= {"kind", "message", "facts", "advice"}
    return error


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


# ── what is answered ──


def test_every_answer_is_that_of_the_lake_in_its_shape(lake: fm.Lake, client: httpx.Client) -> None:
    status = got(client, "/api/status", Status)
    assert _timeless(status) == _timeless(plain(lake.status()))
    assert (status["tables"], status["rows"], status["quarantined"], status["blocking"]) == (2, 7, 0, [])
    assert got(client, "/api/tables", TableList) == {"tables": plain(lake.tables())}
    assert got(client, "/api/tables/events", TableDetails) == plain(lake.show("events"))
    commits = got(client, "/api/commits", CommitList)
    assert commits == {"commits": plain([commit.as_dict() for commit in lake.history(limit=50)])}
    assert _timeless(got(client, "/api/sinks", SinkList)) == _timeless({"sinks": plain(lake.sinks.status())})
    assert got(client, "/api/jobs", JobList) == {"jobs": plain(lake.backfill.list())}
    assert got(client, "/api/jobs/years", JobReport) == plain(lake.backfill.show("years"))
    assert got(client, "/api/audit", AuditList) == {"audit": []}
    assert got(client, "/api/spools", SpoolList) == {"spools": []}
    assert got(client, "/healthz", Alive) == {"status": "ok"}
    whole = got(client, "/api/overview", Overview)
    assert _timeless(whole["status"]) == _timeless(status)
    assert (whole["tables"], whole["commits"]) == (plain(lake.tables()), commits["commits"])
    assert [job["job"] for job in whole["jobs"]] == ["years", "over", "failed"]


def _timeless(value: Any) -> Any:
    """Without ages: they grow between two questions."""
    if isinstance(value, dict):
        return {name: _timeless(one) for name, one in value.items() if name not in ("lag_ms", "oldest_ms")}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def test_the_overview_has_its_shape_on_every_database(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        make_lake(lake)
        found = plain(as_json(overview(lake.catalog)))
        in_shape(Overview, json.dumps(found))
        assert (found["status"]["rows"], found["tables"][0]["rows"], len(found["commits"])) == (7, 5, 5)
        assert Figures(lake.catalog).totals()["events", "added"] == 5


def test_commits_come_in_pages_and_by_table(lake: fm.Lake, client: httpx.Client) -> None:
    first = got(client, "/api/commits?limit=2")["commits"]
    second = got(client, f"/api/commits?limit=2&before={first[-1]['version']}")["commits"]
    assert [one["version"] for one in (*first, *second)] == [5, 4, 3, 2]
    assert got(client, "/api/commits?before=1") == {"commits": []}
    people = got(client, "/api/commits?table=people")["commits"]
    assert [one["version"] for one in people] == [4, 2]
    assert got(client, "/api/commits?table=people&before=2") == {"commits": []}
    assert told(client.get("/api/commits?table=nobody"), 404)["kind"] == "NotFound"


WRONG = [
    ("/api/commits?limit=0", 400),
    ("/api/commits?limit=501", 400),
    ("/api/commits?limit=x", 400),
    ("/api/commits?before=0", 400),
    (f"/api/commits?before={2**63}", 400),
    (f"/api/commits?table={'a' * 256}", 400),
    ("/api/commits?table=%00", 404),
    ("/api/audit?limit=1001", 400),
    ("/api/tables/nobody", 404),
    ("/api/tables/%00", 404),
    ("/api/tables/..%2F..%2Fetc", 404),
    (f"/api/tables/{'a' * 300}", 400),
    ("/api/jobs/nobody", 404),
    ("/api/jobs/%00", 404),
    (f"/api/jobs/{'a' * 300}", 400),
]


def test_a_wrong_question_is_refused_in_our_words(client: httpx.Client) -> None:
    for path, status in WRONG:
        assert told(client.get(path), status)["kind"] in ("Invalid", "NotFound"), path


def test_what_is_due_follows_the_settings_of_the_server(lake: fm.Lake) -> None:
    with asked(lake, keeping=MaintainSettings(compact_files=2)) as client:
        assert got(client, "/api/tables")["tables"][0]["due"] == ["compact events: 2 small files"]
        assert "compact events: 2 small files" in got(client, "/api/status")["due"]
        assert got(client, "/api/tables/events")["due"] == ["compact events: 2 small files"]


def test_figures_know_rows_of_before_the_start_and_lag_since(lake: fm.Lake) -> None:
    figures = Figures(lake.catalog)
    found = figures.series()
    assert len(found.at_ms) == STEPS
    assert found.lag_rows == {}, "nobody has looked yet"
    figures.sample()
    lake.append("events", rows(6))
    assert figures.totals()["events", "added"] == 6
    assert figures.totals()["events", "added"] == 6, "each once"
    # As if so much time had passed that the step of the rows is over.
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.commits).values(committed_ms=tables.commits.c.committed_ms - 20_000))
    later = Figures(lake.catalog)
    later.sample()
    in_shape(RecentFigures, json.dumps(as_json(later.series())))
    rates = later.series().rows_per_s
    assert sum(value * 5 for value in rates["events"]) == 6
    assert sum(value * 5 for value in rates["people"]) == 2


def test_figures_are_sampled_by_the_server(lake: fm.Lake, client: httpx.Client) -> None:
    got(client, "/api/figures", RecentFigures)
    figures: Figures = client.app.state.figures  # type: ignore[attr-defined]
    ended = threading.Event()
    for _ in range(600):
        if figures._samples:
            ended.set()
            break
        threading.Event().wait(0.05)
    assert ended.is_set()


# ── jobs ──


def test_a_failure_is_acknowledged_over_http(lake: fm.Lake, client: httpx.Client) -> None:
    assert "attention: job failed failed" in got(client, "/api/status")["health"]
    answer = client.post(f"/api/jobs/{find(lake, 'failed').id}/acknowledge")
    in_shape(ChangedJob, answer.content)
    assert (answer.json()["outcome"], answer.json()["job"]) == ("acknowledged", "failed")
    assert got(client, "/api/status")["health"] == "fine"
    assert client.post("/api/jobs/failed/acknowledge").json()["outcome"] == "nothing_to_do"
    assert client.post("/api/jobs/years/cancel").json()["outcome"] == "asked"
    assert told(client.post("/api/jobs/nobody/acknowledge"), 404)


# ── who may ask ──


@pytest.mark.whole
def test_each_role_may_do_what_it_is_for_and_no_more(lake: fm.Lake) -> None:
    reads = ["status", "overview", "tables", "tables/events", "commits", "sinks", "jobs", "jobs/years", "audit"]
    reads += ["spools", "figures"]
    with asked(lake, tokens=True) as client:
        for path in [*(f"/api/{name}" for name in reads), "/metrics", "/api/events"]:
            assert told(client.get(path), 401)["kind"] == "Unauthorized"
            assert told(client.get(path, headers={"Authorization": "Bearer x"}), 401)
        for name in reads:
            assert client.get(f"/api/{name}", headers=bearer("read")).status_code == 200
        for verb in ("cancel", "acknowledge"):
            for role in ("read", "write"):
                assert told(client.post(f"/api/jobs/years/{verb}", headers=bearer(role)), 403)["kind"] == "Forbidden"
            assert client.post(f"/api/jobs/years/{verb}", headers=bearer("admin")).status_code == 200


def test_strangers_are_told_whether_it_is_ready_and_nothing_else(lake: fm.Lake) -> None:
    with asked(lake, tokens=True) as client:
        assert got(client, "/readyz", Ready) == {"ready": True}
        assert got(client, "/healthz") == {"status": "ok"}
        known = client.get("/readyz", headers=bearer("read")).json()
        assert known == {"ready": True, "health": lake.status()["health"]}
        set_job(lake, spec="{")
        assert got(client, "/readyz", Ready, 503) == {"ready": False}
        assert client.get("/readyz", headers=bearer("read")).json()["reasons"]


# ── ready ──


def spoil_head(lake: fm.Lake) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(text("ALTER TABLE fm_heads RENAME TO away"))


def spoil_operation(lake: fm.Lake) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.operations).values(state="strange", cleaned=0))


def spoil_pointer(lake: fm.Lake) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.iceberg_tables).values(metadata_location="file:///elsewhere"))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (partial(set_job, spec="{"), "jobs cannot be read"),
        (spoil_head, "the lake's state cannot be read"),
        (spoil_operation, "cannot be understood; see `floodmark doctor`"),
        (spoil_pointer, "events, people changed by another writer; see `floodmark repair`"),
    ],
)
def test_what_blocks_the_lake_makes_it_not_ready(
    lake: fm.Lake, client: httpx.Client, spoil: Callable[[fm.Lake], None], reason: str
) -> None:
    assert got(client, "/readyz", Ready)["ready"] is True
    spoil(lake)
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert any(reason in one for one in answer.json()["reasons"]), answer.json()


def test_a_spool_folder_that_cannot_be_written_to_makes_it_not_ready(lake: fm.Lake, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    with asked(lake, intake=Intake(lake.engine, place / "spool")) as client:
        assert got(client, "/readyz", Ready)["ready"] is True, "it will be made there"
        place.rmdir()
        place.write_text("something else is there")
        assert "is not writable" in got(client, "/readyz", Ready, 503)["reasons"][0]


def test_a_refused_spool_is_told_everywhere_and_blocks(lake: fm.Lake, client: httpx.Client) -> None:
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(7))
    assert got(client, "/readyz", Ready)["ready"] is True
    (spool,) = got(client, "/api/spools", SpoolList)["spools"]
    shutil.rmtree(spool["folder"])
    answer = got(client, "/readyz", Ready, 503)
    assert answer["reasons"] == ["refused: the spool of events; see `floodmark spool list`"]
    status = got(client, "/api/status", Status)
    assert (status["spools"][0]["state"], status["blocking"]) == ("refused", answer["reasons"])
    assert status["spools"][0]["error"]["advice"]
    events = got(client, "/api/tables", TableList)["tables"][0]
    assert events["health"] == "refused: its spool; see `floodmark spool list`"
    text = client.get("/metrics").text
    assert 'floodmark_spool_refused{table="events"} 1.0' in text
    assert "floodmark_ready 0.0" in text


def test_however_many_ask_whether_it_is_ready_one_thread_is_busy_with_it(lake: fm.Lake, client: httpx.Client) -> None:
    over, real, calls = threading.Event(), lake.health, []

    def slow() -> Health:
        calls.append(threading.current_thread())
        assert over.wait(30)
        return real()

    lake.health = slow  # type: ignore[method-assign]
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(client.get("/readyz").status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert got(client, "/api/status")["version"], "another thread is free"
    over.set()
    for thread in threads:
        thread.join(30)
    assert answers == [200] * 8
    assert len(calls) < 8


def test_rows_are_looked_up_by_key_and_by_values(lake: fm.Lake, client: httpx.Client) -> None:
    lake.create_table("lines", "n long, id string, v double", key=["id", "n"])
    before = lake.append("lines", [{"n": n, "id": f"i{n % 2}", "v": n / 2} for n in range(6)])
    shape = TypeAdapter(FoundRows)

    def find(status: int = 200, table: str = "lines", **asked: Any) -> Any:
        found = client.get(f"/api/tables/{table}/lookup", params=asked)
        assert found.status_code == status, found.text
        if status == 200:
            shape.validate_python(found.json())
        return found.json()

    assert find(key='[3, "i1"]')["rows"] == [{"n": 3, "id": "i1", "v": 1.5}]
    several = find(key=['[3,"i1"]', '["5","i1"]', '[3,"i0"]'])
    assert [row["n"] for row in several["rows"]] == [3, 5]
    assert several["not_found"] == [["3", "i0"]]
    error = find(404, key='[3,"i0"]')["error"]
    assert error["facts"] == {
        "table": "lines",
        "key": "3, i0",
        "version": str(before.version),
        "index": "key (n, id)",
        "files": "1",
        "files_scanned": "0",
    }
    page = find(id="i1", limit=2, order="n desc", columns="n")
    assert page["rows"] == [{"n": 5}, {"n": 3}]
    lake.delete("lines", "n = 1")
    assert find(id="i1", limit=2, order="n desc", columns="n", after=page["next"])["rows"] == [{"n": 1}]
    assert [row["n"] for row in find(id=["i1", "i0"], n=["1", "2"])["rows"]] == [2]
    assert find(n=1, version=before.version)["rows"][0]["id"] == "i1"
    assert find(null="v")["rows"] == []
    for status, asked in (
        (422, {"key": "x"}),
        (422, {"key": '["x","y"]'}),
        (422, {"nothing": "1"}),
        (422, {"n": "1", "after": "x"}),
        (422, {"key": "1", "n": "1"}),
        (422, {}),
        (400, {"n": "1", "limit": 0}),
        (400, {"n": "1", "limit": 1001}),
        (404, {"n": "1", "branch": "none"}),
        (404, {"n": "1", "version": 10**6}),
    ):
        find(status, **asked)
    find(404, "nothing", key="1")
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.commits).where(tables.commits.c.version == page["version"]).values(state="expired"))
    assert find(410, id="i1", limit=2, order="n desc", after=page["next"])["error"]["kind"] == "BelowRetention"


def test_a_key_that_may_still_come_is_no_404(lake: fm.Lake, client: httpx.Client) -> None:
    lake.create_table("old", "id long, name string", key=["id"])
    run(lake, history(Numbers(act={"20..30": lambda chunk: 1 / 0}), "old", name="gaps", retries=1, order="oldest"))
    assert client.get("/api/tables/old/lookup?key=7").json()["rows"] == [{"id": 7, "name": "row 7"}]
    found = client.get("/api/tables/old/lookup?key=27")
    assert (found.status_code, found.headers["Retry-After"]) == (503, "1")
    assert found.json()["error"]["kind"] == "Incomplete"
    assert found.json()["error"]["facts"]["gaps"] == "20 to 50"
