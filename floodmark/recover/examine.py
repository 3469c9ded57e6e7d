"""Looking, without touching: what `floodmark doctor` asks of the machine and of a lake."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from floodmark import clock
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.job import COLUMN, FAILED, INTERRUPTED, UNKNOWN, Job
from floodmark.catalog.journal import STAGED, STAGING, STATES
from floodmark.catalog.processes import is_dead
from floodmark.errors import FloodmarkError
from floodmark.model import BEGINNING, Head
from floodmark.rows.session import check_java


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


def examine_machine() -> list[Check]:
    checks = [Check("python", sys.version_info >= (3, 11), sys.version.split()[0])]
    try:
        checks.append(Check("java", True, f"version {check_java()}"))
    except FloodmarkError as error:
        checks.append(Check("java", False, str(error)))
    checks += [Check(name, True, importlib.metadata.version(name)) for name in ("pyspark", "pyiceberg", "pyarrow")]
    return checks


def examine_lake(catalog: Catalog) -> list[Check]:
    row = catalog.lake_row()
    checks = [Check("catalog", True, f"{catalog.database.shown_url} format={row.format} version={row.version}")]
    checks.append(_examine_journal(catalog))
    heads = catalog.history.heads()
    current = catalog.history.current_tables("main", [head.table for head in heads])
    for head in heads:
        try:
            known = current[head.table]
            if known.pointer != known.pointer_known:
                checks.append(
                    Check(
                        f"table {head.table}",
                        False,
                        f"moved past Floodmark's door: {known.pointer} instead of {known.pointer_known}",
                    )
                )
                continue
            deletions = [file.location for file in catalog.history.deletions(head, BEGINNING, head.sequence)]
            wanted = [*catalog.files.data_files(head), *deletions]
            missing = [path for path in wanted if not catalog.storage.exists(path)]
            detail = f"{head.files} files, {head.rows} rows" if not missing else f"missing: {', '.join(missing[:5])}"
            checks.append(Check(f"table {head.table}", not missing, detail))
        except FloodmarkError as error:
            checks.append(Check(f"table {head.table}", False, str(error)))
    return [*checks, *_examine_jobs(catalog, heads)]


def _examine_journal(catalog: Catalog) -> Check:
    rows, now = catalog.journal.unfinished()
    unknown = [row.id for row in rows if row.state not in STATES]
    dead = [row.id for row in rows if row.state in (STAGING, STAGED) and is_dead(row, now)]
    broken = []
    for operation in [row.id for row in rows if row.state == STAGED]:
        try:
            catalog.journal.read_seal(operation)
        except FloodmarkError:
            broken.append(operation)
    if unknown or broken:
        return Check(
            "journal",
            False,
            f"cannot be understood: {', '.join(unknown + broken)};"
            " `floodmark recover --discard OPERATION --apply` gives one up",
        )
    if dead:
        return Check("journal", True, f"{len(dead)} dead operation(s); the next write settles them")
    running = sum(1 for row in rows if row.state in (STAGING, STAGED))
    return Check("journal", True, f"{running} at work, {len(rows) - running} at their end but still looked after")


def _examine_jobs(catalog: Catalog, heads: Sequence[Head]) -> list[Check]:
    """All jobs in one line, and one for each that needs somebody, with what to do."""
    try:
        jobs = catalog.jobs.all()
        found = [check for job in jobs if (check := _examine_job(job, heads, job.looked_ms or 0)) is not None]
    except Exception as error:  # noqa: BLE001 - whatever it is: jobs that cannot be read are not well
        said = (str(error).splitlines() or [""])[0] or type(error).__name__
        return [Check("jobs", False, f"cannot be read: {said}; upgrade Floodmark, or restore the catalog")]
    counted = Counter(job.status for job in jobs)
    return [Check("jobs", True, ", ".join(f"{count} {status}" for status, count in counted.items()) or "none"), *found]


def _examine_job(job: Job, heads: Sequence[Head], now_ms: int) -> Check | None:
    """None if nobody has to know. A failure that health shows no more is still named, until it is acknowledged."""
    gone, command, name = _gone_table(job, heads), "`floodmark backfill", shlex.quote(job.name)
    resume = f"{command} resume {name}` goes on" if gone is None else f"{gone}, so it cannot go on"
    if job.status == UNKNOWN:
        said = f"in an unknown state ({job.state}): it is kept; upgrade Floodmark"
    elif job.status == FAILED and job.acknowledged_ms is None:
        error = job.error or {}
        why = f"{error.get('kind', 'unknown')}: {error.get('message', 'unknown')}"
        said = f"failed ({why}); {resume}; {command} ack {name}` if that was seen"
    elif job.status == INTERRUPTED:
        said = f"interrupted: its process died; {resume}; {command} cancel {name}` ends it"
    elif job.stalled_since_ms is not None:
        since = clock.format_time(job.stalled_since_ms)
        said = f"no progress since {since}; look at {job.holder}, and end it if it hangs; then {resume}"
    elif gone is None:
        return None
    elif job.is_over:
        return Check(f"job {job.name}", True, f"{job.status}; {gone}, and what the job did there")
    else:
        said = f"{job.status}; {resume}; {command} cancel {name}` ends it"
    return Check(f"job {job.name}", job.status == FAILED and not job.is_shown(now_ms), said)


def _gone_table(job: Job, heads: Sequence[Head]) -> str | None:
    """What is gone of a job's tables; None if they are all there. A column belongs to one incarnation of its table."""
    known = {head.table: head.table_id for head in heads}
    if missing := [table for table in job.table_names if table not in known]:
        return f"its table {', '.join(missing)} is gone"
    if job.kind == COLUMN and job.settings.get("table_id") not in known.values():
        return f"its table {', '.join(job.table_names)} was made again"
    return None
