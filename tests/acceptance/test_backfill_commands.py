"""`backfill` and its parts, and what `status` says of jobs, as a person meets them.

Every command is a process of its own that has no Java to find: a history of rows in memory, and a column whose value
needs no query, are filled without Spark. One more reads files as a shell would start it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.catalog.jobs import FAILED
from floodmark.testing.children import Child, preload, run_killed
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_sink_commands import Done, answer, command, on_a_terminal, run_main
from tests.conftest import ids

preload("floodmark.cli.main", "floodmark.backfill.chunks.history", "floodmark.backfill.columns.column")

WAIT_S = 60
# A source that is away while a file says so, and that waits at a chunk while another does.
FEED = """
import os, time

def read(chunk):
    if os.path.exists(f"away-{chunk.number}"):
        raise ValueError("the source is away")
    if os.path.exists(f"wait-{chunk.number}"):
        open(f"at-{chunk.number}", "w").close()
        while os.path.exists(f"wait-{chunk.number}"):
            time.sleep(0.01)
    return [{"id": number, "name": f"row {number}"} for number in range(chunk.start, chunk.end)]

def tip():
    with open("tip") as file:
        return int(file.read())
"""
RANGE = ("--first", "0", "--last", "50", "--chunk", "10", "--column", "id")
YEARS = ("history", "years", "--table", "events", "--call", "feed:read", *RANGE, "--workers", "1", "--retries", "1")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "feed.py").write_text(FEED)
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        lake.create_table("users", "id long not null, name string", key=["id"])
    return tmp_path


def backfill(folder: Path, *arguments: str, code: int = 0) -> Done:
    return command(folder, "backfill", *arguments, code=code)


def asked(folder: Path, *arguments: str, code: int = 0) -> Any:
    return answer(folder, "backfill", *arguments, code=code)


def health(folder: Path) -> str:
    return str(answer(folder, "status")["health"])


def loaded(folder: Path) -> list[int]:
    with fm.open(folder / "lake", read_only=True) as lake:
        check_lake(lake.catalog)
        return ids(lake)


def wait_for(path: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.01)


# ── history ──


def test_a_history_is_loaded_once_and_again_there_is_nothing_to_do(made: Path) -> None:
    assert backfill(made, *YEARS).stdout == "done: years, 5 chunks, 50 rows, 5 commits in all\n"
    assert loaded(made) == list(range(50))
    again = asked(made, *YEARS)
    assert (again["outcome"], again["job"], again["status"]) == ("nothing_to_do", "years", "done")
    assert (again["processed"], again["total"], again["percent"], again["rows"]) == (5, 5, 100.0, 50)
    assert loaded(made) == list(range(50))
    assert health(made) == "fine"


def test_a_dry_run_says_what_would_be_done_and_does_nothing(made: Path) -> None:
    done = backfill(made, *YEARS, "--order", "oldest", "--dry-run")
    assert done.lines == [
        "would load 5 chunks into events; 0 of 5 are done",
        "first 0..10, 10..20, 20..30, 30..40, 40..50",
    ]
    assert asked(made, *YEARS, "--dry-run")["outcome"] == "planned"
    assert (loaded(made), asked(made, "list", "--all")) == ([], {"jobs": []})


def test_what_a_job_is_stays(made: Path) -> None:
    backfill(made, *YEARS)
    changed = [{"10": "20"}.get(one, one) for one in YEARS]
    backfill(made, *changed, code=2).says("Invalid", "another job has", "chunk size 20, was 10", "Choose another name")
    changed = [{"50": "60"}.get(one, one) for one in YEARS]
    backfill(made, *changed, code=2).says("Invalid", "last 60, was 50")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("--path", "x/{start}.jsonl"), ("one source", "--from-table")),
        (("--step", "5"), ("--step needs --path",)),
        (("--range-column", "id"), ("--from-table and --range-column need each other",)),
        (("--table", "events=select * from chunk"), ("named twice", "table=events")),
        (("--table", "=select 1"), ("invalid table",)),
        (("--table", "nowhere"), ("nowhere",)),
        (("--order", "best"), ("newest or oldest",)),
        (("--tip", "now"), ("no tip by the clock",)),
        (("--call", "feed:nothing"), ("cannot be imported", "feed:nothing")),
        (("--chunk", "1d"), ("whole number",)),
        (("--rows-min", "5", "--rows-max", "4"), ("rows_min=5",)),
        (("--keep", "0"), ("keep=0",)),
    ],
    ids=lambda value: value[0].strip("-") if value[0].startswith("--") else "",
)
def test_what_is_wrong_makes_no_job(made: Path, changes: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = backfill(made, *YEARS, *changes, code=2)
    assert done.stderr.startswith(("floodmark: Invalid: ", "floodmark: NotFound: "))
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert (asked(made, "list", "--all"), loaded(made)) == ({"jobs": []}, [])


def test_a_history_has_a_source(made: Path) -> None:
    given = [one for one in YEARS if one not in ("--call", "feed:read")]
    backfill(made, *given, code=2).says("Invalid", "a history needs exactly one source")


def test_a_failed_history_says_how_and_what_is_done_and_is_seen_and_goes_on(made: Path) -> None:
    (made / "away-2").touch()
    done = backfill(made, *YEARS, code=4)
    goes_on = "finished work is kept; continue with `floodmark backfill resume years`"
    assert done.stdout == f"failed: years, 2 of 5 chunks (40.0 %) done; {goes_on}\n"
    assert done.stderr.startswith("floodmark: Unavailable: the source failed [")
    assert "chunk=20..30" in done.stderr
    assert "ValueError: the source is away" in done.stderr
    assert health(made) == "attention: job years failed (Unavailable); see `floodmark backfill list`"
    shown = command(made, "status").stdout
    assert "years failed, 2 of 5 chunks (40.0 %), Unavailable: the source failed" in shown
    again = command(made, "backfill", "resume", "years", "--json", code=4)
    assert (again.data["outcome"], again.data["error"]["kind"]) == ("failed", "Unavailable")
    assert again.data["error"]["facts"]["chunk"] == "20..30"
    assert backfill(made, "ack", "years").stdout == "acknowledged years\n"
    assert (health(made), asked(made, "list")) == ("fine", {"jobs": []})
    assert backfill(made, "ack", "years").stdout == "nothing to do: years is failed\n"
    (made / "away-2").unlink()
    assert backfill(made, "resume", "years").stdout.startswith("done: years, 5 chunks, 50 rows, ")
    assert loaded(made) == list(range(50))


def test_coverage_tells_what_is_there_and_its_exit_code_whether_all_is(made: Path) -> None:
    (made / "away-2").touch()
    backfill(made, *YEARS, code=4)
    done = backfill(made, "coverage", "years", code=4)
    assert done.stdout == "events: 2 chunks, 20 rows; loaded 30..50; gaps 0..30\n"
    assert done.stderr == "floodmark: Incomplete: a part of this history is not loaded yet [job=years]\n"
    assert asked(made, "coverage", "years", "--first", "30", "--last", "50")["complete"] is True
    found = asked(made, "coverage", "years", "--first", "25", "--last", "50", code=4)["error"]
    assert (found["kind"], found["facts"]["chunk"]) == ("Incomplete", "20..30")
    below = asked(made, "coverage", "years", "--first=-1", "--last", "50", code=2)["error"]
    assert below["kind"] == "BelowRetention"
    backfill(made, "coverage", "years", "--first", "30", code=2).says("Invalid", "both ends")
    backfill(made, "coverage", "years", "--first", "30", "--last", "40", "--table", "users", code=2).says(
        "Invalid", "events"
    )
    (made / "away-2").unlink()
    backfill(made, "resume", "years")
    whole = asked(made, "coverage", "years")
    assert (whole["complete"], whole["tables"]["events"]["gaps"]) == (True, [])


def test_a_history_of_which_nothing_is_loaded_is_not_complete(made: Path) -> None:
    (made / "away-4").touch()
    backfill(made, *YEARS, code=4)
    assert asked(made, "coverage", "years", code=4)["complete"] is False
    (made / "tip").write_text("40")
    follow = (
        "history",
        "open",
        "--table",
        "users",
        "--call",
        "feed:read",
        "--tip",
        "feed:tip",
        "--first",
        "0",
        "--chunk",
        "50",
    )
    backfill(made, *follow)
    assert asked(made, "coverage", "open", code=4)["complete"] is False


# ── a column ──


def test_a_column_is_filled_and_new_rows_fill_it_themselves(made: Path) -> None:
    with fm.open(made / "lake") as lake:
        for number in range(4):
            lake.append("users", [{"id": n, "name": f"user {n}"} for n in range(number * 1000, number * 1000 + 1000)])
    fill = ("column", "users", "country", "'NL'", "--batch-rows", "1500", "--pause", "1ms")
    planned = backfill(made, *fill, "--dry-run").lines
    assert planned[0] == "would add users.country string: 'NL'"
    assert planned[1].startswith("would fill 4000 rows in 4 files of ")
    assert asked(made, "list", "--all") == {"jobs": []}
    done = asked(made, *fill)
    assert (done["outcome"], done["job"], done["processed"], done["total"]) == ("done", "users.country", 4000, 4000)
    assert (done["rows"], done["unfilled"]) == (4000, 0)
    assert backfill(made, *fill).stdout.startswith("nothing to do: users.country is complete, 4000 rows filled, ")
    with fm.open(made / "lake") as lake:
        lake.append("users", [{"id": 9000, "name": "new"}])
        found = lake.read_arrow("users").read_all()
        assert (found.num_rows, set(found["country"].to_pylist())) == (4001, {"NL"})
        check_lake(lake.catalog)
    assert backfill(made, "show", "users.country").lines[0].split() == ["job", "users.country"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("users", "name", "'x'"), ("column of this name",)),
        (("nowhere", "x", "'x'"), ("nowhere",)),
        (("users", "x", "'x'", "--join", "events e"), ("join and on must be used together",)),
        (("users", "x", "'x'", "--batch-bytes", "many"), ("invalid size", "many")),
        (("users", "x", "'x'", "--pause", "long"), ("span of time",)),
    ],
    ids=["taken", "no-table", "half-a-join", "size", "pause"],
)
def test_a_column_that_cannot_be_makes_no_job(made: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = backfill(made, "column", *arguments, code=2)
    assert done.stderr.startswith(("floodmark: Invalid: ", "floodmark: NotFound: "))
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert asked(made, "list", "--all") == {"jobs": []}


# ── watched, stopped, killed ──


def running(folder: Path, chunk: int, *arguments: str, **options: Any) -> Child:
    """The command in a process of its own, at work in a chunk that waits."""
    (folder / f"wait-{chunk}").touch()
    child = Child(
        run_main, str(folder), ("backfill", *arguments, *(["--json"] if options.get("as_json", True) else []))
    )
    wait_for(folder / f"at-{chunk}")
    return child


def test_a_job_at_work_is_seen_and_busy_and_cancelled_from_elsewhere(made: Path) -> None:
    child = running(made, 2, *YEARS)
    end = time.monotonic() + WAIT_S
    while (job := answer(made, "status")["jobs"][0])["processed"] != 2:
        assert time.monotonic() < end, job
    assert (job["job"], job["status"], job["processed"], job["total"]) == ("years", "running", 2, 5)
    assert health(made) == "fine"
    assert "years  history  running  2 of 5 chunks (40.0 %)" in backfill(made, "list").stdout
    assert asked(made, *YEARS, code=4)["error"]["kind"] == "Busy"
    asking = asked(made, "cancel", "years")
    assert (asking["outcome"], asking["cancel_asked"]) == ("asked", True)
    # Not only after the source has answered; and whoever waits for the command does not take it for done.
    done: Done = child.wait(WAIT_S)
    assert (done.code, done.data["outcome"], done.data["status"]) == (130, "cancelled", "cancelled")
    assert done.data["processed"] == 2
    (made / "wait-2").unlink()
    assert backfill(made, "cancel", "years").stdout == "nothing to do: years is cancelled\n"
    assert (health(made), asked(made, "list")) == ("fine", {"jobs": []})
    assert asked(made, "resume", "years")["outcome"] == "done"
    assert loaded(made) == list(range(50))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_as_cancelled_and_says_how_to_go_on(made: Path, number: int) -> None:
    child = running(made, 2, *YEARS, as_json=False)
    os.kill(child.pid, number)
    done: Done = child.wait(WAIT_S)
    goes_on = "finished work is kept; continue with `floodmark backfill resume years`"
    assert (done.code, done.stdout) == (130, f"cancelled: years, 2 of 5 chunks (40.0 %) done; {goes_on}\n")
    assert "Traceback" not in done.stderr
    assert asked(made, "show", "years")["status"] == "cancelled"
    (made / "wait-2").unlink()
    assert asked(made, "resume", "years")["rows"] == 50
    assert loaded(made) == list(range(50))


def test_a_run_that_was_started_with_sigint_ignored_is_cancelled_by_it_too(made: Path) -> None:
    """As cron, nohup and some runners start programs."""
    (made / "wait-2").touch()
    command = [sys.executable, "-m", "floodmark.cli.main", "--lake", str(made / "lake"), "backfill", *YEARS]
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", ignoring, *command], cwd=made, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(made / "at-2")
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=WAIT_S)
    assert started.returncode == 130
    assert said.startswith("cancelled: years, 2 of 5 chunks")


@pytest.mark.parametrize("point", ["job.made", "job.held", "chunk.sealed", "chunk.published"])
def test_a_run_that_was_killed_is_interrupted_and_resumed(made: Path, point: str) -> None:
    assert run_killed(run_main, str(made), ("backfill", *YEARS), failpoint=point)
    status = "pending" if point == "job.made" else "interrupted"
    assert [job["status"] for job in asked(made, "list")["jobs"]] == [status]
    seen = "attention: job years interrupted; see `floodmark backfill list`"
    assert (point == "chunk.sealed") or health(made) == ("fine" if status == "pending" else seen)
    done = asked(made, "resume", "years")
    assert (done["outcome"], done["processed"], done["rows"]) == ("done", 5, 50)
    assert loaded(made) == list(range(50))
    audit = [row["outcome"] for row in answer(made, "audit")["audit"] if row["kind"] == "job"]
    assert audit == ([] if status == "pending" else ["resumed"])
    assert health(made) == "fine"


def test_an_interrupted_job_can_be_cancelled(made: Path) -> None:
    assert run_killed(run_main, str(made), ("backfill", *YEARS), failpoint="chunk.published")
    assert backfill(made, "cancel", "years").stdout.startswith("cancelled years: ")
    assert (health(made), asked(made, "list")) == ("fine", {"jobs": []})


def test_a_history_that_follows_goes_on_as_the_tip_moves_until_it_is_cancelled(made: Path) -> None:
    (made / "tip").write_text("20")
    follow = ("--tip", "feed:tip", "--first", "0", "--chunk", "10", "--follow", "--workers", "1")
    child = running(made, 1, "history", "live", "--table", "events", "--call", "feed:read", *follow)
    (made / "tip").write_text("35")
    (made / "wait-2").touch()
    (made / "wait-1").unlink()
    wait_for(made / "at-2")
    (made / "wait-2").unlink()
    assert asked(made, "cancel", "live")["outcome"] == "asked"
    done: Done = child.wait(WAIT_S)
    assert (done.code, done.data["outcome"]) == (130, "cancelled")
    assert loaded(made) in (list(range(20)), list(range(30)))


# ── looking ──


def test_a_job_is_shown_by_its_name_or_id_with_what_it_has(made: Path) -> None:
    backfill(made, *YEARS)
    shown = asked(made, "show", "years")
    assert asked(made, "show", shown["id"]) == shown
    assert shown["settings"]["source"] == {"kind": "call", "read": "feed:read", "tip": None}
    assert (shown["coverage"]["tables"]["events"]["loaded"], shown["coverage_error"]) == ([["0", "50"]], None)
    text = backfill(made, "show", "years").stdout
    assert re.search(r"^range +0\.\.50$", text, re.MULTILINE)
    assert text.endswith("events: 5 chunks, 50 rows; loaded 0..50\n")
    backfill(made, "show", "ages", code=2).says("NotFound", "no such job", "jobs=years", "backfill list")
    listed = asked(made, "list", "--all")["jobs"]
    assert {key: shown[key] for key in listed[0]} == listed[0]


def test_a_job_that_was_asked_to_stop_is_stopping(made: Path) -> None:
    with fm.open(made / "lake") as lake:
        lake.catalog.jobs.start("x", "history", ["events"], {}, {}, "chunks", "test")
        done = backfill(made, "cancel", "x")
        assert re.fullmatch(rf"asked x to stop; \S+:{os.getpid()} stops after its current step\n", done.stdout)
        assert backfill(made, "list").lines[1].split()[:3] == ["x", "history", "stopping"]


def test_a_lake_without_jobs_says_so(made: Path) -> None:
    assert backfill(made, "list").stdout == "no jobs\n"
    assert asked(made, "list") == {"jobs": []}
    assert answer(made, "status")["jobs"] == []


def test_jobs_that_are_over_are_listed_with_all(made: Path) -> None:
    backfill(made, *YEARS)
    done = backfill(made, "list")
    assert (done.stdout, done.stderr) == ("no active jobs\n", "1 job more with --all\n")
    assert backfill(made, "list", "--all").lines[1].split()[:3] == ["years", "history", "done"]


def test_jobs_that_cannot_be_understood_are_not_ready_and_the_list_says_why(made: Path) -> None:
    with fm.open(made / "lake") as lake:
        held = lake.catalog.jobs.start("x", "history", ["events"], {}, {}, "chunks", "test")
        lake.catalog.jobs.end(held, FAILED, 0, 1)
        with lake.catalog.database.write() as tx:
            tx.exec_driver_sql("UPDATE fm_jobs SET spec = '{'")
    status = answer(made, "status")
    assert (status["jobs"], status["tables"]) == (None, 2)
    assert status["health"].startswith("not ready: jobs cannot be read (the record of a job cannot be parsed [job=x")
    assert "jobs_error" in command(made, "status").stdout
    assert asked(made, "list", code=5)["error"]["kind"] == "Corrupt"


def test_a_function_that_is_not_there_any_more_cannot_be_resumed(made: Path) -> None:
    (made / "away-2").touch()
    backfill(made, *YEARS, code=4)
    (made / "feed.py").unlink()
    backfill(made, "resume", "years", code=2).says("Invalid", "cannot be imported", "feed:read")


def test_a_bar_is_shown_on_a_terminal_alone(made: Path) -> None:
    out, screen = on_a_terminal(made, "backfill", *YEARS)
    assert out.startswith("done: years, 5 chunks, ")
    assert re.search(r"years .*[1-5] of 5 chunks", screen)
    assert re.search(r"[2-5] of 5 chunks, [\d,.]+/s", screen)
    out, screen = on_a_terminal(made, "backfill", *YEARS, "--json")
    assert (json.loads(out)["outcome"], screen) == ("nothing_to_do", "")


# ── files, through Spark ──


def test_files_are_loaded_into_two_tables_of_which_one_is_computed(made: Path) -> None:
    (made / "data").mkdir()
    for day in (1, 2, 3):
        rows = [{"id": day * 10 + n, "name": "even" if n % 2 else "odd"} for n in range(10)]
        (made / "data" / f"{day:02d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fm.open(made / "lake") as lake:
        lake.create_table("counts", "name string, rows long")
    given = ("--path", "data/{number:02d}.jsonl", "--first", "10", "--last", "40", "--chunk", "10", "--column", "id")
    tables = ("--table", "events", "--table", "counts=select name, count(*) rows from chunk group by name")
    done = subprocess.run(
        [sys.executable, "-m", "floodmark.cli.main", "--json", "backfill", "history", "days", *tables, *given],
        cwd=made,
        env={k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_", "FLOODMARK_"))}
        | {"FLOODMARK_LAKE": "lake"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = json.loads(done.stdout)
    assert (run["outcome"], run["processed"], run["rows"], run["publishes"]) == ("done", 3, 36, 3)
    assert loaded(made) == list(range(10, 40))
    with fm.open(made / "lake", read_only=True) as lake:
        counts = lake.read_arrow("counts").read_all().to_pylist()
    assert sorted((row["name"], row["rows"]) for row in counts) == [("even", 5)] * 3 + [("odd", 5)] * 3
