"""What sinks are and do, in sentences: what a person reads where a program reads the record itself (I12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from floodmark.cli.output import size_text
from floodmark.json_form import Json, StoredError
from floodmark.model import BEGINNING
from floodmark.report.sinks import SinkLine
from floodmark.runs import BUSY, FAILED, NOTHING_TO_DO, PAUSED, PLANNED, REFUSED, STOPPED, WAITING
from floodmark.shown import count_of
from floodmark.sinks.outcome import SinkRun, TableRun
from floodmark.sinks.status import LastUnit, SinkReport, SinkTable

# Settings that are written down with a unit (catalog/unit.py, Rules), or that say how large the next one is.
_SEALED = frozenset({"columns", "where", "format", "compression", "part_rows", "part_bytes", "unit_rows", "unit_bytes"})
_AGES = (("d", 86_400), ("h", 3_600), ("min", 60))


def age_text(age_ms: int) -> str:
    """A span of time as people say it: 0.4 s, 12 s, 5 min, 3.2 h, 2.0 d."""
    seconds = age_ms / 1000
    for unit, size in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}" if unit == "min" else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def place_text(mark: int | None) -> str | int | None:
    return "beginning" if mark == BEGINNING else mark


def error_text(error: StoredError) -> str:
    """An error as the catalog keeps it, like the command shows one."""
    facts = " ".join(f"{name}={value}" for name, value in error.facts.items())
    parts = (f"{error.kind}: {error.message}", f"[{facts}]" if facts else "", error.advice)
    return " ".join(part for part in parts if part)


# ── runs ──


def run_lines(run: SinkRun, *, named: bool = False) -> list[str]:
    """A line per table; `named`: with the sink before it."""
    lead = f"{run.sink}: " if named else ""
    return [f"{lead}{one.table}: {table_text(run.sink, one)}" for one in run.tables]


def table_text(sink: str, run: TableRun) -> str:
    """One table of a run, and what retention took before it."""
    lost = run.detail.get("rows_lost", 0)
    gone = f"; retention deleted up to {count_of(lost, 'row')} before they were sent" if lost else ""
    return _outcome_text(sink, run) + gone


def _outcome_text(sink: str, run: TableRun) -> str:
    if run.outcome in (FAILED, REFUSED, BUSY, WAITING) and run.error is not None:
        done = f"; before that {_shipped(run)}" if run.units else ""
        return f"{run.outcome}: {run.error.kind}: {run.error}{done}"
    if run.outcome == PLANNED:
        return _planned(run)
    if run.outcome == PAUSED:
        done = f"; before that {_shipped(run)}" if run.units else ""
        return f"paused: nothing is sent until `floodmark sink resume {sink}`{done}"
    if run.outcome == STOPPED:
        done = f"; before that {_shipped(run)}" if run.units else ""
        return f"stopped: the next run continues from here{done}"
    if run.outcome == NOTHING_TO_DO:
        at = "" if run.until is None else f": no changes after sequence {run.until}"
        return f"nothing to do{at}"
    return _shipped(run) + _refused_rows(sink, run)


def _shipped(run: TableRun) -> str:
    deletions = f", {count_of(run.deletions, 'deletion')} among them" if run.deletions else ""
    resumed = f", {run.resumed} of them left open by an earlier run" if run.resumed else ""
    return (
        f"shipped {count_of(run.rows, 'row')}{deletions} ({size_text(run.size_bytes)}) "
        f"in {count_of(run.units, 'unit')}{resumed}, up to sequence {place_text(run.until)}"
    )


def _refused_rows(sink: str, run: TableRun) -> str:
    if not run.quarantined:
        return ""
    return f"; {count_of(run.quarantined, 'row')} refused: see `floodmark sink quarantine list {sink}`"


def _planned(run: TableRun) -> str:
    first = "; the open unit comes first" if run.detail.get("open_unit") else ""
    files = count_of(run.detail["files"], "file")
    return (
        f"would ship up to {count_of(run.detail['rows_max'], 'row')} of {files}, "
        f"sequences {run.since + 1 if run.since is not None else '?'} to {run.until}{first}"
    )


def retry_lines(run: SinkRun) -> list[str]:
    """What became of refused rows that were sent again."""
    lines = []
    for one in run.tables:
        if one.error is not None:
            arrived = f"; before that {count_of(one.rows, 'refused row')} arrived" if one.rows else ""
            text = f"{one.outcome}: {one.error.kind}: {one.error}{arrived}"
        elif one.outcome in (PAUSED, STOPPED):
            text = f"{one.outcome}: nothing was sent" if not one.units else one.outcome
        else:
            text = f"{count_of(one.rows, 'refused row')} arrived, {one.quarantined} refused again"
        replaced = one.detail.get("replaced", 0)
        newer = f", {replaced} removed because newer changes replaced them" if replaced else ""
        lines.append(f"{one.table}: {text}{newer}")
    return lines or ["nothing to do: no row is in quarantine"]


def check_lines(found: Mapping[str, Any]) -> list[str]:
    """What a check found, a line per table."""
    lines = []
    for one in found["tables"]:
        facts = {name: value for name, value in (one["found"] or {}).items() if value is not None}
        facts_text = ", ".join(f"{name}={value}" for name, value in facts.items())
        said = error_text(StoredError(one["error"])) if one["error"] else facts_text
        lines.append(f"{one['table']}: {one['outcome']}: {said}")
    return lines


def set_text(changed: Iterable[str]) -> str:
    """From when on changed settings count: a unit that is open keeps what decides its rows and parts."""
    sealed = [name for name in changed if name in _SEALED]
    others = [name for name in changed if name not in _SEALED]
    later, now = "from the next unit on", "from the next run on, also for an open unit"
    if not sealed or not others:
        return later if sealed else now
    return f"{', '.join(sealed)} {later}; {', '.join(others)} {now}"


# ── state ──


def sink_line(sink: SinkLine) -> str:
    """A sink among the lines of `status`."""
    rows, bad, error = sink.lag_rows, sink.quarantined, sink.error
    behind = f", {count_of(rows, 'change')} behind, the oldest for {age_text(sink.lag_ms)}" if rows else ""
    aside = f", {bad} in quarantine" if bad else ""
    failed = "" if error is None else f" (FAILED: {error.kind}: {error.message})"
    return f"{sink.sink} {sink.state}{behind}{aside}{failed}"


def list_row(about: SinkReport) -> dict[str, Json]:
    """A sink in one line of `sink list`."""
    return {
        "sink": about.sink,
        "kind": about.kind,
        "state": f"{about.state}, running" if about.running else about.state,
        "branch": about.branch or "deleted",
        "tables": [*(one.table for one in about.tables), *about.lost],
        "behind": sum(one.lag_rows for one in about.tables),
        "oldest": _oldest(max((one.lag_ms for one in about.tables), default=0)),
        "quarantined": about.quarantined,
        "problem": _problem(about),
    }


def _oldest(lag_ms: int) -> str | None:
    return age_text(lag_ms) if lag_ms else None


def _problem(about: SinkReport) -> str | None:
    refused = next((one.refused for one in about.tables if one.refused), None)
    problem = refused or about.error
    if problem is None:
        return "a mark is lost" if about.lost else None
    return f"{problem.kind}: {problem.message}"


def status_fields(about: SinkReport) -> dict[str, Json]:
    """A sink without its tables, as `sink status` shows it."""
    return {
        "sink": about.sink,
        "kind": about.kind,
        "state": about.state,
        "running": about.running,
        "settings": about.settings,
        "last error": None if about.error is None else f"{error_text(about.error)} ({about.error_at})",
        "waits until": about.waits_until,
        "quarantined": _of_total(about),
        "largest body": None if about.body_bytes_max is None else size_text(about.body_bytes_max),
    }


def _of_total(about: SinkReport) -> str | int:
    total = about.quarantine_total_max
    return about.quarantined if total is None else f"{about.quarantined} of at most {total}"


def status_rows(about: SinkReport) -> list[dict[str, Json]]:
    """The tables of a sink, a line each."""
    return [
        {
            "table": one.table if one.shipped_as is None else f"{one.table} (as {one.shipped_as})",
            "mark": place_text(one.mark),
            "head": one.head,
            "behind": one.lag_rows,
            "oldest": _oldest(one.lag_ms),
            "epoch": one.epoch,
            "sent": one.rows,
            "units": one.units,
            "last unit": _last_unit(one.last_unit),
            "open": one.open_unit,
            "quarantined": one.quarantined,
            "maybe twice": one.rows_doubtful,
            "lost": one.rows_lost,
        }
        for one in about.tables
    ]


def _last_unit(unit: LastUnit | None) -> str | None:
    if unit is None:
        return None
    return f"{unit.since + 1} to {unit.until}, {count_of(unit.rows, 'row')}, {unit.settled}"


def status_problems(about: SinkReport) -> list[str]:
    """What keeps tables of a sink from being shipped, a line each."""
    lines = [f"{one.table}: {error_text(one.refused)}" for one in about.tables if one.refused]
    return [*lines, *(f"{table}: the sink's mark is lost" for table in about.lost)]


# ── what cannot be undone ──


def removal_lines(about: SinkReport) -> list[str]:
    """What is lost with a sink."""
    lines = [f"  {_mark_line(one)}" for one in about.tables]
    if about.quarantined:
        lines.append(f"  {count_of(about.quarantined, 'refused row')} in quarantine")
    return [*lines, "The rows it sent stay at the destination; a new sink of this name does not know about them."]


def _mark_line(table: SinkTable) -> str:
    behind = f", {count_of(table.lag_rows, 'change')} not sent" if table.lag_rows else ""
    half = "; its open unit, which may be partly sent" if table.open_unit else ""
    return f"{table.table}: the mark {place_text(table.mark)} of {table.head}{behind}{half}"


def replay_lines(plans: Sequence[Mapping[str, Any]], *, done: bool = False) -> list[str]:
    """What a new epoch sends (again) or never sends, a line per table."""
    return [_replay_line(plan, done) for plan in plans]


def _replay_line(plan: Mapping[str, Any], done: bool) -> str:
    place = place_text(plan["start"])
    text = "from the beginning" if place == "beginning" else f"after sequence {place}"
    again = f", {plan['again']} of them again" if plan["again"] else ""
    never = f"; {count_of(plan['skipped'], 'change')} not sent yet will never be sent" if plan["skipped"] else ""
    half = "; the open unit is abandoned" if plan["open_unit"] else ""
    verb = "begins" if done else "would begin"
    return (
        f"{plan['table']}: a new epoch {verb} {text} (mark: {place_text(plan['mark'])}): "
        f"up to {count_of(plan['rows'], 'change')} to send{again}{never}{half}"
    )
