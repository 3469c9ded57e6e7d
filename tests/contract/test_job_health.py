"""Health fails closed: jobs that cannot be read are not ready, failed ones need attention, here and over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import text, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.jobs import CANCELLED, DONE, FAILED, SHOWN_MS, HeldJob
from floodmark.report.jobs import TROUBLES_MAX
from floodmark.serve.http import workers
from floodmark.serve.http.access import new_token, token_hash
from floodmark.testing.children import run_child, run_killed
from tests.conftest import Place, ids, rows
from tests.contract.test_jobs import find, now_ms, set_job, start, start_and_die
from tests.contract.test_receive_http import lines, post, served, told

pytestmark = pytest.mark.mostly_sqlite

ERROR = {"kind": "Unavailable", "message": "the source is away", "facts": {}, "advice": "", "exit_code": 4}


def fail(lake: fm.Lake, name: str = "years") -> None:
    lake.catalog.jobs.end(start(lake, name), FAILED, 3, 9, ERROR)


def health(lake: fm.Lake) -> str:
    return str(lake.status()["health"])


def drop_jobs(lake: fm.Lake) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(text("DROP TABLE fm_jobs"))


def spoil_spec(lake: fm.Lake) -> None:
    set_job(lake, spec="{")


def spoil_time(lake: fm.Lake) -> None:
    set_job(lake, updated_ms=2**62)


UNREADABLE = pytest.mark.parametrize("spoil", [drop_jobs, spoil_spec, spoil_time], ids=lambda spoil: spoil.__name__)


# ── status ──


def test_jobs_at_work_are_shown_and_well(lake: fm.Lake) -> None:
    held = start(lake)
    lake.catalog.jobs.progress(held, 3, 9, first=True)
    status = lake.status()
    (job,) = status["jobs"]
    assert (job["job"], job["status"], job["processed"], job["total"]) == ("years", "running", 3, 9)
    assert (status["jobs_error"], status["health"]) == (None, "fine")
    assert "settings" not in job, "in short"
    lake.catalog.jobs.end(held, DONE, 9, 9)
    assert (lake.status()["jobs"], health(lake)) == ([], "fine")


@pytest.mark.parametrize("state", [DONE, CANCELLED])
def test_jobs_that_ended_as_somebody_wanted_are_not_shown(lake: fm.Lake, state: str) -> None:
    lake.catalog.jobs.end(start(lake), state, 9, 9)
    assert (lake.status()["jobs"], health(lake)) == ([], "fine")


def test_a_failed_job_needs_attention_until_it_is_acknowledged(lake: fm.Lake) -> None:
    fail(lake)
    assert health(lake) == "attention: job years failed (Unavailable); see `floodmark backfill list`"
    assert lake.status()["jobs"][0]["error"] == ERROR
    lake.backfill.ack("years")
    assert (lake.status()["jobs"], health(lake)) == ([], "fine")


def test_a_failed_job_needs_attention_until_ten_minutes_after_its_end(lake: fm.Lake) -> None:
    fail(lake)
    set_job(lake, ended_ms=now_ms(lake) - SHOWN_MS + 60_000)
    assert health(lake).startswith("attention: job years failed")
    set_job(lake, ended_ms=now_ms(lake) - SHOWN_MS)
    assert (lake.status()["jobs"], health(lake)) == ([], "fine")


def test_a_failed_job_without_an_end_time_needs_attention_for_ever(lake: fm.Lake) -> None:
    fail(lake)
    set_job(lake, ended_ms=None, created_ms=0, started_ms=0, updated_ms=0)
    assert health(lake).startswith("attention: job years failed")


def test_a_failed_job_whose_error_is_gone_still_needs_attention(lake: fm.Lake) -> None:
    fail(lake)
    set_job(lake, error=None)
    assert health(lake).startswith("attention: job years failed (unknown)")


def test_an_interrupted_job_needs_attention_until_somebody_goes_on(place: Place, lake: fm.Lake) -> None:
    assert run_killed(start_and_die, place, failpoint="job.held")
    assert health(lake) == "attention: job years interrupted; see `floodmark backfill list`"
    assert lake.status()["jobs"][0]["holder"] is None
    lake.catalog.jobs.end(start(lake), DONE, 9, 9)
    assert health(lake) == "fine"


def test_an_unknown_state_is_shown_as_unknown_and_needs_attention(lake: fm.Lake) -> None:
    lake.catalog.jobs.end(start(lake), DONE, 9, 9)
    set_job(lake, state="paused")
    assert [job["status"] for job in lake.status()["jobs"]] == ["unknown"]
    assert health(lake) == "attention: job years in an unknown state (paused); see `floodmark backfill list`"


def test_many_troubles_are_counted_and_stand_beside_others(lake: fm.Lake) -> None:
    for number in range(TROUBLES_MAX + 2):
        fail(lake, f"job {number}")
    lake.sinks.add("out", "files", tables="events", path="nowhere")
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.sinks).values(error='{"kind": "Corrupt", "message": "x"}', error_ms=1))
    said = health(lake)
    assert said.startswith("attention: sink out refused (Corrupt), job job 6 failed (Unavailable), ")
    assert said.endswith(", 2 more jobs; see `floodmark sink status` and `floodmark backfill list`")


@UNREADABLE
def test_jobs_that_cannot_be_read_are_not_ready_and_the_rest_is_told(
    lake: fm.Lake, spoil: Callable[[fm.Lake], None]
) -> None:
    lake.append("events", rows(1, 2))
    fail(lake)
    spoil(lake)
    status = lake.status()
    assert (status["jobs"], status["rows"], status["tables"]) == (None, 2, 2)
    assert status["jobs_error"]
    assert "\n" not in status["jobs_error"]
    assert status["health"] == f"not ready: jobs cannot be read ({status['jobs_error']})"
    assert ("years" if spoil is spoil_spec else "fm_jobs" if spoil is drop_jobs else "year") in status["jobs_error"]


def append_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("events", rows(7), batch="late")


def test_what_else_is_wrong_is_said_after_it(place: Place, lake: fm.Lake) -> None:
    assert run_killed(append_batch, place, failpoint="append.sealed")
    start(lake)
    spoil_spec(lake)
    assert health(lake).startswith("not ready: jobs cannot be read (")
    assert "; recovery pending: 1 dead operation(s); " in health(lake)


# ── over HTTP ──


@pytest.fixture
def client(lake: fm.Lake) -> Iterator[httpx.Client]:
    with served(lake) as client:
        yield client


def ready(client: httpx.Client, status: int) -> Any:
    answer = client.get("/readyz")
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_lake_that_is_well_or_needs_attention_is_ready(lake: fm.Lake, client: httpx.Client) -> None:
    assert ready(client, 200) == {"ready": True, "health": "fine"}
    fail(lake)
    assert ready(client, 200) == {"ready": True, "health": health(lake)}
    assert "attention: job years failed" in health(lake)


@UNREADABLE
def test_a_lake_whose_jobs_cannot_be_read_is_not_ready_and_alive(
    lake: fm.Lake, client: httpx.Client, spoil: Callable[[fm.Lake], None]
) -> None:
    fail(lake)
    spoil(lake)
    answer = ready(client, 503)
    assert answer == {"ready": False, "health": health(lake), "reasons": [health(lake)]}
    assert answer["health"].startswith("not ready: jobs cannot be read (")
    assert client.get("/readyz").headers["Retry-After"]
    assert client.get("/healthz").json() == {"status": "ok"}
    assert told(client.get("/api/jobs"), client.get("/api/jobs").status_code)
    assert client.get("/api/jobs").status_code in (500, 503), "no jobs is another answer"


def test_a_lake_that_refuses_writes_is_not_ready(lake: fm.Lake, client: httpx.Client) -> None:
    lake.append("events", rows(1))
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.operations).values(state="strange", cleaned=0))
    assert ready(client, 503)["health"].startswith("refused: ")


def test_a_state_that_cannot_be_read_is_not_ready(lake: fm.Lake, client: httpx.Client) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(text("ALTER TABLE fm_heads RENAME TO away"))
    answer = ready(client, 503)
    assert (answer["ready"], answer["health"]) == (False, f"not ready: {answer['reasons'][0]}")
    assert answer["reasons"][0].startswith("the lake's state cannot be read (")
    with lake.catalog.database.write() as tx:
        tx.execute(text("ALTER TABLE away RENAME TO fm_heads"))
    assert ready(client, 200)["ready"]


def test_a_question_without_an_answer_in_time_is_not_ready(
    lake: fm.Lake, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ANSWER_S_MAX", 0.05)
    over = threading.Event()
    real = lake.health
    lake.health = lambda: (over.wait(30), real())[1]  # type: ignore[method-assign]
    try:
        # As many as there are threads, and more: every one is answered.
        for _ in range(workers.ASKERS + 2):
            assert "no answer in time" in ready(client, 503)["health"]
        # Writers have threads of their own.
        assert post(client, lines(rows(1))).status_code == 200
    finally:
        over.set()
        lake.health = real  # type: ignore[method-assign]


def test_jobs_over_http_are_those_of_the_list(place: Place, lake: fm.Lake, client: httpx.Client) -> None:
    assert client.get("/api/jobs").json() == {"jobs": []}
    fail(lake)
    lake.catalog.jobs.end(start(lake, "done"), DONE, 9, 9)
    run_child(start_and_die_as, place, "dead")
    jobs = client.get("/api/jobs").json()["jobs"]
    assert jobs == lake.backfill.list()
    assert {job["job"]: job["status"] for job in jobs} == {"years": "failed", "done": "done", "dead": "interrupted"}


def start_and_die_as(place: Place, name: str) -> None:
    with place.open() as lake:
        start(lake, name)
        lake.close = lambda: None  # type: ignore[method-assign]


def cancel(client: httpx.Client, job: str, **headers: str) -> httpx.Response:
    return client.post(f"/api/jobs/{job}/cancel", headers=headers)


def test_a_job_is_cancelled_over_http_by_id_or_name(place: Place, lake: fm.Lake, client: httpx.Client) -> None:
    held: HeldJob = start(lake)
    answer = cancel(client, held.id).json()
    assert (answer["outcome"], answer["cancel_asked"], answer["status"]) == ("asked", True, "running")
    assert lake.catalog.jobs.wants_cancel(held)
    lake.catalog.jobs.end(held, CANCELLED, 3, 9)
    assert cancel(client, "years").json()["outcome"] == "nothing_to_do"
    run_child(start_and_die_as, place, "dead")
    answer = cancel(client, "dead").json()
    assert (answer["outcome"], answer["status"], answer["id"]) == ("cancelled", "cancelled", find(lake, "dead").id)
    assert told(cancel(client, "nobody"), 404)["kind"] == "NotFound"


def test_cancelling_over_http_needs_the_token(lake: fm.Lake) -> None:
    held, token = start(lake), new_token()
    with served(lake, token_sha256=token_hash(token)) as client:
        assert told(cancel(client, held.id), 401)["kind"] == "Unauthorized"
        assert told(cancel(client, held.id, Authorization="Bearer wrong"), 401)
        assert not lake.catalog.jobs.wants_cancel(held)
        # So does looking, since settings tell paths and expressions; whether it is ready may be asked by anybody.
        known = {"Authorization": f"Bearer {token}"}
        assert told(client.get("/api/jobs"), 401)
        assert client.get("/api/jobs", headers=known).json()["jobs"][0]["id"] == held.id
        assert client.get("/readyz").status_code == 200
        assert cancel(client, held.id, Authorization=f"Bearer {token}").json()["outcome"] == "asked"
    assert lake.catalog.jobs.wants_cancel(held)


def test_a_page_of_a_browser_cannot_cancel_without_a_token(lake: fm.Lake, client: httpx.Client) -> None:
    held = start(lake)
    assert told(cancel(client, held.id, Origin="http://elsewhere"), 403)
    assert not lake.catalog.jobs.wants_cancel(held)
    assert ids(lake) == []
