"""Read-only checks: what `floodmark doctor` asks of the machine, of a lake, and of each of its branches."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.jobs import COLUMN, FAILED, INTERRUPTED, UNKNOWN, Job
from floodmark.catalog.leases import is_dead
from floodmark.catalog.lineage import Lineages
from floodmark.commit.catalog import Catalog
from floodmark.commit.journal import STAGED, STAGING, STATES
from floodmark.errors import FloodmarkError, NotFound
from floodmark.model import MAIN, CurrentTable, Head
from floodmark.repair.history_files import look_at_head, look_at_history, versions_text
from floodmark.rows.session import Sessions, check_java
from floodmark.storage.probe import is_remote, probe_bucket


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


def examine_store(root: str, options: Mapping[str, str]) -> list[Check]:
    """Check that the bucket supports what a lake needs; nothing for a lake on a local disk."""
    if not is_remote(root):
        return []
    try:
        probe_bucket(options, root)
    except FloodmarkError as error:
        return [Check("store", False, str(error))]
    return [Check("store", True, f"{root} can be read and written, and honours conditional puts")]


def examine_executors(sessions: Sessions, version: str, root: str, options: Mapping[str, str]) -> list[Check]:
    """A task on every executor of Spark: one line each, or why it did not answer."""
    from floodmark.rows.executors import ask_executors

    try:
        found = ask_executors(sessions.get(), version, root, options)
    except FloodmarkError as error:
        return [Check("spark", False, str(error))]
    # Several executors may share a host: they are numbered there.
    numbers: Counter[str] = Counter()
    checks = []
    for one in found:
        numbers[one.host] += 1
        name = f"executor {numbers[one.host]} on {one.host}"
        detail = one.problem or f"Floodmark {one.version}, and it can write to the lake"
        checks.append(Check(name, not one.problem, detail))
    return checks


def examine_lake(catalog: Catalog, *, deep: bool = False) -> list[Check]:
    """`deep`: every file of every readable version, not a sample of them."""
    row = catalog.lake_row()
    checks = [Check("catalog", True, f"{catalog.database.shown_url} format={row.format} version={row.version}")]
    checks.append(_examine_journal(catalog))
    heads = catalog.history.heads()
    checks += [_examine_table(catalog, head, known) for head, known in _current(catalog, heads)]
    checks += _examine_branches(catalog, {head.table_id: head.metadata_location for head in heads})
    checks.append(_examine_versions(catalog, deep=deep))
    checks += _examine_indexes(catalog, deep=deep)
    return [*checks, *_examine_sinks(catalog), *_examine_jobs(catalog, heads)]


def _examine_indexes(catalog: Catalog, *, deep: bool) -> list[Check]:
    """The segments of all indexes; nothing for a lake without any."""
    indexes = {index.id: index for index in catalog.indexes.all()}
    rows = [row for table_id in catalog.indexes.tables() for row in catalog.indexes.segments(table_id)]
    if not rows:
        return []
    # Imported late: a lake without indexes is examined without Arrow.
    from floodmark.index.verification import problem_of

    known = sum(row.broken and row.retired_ms is None for row in rows)
    try:
        found = [
            f"{row.location} ({problem})"
            for row in rows
            if not row.broken and (problem := problem_of(catalog, indexes.get(row.index_id), row, deep=deep))
        ]
    except FloodmarkError as error:
        return [Check("indexes", False, str(error))]
    if found or known:
        damaged = [f"{len(found)} segment(s) are damaged: {', '.join(found[:3])}"] if found else []
        damaged += [f"{known} segment(s) are known to be damaged"] if known else []
        advice = "rows are found without them; `floodmark maintain index --verify` makes them again"
        return [Check("indexes", False, f"{'; '.join(damaged)}; {advice}")]
    more = "compared with the rows" if deep else "with the recorded sizes; --deep compares them with the rows"
    return [Check("indexes", True, f"{len(rows)} segments of {len(indexes)} indexes, {more}")]


def _examine_sinks(catalog: Catalog) -> list[Check]:
    """Sinks for which storage has a unit that the catalog does not have."""
    try:
        sinks = catalog.sinks.all()
        lost = {sink.name: str(error) for sink, error in catalog.witnesses.compare_all(sinks)}
    except FloodmarkError as error:
        return [Check("sinks", False, str(error))]
    return [Check(f"sink {sink.name}", sink.name not in lost, lost.get(sink.name, "")) for sink in sinks]


def _current(catalog: Catalog, heads: Sequence[Head]) -> list[tuple[Head, CurrentTable]]:
    """The heads of one branch, each with the location of its table's pointer. Tables dropped meanwhile are left out."""
    if not heads:
        return []
    found = catalog.history.current_tables(heads[0].branch, [head.table for head in heads])
    return [(head, found[head.table]) for head in heads if head.table in found]


