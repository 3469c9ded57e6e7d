"""The state of the lake's maintenance: what ran last, what failed, and what is due, from the catalog alone.

What is due is an estimate from the figures that commits keep: maintenance itself looks closer, and may find nothing to
do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from floodmark import clock
from floodmark.catalog.indexes import IndexFigures
from floodmark.catalog.maintenance_state import LAKE, Maintenance, Policy
from floodmark.commit.catalog import Catalog
from floodmark.json_form import Reported
from floodmark.maintenance.folds import ENTRIES_FOLDED_MAX, FILES_FOLDED_MAX, SEGMENTS_MAX
from floodmark.maintenance.record import COMPACT, INDEX, RETAIN, VERBS
from floodmark.model import Head
from floodmark.runs import FAILED, REFUSED
from floodmark.settings.settings import MaintainSettings
from floodmark.shown import count_of

# Rows grow old while nothing else happens: a policy is checked this often.
RETAIN_EVERY_MS = 24 * 3_600_000
DEFAULTS = MaintainSettings()


@dataclass(frozen=True)
class Outcome(Reported):
    at: str
    outcome: str


@dataclass(frozen=True)
class LastRun(Reported):
    at: str
    outcome: str
    table: str | None
    failed: tuple[str, ...]


@dataclass(frozen=True)
class MaintenanceOverview:
    """What the catalog knows of maintenance, by table id; `newest` has the last record of each verb and table."""

    newest: Sequence[Maintenance] = ()
    small_files: Mapping[str, int | None] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    sinks: Collection[str] = ()
    indexes: Sequence[IndexFigures] = ()

    def last(self, verb: str, table_id: str) -> Maintenance | None:
        return next((one for one in self.newest if (one.verb, one.table_id) == (verb, table_id)), None)


def read_maintenance(catalog: Catalog) -> MaintenanceOverview:
    upkeep = catalog.maintenance
    sinks = {sink.name for sink in catalog.sinks.all()}
    indexes = catalog.indexes.figures(ENTRIES_FOLDED_MAX, FILES_FOLDED_MAX)
    return MaintenanceOverview(upkeep.newest(), upkeep.small_files(), upkeep.policies(), sinks, indexes)


def unanswered(upkeep: MaintenanceOverview, heads: Sequence[Head]) -> list[Maintenance]:
    """Runs that failed or were refused, if no newer run made up for it."""
    known_tables = {LAKE, *(head.table_id for head in heads)}
    found = []
    for place, record in enumerate(upkeep.newest):
        if record.outcome == REFUSED:
            # Recovery refused, for all tables and verbs: any later admitted run shows that the refusal is over.
            stands = all(later.outcome == REFUSED for later in upkeep.newest[place + 1 :])
        else:
            known = record.table_id in known_tables or record.detail.get("sink") in upkeep.sinks
            stands = record.outcome == FAILED and known
        if record.verb == RETAIN and record.table_id not in (LAKE, *upkeep.policies):
            stands = False  # its policy is gone, and its failure with it
        if stands:
            found.append(record)
    return found


def failure_text(record: Maintenance) -> str:
    name = f"{record.verb} {record.table}" if record.table else record.verb
    return f"{name} {record.outcome} ({record.detail.get('error', 'unknown')})"


def last_of_each_verb(upkeep: MaintenanceOverview, heads: Sequence[Head]) -> dict[str, LastRun | None]:
    """When each verb ran last and how it ended, and its failures."""
    last = {record.verb: record for record in upkeep.newest}
    failed = unanswered(upkeep, heads)
    return {verb: _last_run(last[verb], failed) if verb in last else None for verb in VERBS}


def _last_run(last: Maintenance, failed: Sequence[Maintenance]) -> LastRun:
    texts = tuple(failure_text(one) for one in failed if one.verb == last.verb)
    return LastRun(clock.format_time(last.ended_ms), last.outcome, last.table or None, texts)


def outcome_of(record: Maintenance) -> Outcome:
    return Outcome(clock.format_time(record.ended_ms), record.outcome)


def due_now(
    catalog: Catalog,
    heads: Sequence[Head],
    upkeep: MaintenanceOverview,
    keeping: MaintainSettings,
    age_s_max: float = 0.0,
) -> list[str]:
    """What a run of maintenance would probably do now."""
    now_ms = database_ms(catalog)
    found = [text for head in heads for text in due_of_table(head, upkeep, keeping, now_ms)]
    old = len(catalog.expiry.expirable(now_ms - clock.parse_duration_ms(keeping.keep_versions)))
    if old:
        found.append(f"expire: {count_of(old, 'version')} older than {keeping.keep_versions}")
    grace_ms = clock.parse_duration_ms(keeping.grace)
    states = catalog.expiry.count_dead(grace_ms, age_s_max=age_s_max)
    ended = len(catalog.journal.to_look_at(grace_ms))
    parts = [count_of(states, "state")] if states else []
    parts += [f"{count_of(ended, 'ended operation')} to check again"] if ended else []
    return [*found, *([f"sweep: {', '.join(parts)}"] if parts else [])]


def due_of_table(head: Head, upkeep: MaintenanceOverview, keeping: MaintainSettings, now_ms: int) -> list[str]:
    found = []
    policy, last = upkeep.policies.get(head.table_id), upkeep.last(RETAIN, head.table_id)
    if policy is not None and (last is None or last.outcome == FAILED or now_ms - last.ended_ms >= RETAIN_EVERY_MS):
        when = "never" if last is None else f"{last.outcome} at {clock.format_time(last.ended_ms)}"
        found.append(f"retain {head.table}: policy {policy.retention}, last run {when}")
    small = upkeep.small_files.get(head.table_id)
    if small is not None and small > _left_alone(upkeep.last(COMPACT, head.table_id), keeping):
        found.append(f"compact {head.table}: {small} small files")
    parts = _due_of_indexes(head, upkeep)
    return [*found, *([f"index {head.table}: {', '.join(parts)}"] if parts else [])]


def _due_of_indexes(head: Head, upkeep: MaintenanceOverview) -> list[str]:
    """Segments may be of files that the table has no more: at least so many files are without one."""
    mine = [one for one in upkeep.indexes if one.table_id == head.table_id]
    last = upkeep.last(INDEX, head.table_id)
    skipped: Mapping[str, int] = {} if last is None else last.detail.get("not_coverable", {})
    missing = max((head.files - one.files - skipped.get(one.index_id, 0) for one in mine), default=0)
    folding = sum(one.foldable for one in mine if one.foldable > SEGMENTS_MAX)
    broken = sum(one.broken for one in mine)
    parts = [f"{count_of(missing, 'file')} to cover"] if missing > 0 else []
    parts += [f"{folding} segments to fold"] if folding else []
    return parts + ([f"{count_of(broken, 'damaged segment')} to make again"] if broken else [])


def _left_alone(last: Maintenance | None, keeping: MaintainSettings) -> int:
    """This many small files do not need a compaction: too few, or as many as the last one found not worth it."""
    too_few = keeping.compact_files - 1
    if last is None or last.outcome not in ("nothing_to_do", "below_threshold"):
        return too_few
    if last.detail.get("files_min", keeping.compact_files) > keeping.compact_files:
        return too_few  # the last run had a higher threshold
    return max(too_few, int(last.detail.get("small_files", 0)))


def database_ms(catalog: Catalog) -> int:
    with catalog.database.read() as tx:
        return catalog.database.now_ms(tx)


def sum_known(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def ratio(part: int | None, whole: int) -> float | None:
    return None if part is None else round(part / whole, 3) if whole else 0.0
