"""The health of the lake: fine, or what is wrong and where to look, in one text, the worst first. Pure.

The text is "fine", or parts joined by "; ". What blocks (the state is unknown, or something is refused until an
operator decides) comes first and makes the lake not ready; the rest is being settled by itself, or needs attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from floodmark.catalog.maintenance_state import Maintenance
from floodmark.report.daemon import DaemonReport, TaskReport
from floodmark.report.jobs import TROUBLES_MAX, JobsState, not_ready, trouble_text
from floodmark.report.maintenance import failure_text
from floodmark.report.sinks import SinkLine, sink_failure
from floodmark.report.spools import REFUSED, SpoolReport
from floodmark.shown import count_of

FINE = "fine"
# A feed that takes longer than this does not keep up, or does not run.
LATE_MS = 60_000


@dataclass(frozen=True)
class Troubles:
    """All that may be wrong: operations, tables, maintenance, sinks, spools, tasks of the daemon, jobs."""

    unknown: Sequence[str]
    pending: Sequence[str]
    drifted: Sequence[str]
    failed: Sequence[Maintenance]
    sinks: Sequence[SinkLine]
    spools: Sequence[SpoolReport]
    daemon: DaemonReport | None
    jobs: JobsState


@dataclass(frozen=True)
class Health:
    text: str
    blocking: tuple[str, ...]


def judge(found: Troubles) -> Health:
    blocking = _blocking(found)
    if found.unknown:
        rest: tuple[str, ...] = ()  # nothing can be settled before that
    elif found.pending:
        settled = "the next write or `floodmark recover` recovers them"
        rest = (f"recovery pending: {len(found.pending)} dead operation(s); {settled}",)
    else:
        rest = _attention(found)
    return Health("; ".join((*blocking, *rest)) or FINE, tuple(blocking))


def _blocking(found: Troubles) -> list[str]:
    parts = [not_ready(found.jobs.error)] if found.jobs.error is not None else []
    if found.drifted:
        parts.append(f"refused: {', '.join(found.drifted)} changed by another writer; see `floodmark repair`")
    refused = [spool.table for spool in found.spools if spool.state == REFUSED]
    if refused:
        parts.append(f"refused: the spool of {_few(refused, 'table')}; see `floodmark spool list`")
    if found.unknown:
        parts.append(f"refused: {len(found.unknown)} operation(s) cannot be understood; see `floodmark doctor`")
    return parts


def _attention(found: Troubles) -> tuple[str, ...]:
    """What continues by itself, but not as it should; and the commands that show more of it."""
    failed_sinks = [sink_failure(sink.sink, sink.error) for sink in found.sinks if sink.error is not None]
    aside = {spool.table: spool.quarantined for spool in found.spools if spool.quarantined}
    refused = {sink.sink: sink.quarantined for sink in found.sinks if sink.quarantined}
    kinds = (
        ([failure_text(one) for one in found.failed], "floodmark maintain history"),
        (failed_sinks, "floodmark sink status"),
        (trouble_text(found.jobs.troubles), "floodmark backfill list"),
        (_tasks(found) + _files_aside(found), "floodmark status"),
        (_waiting(found.spools), "floodmark spool list"),
        (_aside_text(aside, "table"), f"floodmark spool quarantine list {next(iter(aside), '')}"),
        (_aside_text(refused, "sink"), f"floodmark sink quarantine list {next(iter(refused), '')}"),
    )
    problems = [text for texts, _ in kinds for text in texts]
    where = [f"`{command}`" for texts, command in kinds if texts]
    return (f"attention: {', '.join(problems)}; see {' and '.join(where)}",) if problems else ()


def _waiting(spools: Sequence[SpoolReport]) -> list[str]:
    """Rows that were taken and should long be in their tables; perhaps no process runs to feed them."""
    late = [one.table for one in spools if one.state != REFUSED and (one.oldest_ms or 0) > LATE_MS]
    return [f"rows of {_few(late, 'table')} have waited for more than {LATE_MS // 1000} s"] if late else []


def _tasks(found: Troubles) -> list[str]:
    """Failures that the daemon retries, unless another part reports them; a daemon that ended is no failure."""
    if found.daemon is None or not found.daemon.alive:
        return []
    reported = {f"sink {sink.sink}" for sink in found.sinks if sink.error is not None}
    reported |= {f"feed {spool.table}" for spool in found.spools if spool.state == REFUSED}
    reported |= {"maintain"} if found.failed else set()
    reported |= {f"job {job.job}" for job in found.jobs.shown or () if job.error is not None}
    failed = [task for task in found.daemon.tasks if task.failures or task.state == "failed"]
    texts = [_task_failure(task) for task in failed if task.name not in reported]
    left = len(texts) - TROUBLES_MAX
    return [*texts[:TROUBLES_MAX], *([f"{count_of(left, 'more task')}"] if left > 0 else [])]


def _files_aside(found: Troubles) -> list[str]:
    """Dropped files that could not be loaded, for as long as they stay in the folder."""
    tasks = found.daemon.tasks if found.daemon is not None and found.daemon.alive else ()
    files = {task.name: task.set_aside for task in tasks if task.set_aside}
    return [f"{count_of(sum(files.values()), 'bad file')} of {_few(list(files), 'task')}"] if files else []


def _task_failure(task: TaskReport) -> str:
    kind, times = "unknown" if task.last_error is None else task.last_error.kind, task.failures
    return f"task {task.name} failed ({kind}{f', {times} times' if times > 1 else ''})"


def _aside_text(rows: Mapping[str, int], name: str) -> list[str]:
    return [f"{count_of(sum(rows.values()), 'row')} in quarantine of {name} {_few(list(rows), name)}"] if rows else []


def _few(names: Sequence[str], noun: str) -> str:
    """The first few names, and the number of the others."""
    left = len(names) - TROUBLES_MAX
    return ", ".join([*names[:TROUBLES_MAX], *([count_of(left, f"more {noun}")] if left > 0 else [])])