def _examine_table(catalog: Catalog, head: Head, known: CurrentTable, base_version: int = 0) -> Check:
    name = f"table {head.table}" if head.branch == MAIN else f"table {head.table} on {head.branch}"
    try:
        if known.pointer != known.pointer_known:
            from floodmark.commit.drift import classify, drift_text, with_names

            drift = classify(catalog.files, known)
            if drift is None:
                return Check(name, True, "")
            location = catalog.files.metadata(known.pointer_known).location
            return Check(name, False, drift_text(with_names(catalog.database, drift, location)))
        if wrong := _wrong_ref(catalog, head, known, forked=head.version > base_version):
            return Check(name, False, wrong)
        faults = look_at_head(catalog, head)
        if not faults:
            return Check(name, True, f"{head.files} files, {head.rows} rows")
        some = ", ".join(map(str, faults[:5]))
        return Check(name, False, f"{len(faults)} damaged or missing file(s): {some}; restore them from a copy")
    except FloodmarkError as error:
        return Check(name, False, str(error))


def _examine_versions(catalog: Catalog, *, deep: bool) -> Check:
    """The files of all readable versions. Problems of the newest one are reported table by table."""
    try:
        looked = look_at_history(catalog, deep=deep)
    except FloodmarkError as error:
        return Check("versions", False, str(error))
    older = [fault for fault in looked.faults if not fault.head]
    of = "all" if looked.states_looked == looked.states else f"{looked.states_looked} of"
    detail = f"{looked.files_looked} files of {of} {looked.states} table states"
    if looked.gone_from_heads and not older:
        # The lines of those tables say more; a line that all states can be read must not follow them.
        names = ", ".join(dict.fromkeys(fault.table for fault in looked.gone_from_heads))
        return Check(
            "versions", False, f"the newest state of {names} cannot be read, see its check; {detail} were checked"
        )
    if not older:
        more = "" if deep else "; --deep checks all of them"
        return Check("versions", True, f"{detail} that can be read{more}")
    some = ", ".join(dict.fromkeys(f"{fault.table}: {fault}" for fault in older[:3]))
    return Check(
        "versions",
        False,
        f"version(s) {versions_text(looked.versions)} cannot be read: {some}; restore the files from a copy, or "
        "`floodmark repair --give-up --apply` gives up the versions that cannot be read",
    )


def _wrong_ref(catalog: Catalog, head: Head, known: CurrentTable, *, forked: bool) -> str:
    """Under a branch's name other engines find the branch's head; a table that was never forked need not have a ref."""
    metadata = catalog.files.metadata(known.pointer_known)
    ref = metadata.refs.get(head.branch)
    found = None if ref is None else ref.snapshot_id
    if head.branch == MAIN:
        found = metadata.current_snapshot_id
    if found == head.snapshot or (found is None and not forked):
        return ""
    return f"its ref {head.branch} is at snapshot {found}, not at {head.snapshot}"


