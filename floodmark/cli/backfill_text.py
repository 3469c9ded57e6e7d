"""What backfills and their jobs are and come to, in sentences: what a person reads where a program reads the record."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from textwrap import TextWrapper
from typing import Any

from floodmark.backfill.record import CANCELLED, DONE, NOTHING_TO_DO, REDONE, TIMED_OUT, BackfillRun
from floodmark.catalog.job import COLUMN, INTERRUPTED, PENDING, RUNNING
from floodmark.cli.output import size_text
from floodmark.cli.sink_text import age_text, error_text
from floodmark.json_form import Json, as_json
from floodmark.report.jobs import JobLine, JobReport, report_of
from floodmark.shown import count_of

RANGES_MAX = 10
# An error on a screen; names and paths stay whole, to be copied.
_WRAPPER = TextWrapper(90, break_long_words=False, break_on_hyphens=False)


# ── jobs ──


def progress_text(job: JobLine | JobReport) -> str:
    """How far it is: 3 of 9 chunks (33.3 %). Whoever follows a range without an end is never done."""
    if job.total is None:
        return f"{job.processed:,} {job.unit}"
    if job.percent is None:
        return f"{job.processed:,} {job.unit}, follows"
    return f"{job.processed:,} of {job.total:,} {job.unit} ({job.percent:.1f} %)"


def pace_text(job: JobLine | JobReport) -> str:
    """How fast it is, and how long it will take; nothing if that cannot be told."""
    parts = [] if job.rate is None else [f"{rate_text(job.rate)} {job.unit}/s"]
    parts += [] if job.eta_s is None else [f"{age_text(round(job.eta_s * 1000))} left"]
    return ", ".join(parts)


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def job_line(job: JobLine | JobReport) -> str:
    """A job in a list of the lake's state."""
    parts = [f"{job.job} {job.status}", progress_text(job)]
    parts += [pace_text(job)] if job.status == RUNNING and pace_text(job) else []
    parts += [f"no progress since {job.stalled_since}"] if job.stalled_since else []
    parts += [error_text(job.error)] if job.error else []
    return ", ".join(parts)


def job_row(job: JobReport) -> dict[str, Json]:
    return {
        "job": job.job,
        "kind": job.kind,
        "status": _status(job),
        "progress": progress_text(job),
        "pace": pace_text(job) or None,
        "rows": job.rows,
        "updated": job.updated,
        "error": None if job.error is None else f"{job.error.kind}: {job.error.message}",
    }


def _status(job: JobReport) -> str:
    if job.stalled_since or job.cancel_asked:
        return "stalled" if job.stalled_since else "stopping"
    # It tries again by itself; the error says what it waits for.
    return "waiting" if job.status == RUNNING and job.error else job.status


def job_fields(job: JobReport, coverage: Mapping[str, Any] | None) -> dict[str, Json]:
    """One job on a screen: figures, settings, and how it failed."""
    whole = as_json(job)
    shown = {name: whole[name] for name in ("job", "id", "kind", "tables", "status")}
    shown |= {"progress": progress_text(job), "pace": pace_text(job) or None}
    shown |= {name: whole[name] for name in ("rows", *(["unfilled"] if job.kind == COLUMN else []), "publishes")}
    shown |= {name: whole[name] for name in ("actor", "holder", "created", "started", "updated", "ended")}
    shown |= {name: whole[name] for name in ("stalled_since", "acknowledged") if whole[name]}
    shown |= {"error": _WRAPPER.fill(error_text(job.error))} if job.error else {}
    settings = {**job.settings, **_history_settings(job.settings, coverage)}
    return shown | {name: value for name, value in settings.items() if name not in shown and value not in (None, False)}


