"""What health says, for what is wrong: the worst first, what blocks, and the command that shows more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from floodmark.json_form import StoredError, stored_error
from floodmark.report.daemon import DaemonReport, TaskReport
from floodmark.report.health import Health, Troubles, judge
from floodmark.report.jobs import JobsState
from floodmark.report.sinks import SinkLine
from floodmark.report.spools import SpoolReport, State

NOTHING = Troubles((), (), (), (), (), (), None, JobsState(()))


def spool(
    table: str = "events", state: State = "ok", quarantined: int = 0, oldest_ms: int | None = None
) -> SpoolReport:
    return SpoolReport(table, "id", "here", "/spool", state, 0, 0, 0, oldest_ms, 0, 0, quarantined, None, None)


def sink(name: str = "out", quarantined: int = 0, error: dict[str, Any] | None = None) -> SinkLine:
    return SinkLine(name, "files", "active", ("events",), 0, 0, quarantined, stored_error(error), None, ())


def daemon(*tasks: TaskReport, alive: bool = True) -> DaemonReport:
    return DaemonReport("here", 1, "2026-11-16T09:00:00.000Z", None, alive, "2026-11-16T09:00:00.000Z", tasks)


def task(name: str, failures: int = 1, kind: str = "Unavailable", set_aside: int = 0) -> TaskReport:
    state, error = ("failed", StoredError({"kind": kind})) if failures else ("waiting", None)
    return TaskReport(name, "files", state, failures=failures, last_error=error, set_aside=set_aside)


def said(**changes: Any) -> str:
    return judge(replace(NOTHING, **changes)).text


def test_nothing_wrong_is_fine() -> None:
    assert judge(NOTHING) == Health("fine", ())
    assert said(spools=[spool(state="waiting"), spool("a", "elsewhere")], sinks=[sink()], daemon=daemon()) == "fine"


def test_a_refused_spool_blocks() -> None:
    found = judge(replace(NOTHING, spools=[spool(state="refused"), spool("notes", "refused"), spool("other")]))
    assert found.text == "refused: the spool of events, notes; see `floodmark spool list`"
    assert found.blocking == (found.text,)


def test_rows_that_wait_for_long_need_attention() -> None:
    assert said(spools=[spool(state="waiting", oldest_ms=60_000)]) == "fine"
    found = judge(replace(NOTHING, spools=[spool(state="waiting", oldest_ms=60_001)]))
    text = "attention: rows of events have waited for more than 60 s; see `floodmark spool list`"
    assert found == Health(text, ())


def test_rows_in_quarantine_need_attention_and_do_not_block() -> None:
    found = judge(replace(NOTHING, spools=[spool(quarantined=2), spool("notes", quarantined=1)], sinks=[sink("s", 1)]))
    assert found.text == (
        "attention: 3 rows in quarantine of table events, notes, 1 row in quarantine of sink s; "
        "see `floodmark spool quarantine list events` and `floodmark sink quarantine list s`"
    )
    assert found.blocking == ()


def test_failed_tasks_of_a_daemon_that_lives_need_attention() -> None:
    tasks = [task("files drop"), task("feed events", 3, "Busy"), task("maintain", 0)]
    text = "attention: task files drop failed (Unavailable), task feed events failed (Busy, 3 times); "
    assert said(daemon=daemon(*tasks)) == f"{text}see `floodmark status`"
    assert said(daemon=daemon(*tasks, alive=False)) == "fine"
    assert said(daemon=daemon(*(task(f"t{n}") for n in range(7)))).count("task t") == 5
    assert "2 more tasks" in said(daemon=daemon(*(task(f"t{n}") for n in range(7))))


def test_bad_files_need_attention_for_as_long_as_they_lie_there() -> None:
    tasks = [task("source a", 0, set_aside=2), task("source b", 0, set_aside=1), task("source c", 0)]
    assert said(daemon=daemon(*tasks)) == "attention: 3 bad files of source a, source b; see `floodmark status`"
    assert said(daemon=daemon(*tasks, alive=False)) == "fine"
    assert said(daemon=daemon(*tasks[2:])) == "fine"


def test_what_a_sink_or_a_spool_says_itself_is_not_said_again_of_its_task() -> None:
    error = {"kind": "Unavailable", "message": "x"}
    text = said(sinks=[sink(error=error)], daemon=daemon(task("sink out"), task("sink other")))
    assert text.startswith("attention: sink out failed (Unavailable), task sink other failed (Unavailable); see")
    assert "task" not in said(spools=[spool(state="refused")], daemon=daemon(task("feed events")))


def test_the_worst_comes_first_and_what_can_be_settled_alone_hides_the_rest() -> None:
    found = judge(
        replace(NOTHING, drifted=["people"], pending=["x"], spools=[spool(state="refused", quarantined=1)],
                jobs=JobsState(None, "why"))
    )  # fmt: skip
    parts = found.text.split("; ")
    assert [part.partition(":")[0] for part in parts if ":" in part] == [
        "not ready",
        "refused",
        "refused",
        "recovery pending",
    ]
    assert len(found.blocking) == 3
    assert "quarantine" not in found.text


@pytest.mark.parametrize("count", [1, 6, 7])
def test_many_names_are_counted(count: int) -> None:
    text = said(spools=[spool(f"t{n}", "refused") for n in range(count)])
    assert text.count("t") >= min(count, 5)
    assert ("1 more table;" in text) == (count == 6)
    assert ("2 more tables;" in text) == (count == 7)