def _examine_branches(catalog: Catalog, on_main: Mapping[str, str]) -> list[Check]:
    """Every branch except main: that its rows agree, and its tables that differ from main's."""
    try:
        with catalog.database.read() as tx:
            lines = Lineages.read(tx)
            for name in tx.execute(select(tables.branches.c.name)).scalars():
                lines.live(name)
        branches = [branch for branch in catalog.branches.list() if branch.name != MAIN]
    except FloodmarkError as error:
        return [Check("branches", False, str(error))]
    checks = []
    for branch in branches:
        try:
            heads = catalog.history.heads(branch.name)
        except NotFound:
            continue  # deleted since the list was made
        own = [head for head in heads if on_main.get(head.table_id) != head.metadata_location]
        found = [_examine_table(catalog, head, known, branch.base_version) for head, known in _current(catalog, own)]
        bad = [check for check in found if not check.passed]
        detail = (
            f"from version {branch.base_version} of {branch.parent}, {len(heads)} tables, {len(own)} not as on main"
        )
        checks += [Check(f"branch {branch.name}", not bad, detail), *bad]
    return checks


def _examine_journal(catalog: Catalog) -> Check:
    rows, now = catalog.journal.unfinished()
    unknown = [row.id for row in rows if row.state not in STATES]
    dead = [row.id for row in rows if row.state in (STAGING, STAGED) and is_dead(row.holder.row, now)]
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
    return Check("journal", True, f"{running} at work, {len(rows) - running} ended but not yet cleaned up")


def _examine_jobs(catalog: Catalog, heads: Sequence[Head]) -> list[Check]:
    """All jobs in one line, and one for each that needs an operator, with what to do."""
    try:
        jobs = catalog.jobs.all()
        found = [check for job in jobs if (check := _examine_job(job, heads, job.looked_ms or 0)) is not None]
    except Exception as error:  # noqa: BLE001 - any error: jobs that cannot be read are not healthy
        said = (str(error).splitlines() or [""])[0] or type(error).__name__
        return [Check("jobs", False, f"cannot be read: {said}; upgrade Floodmark, or restore the catalog")]
    counted = Counter(job.status for job in jobs)
    return [Check("jobs", True, ", ".join(f"{count} {status}" for status, count in counted.items()) or "none"), *found]


def _examine_job(job: Job, heads: Sequence[Head], now_ms: int) -> Check | None:
    """None if the job needs no attention. A failure is named until it is acknowledged, even if health shows
    it no more.
    """
    gone, command, name = _gone_table(job, heads), "`floodmark backfill", shlex.quote(job.name)
    resume = f"{command} resume {name}` continues it" if gone is None else f"{gone}, so it cannot continue"
    if job.status == UNKNOWN:
        said = f"in an unknown state ({job.state}): it is kept; upgrade Floodmark"
    elif job.status == FAILED and job.acknowledged_ms is None:
        error = job.error or {}
        why = f"{error.get('kind', 'unknown')}: {error.get('message', 'unknown')}"
        said = f"failed ({why}); {resume}; {command} ack {name}` acknowledges it"
    elif job.status == INTERRUPTED:
        said = f"interrupted: its process died; {resume}; {command} cancel {name}` ends it"
    elif job.stalled_since_ms is not None:
        since = clock.format_time(job.stalled_since_ms)
        said = f"no progress since {since}; look at {job.holder}, and end it if it hangs; then {resume}"
    elif gone is None:
        return None
    elif job.is_over:
        return Check(f"job {job.name}", True, f"{job.status}; {gone}, and the job's work with it")
    else:
        said = f"{job.status}; {resume}; {command} cancel {name}` ends it"
    return Check(f"job {job.name}", job.status == FAILED and not job.is_shown(now_ms), said)


def _gone_table(job: Job, heads: Sequence[Head]) -> str | None:
    """The missing ones of a job's tables; None if all exist. A column belongs to one incarnation of its table."""
    known = {head.table: head.table_id for head in heads}
    if missing := [table for table in job.table_names if table not in known]:
        return f"its table {', '.join(missing)} is gone"
    if job.kind == COLUMN and job.settings.get("table_id") not in known.values():
        return f"its table {', '.join(job.table_names)} was dropped and created again"
    return None