def _history_settings(settings: Mapping[str, Any], coverage: Mapping[str, Any] | None) -> dict[str, Json]:
    """A history's range as people write it; nothing for other jobs."""
    if coverage is None:
        return {}
    size = settings["size"]
    queries = {table: query for table, query in settings["tables"].items() if query is not None}
    return {
        "range": f"{coverage['first']}..{coverage['last'] or 'open'}",
        "chunk": age_text(size // 1000) if settings["unit"] == "time" else size,
        "definitions": queries or None,
        **dict.fromkeys(("first", "last", "size", "origin", "unit")),
    }


def next_step(job: JobReport) -> str | None:
    """What somebody may do about a job that is not at work and not done."""
    if job.status in (PENDING, INTERRUPTED, CANCELLED, "failed"):
        return f"go on with `{resume_command(job.job)}`"
    if job.stalled_since:
        return f"no progress since {job.stalled_since}: look at {job.holder}; if it hangs, end it, then resume"
    return None


def resume_command(name: str) -> str:
    return f"floodmark backfill resume {shlex.quote(name)}"


# ── runs ──


def run_text(run: BackfillRun) -> str:
    """One run, and what of its job is done."""
    job = report_of(run.job)
    if run.outcome == DONE:
        return f"done: {job.job}, {_counts(job)}"
    if run.outcome == REDONE:
        rest = "" if job.status == DONE else f"; more is missing: {next_step(job) or 'it goes on'}"
        return f"redone: {job.job}, {progress_text(job)} done{rest}"
    if run.outcome == NOTHING_TO_DO:
        return f"nothing to do: {job.job} is complete, {_counts(job)}"
    word = "timed out" if run.outcome == TIMED_OUT else run.outcome
    return f"{word}: {job.job}, {progress_text(job)} done; what is done stays; {next_step(job) or 'it goes on'}"


def _counts(job: JobReport) -> str:
    if job.kind == COLUMN:
        parts = [f"{count_of(job.rows, 'row')} filled"]
        parts += [f"{job.unfilled} of them with null"] if job.unfilled else []
    else:
        parts = [count_of(job.processed, "chunk"), count_of(job.rows, "row")]
    return ", ".join([*parts, f"{count_of(job.publishes, 'commit')} in all"])


# ── plans ──


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    return _column_plan(plan) if plan.get("kind") == COLUMN else _history_plan(plan)


def _column_plan(plan: Mapping[str, Any]) -> list[str]:
    name = f"{plan['table']}.{plan['column']}"
    added = [f"would add {name} {plan['type']}: {plan['expression']}"] if plan["adds_column"] else []
    if not plan["files"]:
        return [*added, f"nothing to do: no row lacks {name}"]
    where = f"{count_of(plan['files'], 'file')} of {size_text(plan['bytes'])}"
    how = "1 batch" if plan["batches"] == 1 else f"{plan['batches']} batches"
    cuts = f", {count_of(plan['cuts'], 'file')} cut first" if plan["cuts"] else ""
    announced = "; consumers will see them" if plan["announce"] else ""
    return [*added, f"would fill {count_of(plan['rows'], 'row')} in {where}, in {how}{cuts}{announced}"]


def _history_plan(plan: Mapping[str, Any]) -> list[str]:
    chunks = f"{count_of(plan['to_load'], 'chunk')} into {', '.join(plan['tables'])}"
    lines = [f"would load {chunks}" if plan["to_load"] else "nothing to load now"]
    lines[0] += f"; {plan['done']:,} of {plan['chunks']:,} are done"
    if plan["next"]:
        more = ", …" if plan["to_load"] > len(plan["next"]) else ""
        lines.append(f"first {', '.join(plan['next'])}{more}")
    if plan["not_complete_yet"]:
        lines.append(f"{count_of(plan['not_complete_yet'], 'chunk')} not complete yet: tip {plan['tip'] or 'unknown'}")
    pruned = {table: count for table, count in plan["to_prune"].items() if count}
    return lines + [f"would prune {count_of(count, 'chunk')} of {table}" for table, count in pruned.items()]


def redo_lines(redone: Mapping[str, Any], *, would: bool = False) -> list[str]:
    """What a redo took out, or would; and the rows of others in its range."""
    lines = []
    for table, one in redone["tables"].items():
        verb, rows = "would take" if would else "took", count_of(one["rows_out"], "row")
        went = f"{verb} {rows} of {redone['range']} out of {table}"
        if one["rows_since"]:
            more = ", …" if one["rows_since"] > len(one["since"]) else ""
            went += f"; {count_of(one['rows_since'], 'row')} came since: {'; '.join(one['since'])}{more}"
        lines.append(went + (f"; shipped before to {', '.join(one['shipped_to'])}" if one["shipped_to"] else ""))
    return lines or [f"nothing of {redone['range']} is loaded"]


# ── coverage ──


def is_complete(coverage: Mapping[str, Any]) -> bool:
    """Whether every table has all of the history that can be told; of one where nothing is loaded, nothing can.

    Unless all of it is below the floor: then there is nothing to load.
    """
    tables, floor = coverage["tables"].values(), coverage["floor"]
    nothing_wanted = floor is not None and floor == coverage["last"]
    return all((one["chunks"] or nothing_wanted) and not one["gaps"] for one in tables)


def coverage_lines(coverage: Mapping[str, Any]) -> list[str]:
    lines = []
    for table, one in coverage["tables"].items():
        parts = [f"{count_of(one['chunks'], 'chunk')}, {count_of(one['rows'], 'row')}"]
        for word in ("loaded", "gaps", "pruned"):
            parts += [f"{word} {_ranges(one[word])}"] if one[word] else []
        lines.append(f"{table}: {'; '.join(parts)}")
    return lines + ([f"floor {coverage['floor']}"] if coverage["floor"] is not None else [])


def _ranges(ranges: Sequence[Sequence[str]]) -> str:
    shown = [f"{start}..{end}" for start, end in ranges[:RANGES_MAX]]
    left = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")
