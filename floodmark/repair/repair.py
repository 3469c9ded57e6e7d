"""Repair: a table that another writer changed without the publisher becomes Floodmark's again, by one ordinary publish.

Either choice is a commit on our own newest state, and moves the pointer from theirs to ours. `revert` puts our files
back. `accept` makes their rows ours, as a commit of the actor `external`, with sequences above any that they gave (I5),
so that followers get each row once. An unclear case is left to the caller: the result lists both choices, and the
reason. The other writer may continue meanwhile: then the pointer is not the one that was judged, and the repair ends in
Conflict with nothing changed. A repair does not run recovery first, since recovery refuses while a table is drifted and
an operation waits for it. Crash before the publish: recovery rolls it back, with one audit row; after: it is done,
audited by the publish.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from floodmark.catalog.history import drifted_tables
from floodmark.catalog.riders import AuditRider, PlanAgain
from floodmark.commit.catalog import Catalog
from floodmark.commit.drift import (
    CHANGED,
    DROPPED,
    OVERWRITTEN,
    REWRITTEN,
    Drift,
    classify,
    happened_text,
    moved_branches,
    other_names_text,
    ways_text,
    with_names,
)
from floodmark.commit.intent import Intent
from floodmark.commit.metadata import new_snapshot_id
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, publish
from floodmark.commit.seal import Edit
from floodmark.engine import Engine
from floodmark.errors import Conflict, Corrupt, FloodmarkError, Invalid
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.model import Commit, CurrentTable
from floodmark.repair.foreign_rows import ForeignRows, TakenIn
from floodmark.repair.history_files import HistoryCheck, look_at_head, look_at_history, versions_text

KIND = "repair"
EXTERNAL = "external"
ACCEPT, REVERT = "accept", "revert"
NOTHING_TO_DO, PLANNED, UNCLEAR = "nothing_to_do", "planned", "unclear"
FILES_GONE = "files_gone"
NOT_THE_SAME = "its snapshots claim that files were only rewritten, but the rows differ"
DONE = {ACCEPT: "accepted", REVERT: "reverted"}
# Earlier names of the two, for scripts of before; gone with the next version.
EARLIER_NAMES = {"take_in": ACCEPT, "put_back": REVERT}


@dataclass(frozen=True)
class Repair:
    """What happened to a table and what a repair does about it, or did.

    outcome: nothing_to_do, planned, unclear, accepted or reverted. `choice` is what it does, None if an operator must
    choose; `ways` are the possible choices, as sentences.
    """

    table: str
    branch: str
    happened: str
    outcome: str
    choice: str | None = None
    detail: str = ""
    ways: tuple[str, ...] = ()
    rows_added: int = 0
    rows_removed: int = 0
    version: int | None = None
    # Versions that cannot be read any more, because files of this table are missing or damaged.
    unreadable: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Json]:
        return {**asdict(self), "ways": list(self.ways), "unreadable": list(self.unreadable)}


@dataclass(frozen=True)
class _DriftedTable:
    """A drifted table, what happened, and why its rows do not fit, if they do not."""

    current: CurrentTable
    drift: Drift
    rows: ForeignRows
    misfit: str
    files: HistoryCheck

    @property
    def unclear(self) -> str:
        return self.drift.unclear or self.misfit

    @property
    def lost(self) -> str:
        """Which files of our own newest state are missing or damaged; empty if none is."""
        faults = self.files.gone_from_heads
        return f"{len(faults)} file(s) of Floodmark's own newest state: {faults[0]}" if faults else ""

    @property
    def usual(self) -> str | None:
        """The default choice."""
        if self.unclear:
            return None
        if self.drift.happened in (CHANGED, DROPPED, REWRITTEN):
            return None if self.lost else REVERT
        return ACCEPT

    @property
    def can_take(self) -> bool:
        rows_moved = self.drift.added or self.drift.removed
        return bool(rows_moved) and not self.misfit and (not self.drift.unclear or self.drift.takeable)


def preview(engine: Engine, table: str | None = None, choice: str | None = None) -> list[Repair]:
    """What a repair would do, of one table or of all that drifted. Writes nothing (I17).

    A table that did not drift, and whose files are missing or damaged, is named too: no repair restores those.
    """
    choice = _checked_choice(choice)
    catalog = engine.catalog
    found = drifted_tables(catalog.database)
    if table is not None and table not in found:
        return [_undrifted(catalog, table)]
    if table is not None:
        found = {table: found[table]}
    planned = [_planned(_judge(engine, name, branches), choice) for name, branches in found.items()]
    return planned if table is not None else [*planned, *_damaged(catalog, found)]


def _undrifted(catalog: Catalog, table: str) -> Repair:
    branch = _branch_of(catalog, table)
    files = look_at_history(catalog, table, deep=True)
    if not files.versions:
        return Repair(table, branch, "nothing", NOTHING_TO_DO)
    return Repair(
        table,
        branch,
        FILES_GONE,
        UNCLEAR,
        detail=_unreadable_text(files),
        ways=("a repair cannot restore files: restore them from a copy.",),
        unreadable=files.versions,
    )


def _damaged(catalog: Catalog, drifted: Collection[str]) -> list[Repair]:
    faults = look_at_history(catalog, deep=True).faults
    names = dict.fromkeys(fault.table for fault in faults if fault.table not in drifted)
    there = {head.table for branch in catalog.branches.list() for head in catalog.history.heads(branch.name)}
    # Files that only versions of a dropped table miss are reported by `repair --give-up` and `doctor`.
    return [_undrifted(catalog, name) for name in names if name in there]


def repair(engine: Engine, table: str, choice: str | None = None) -> Repair:
    """Make a drifted table Floodmark's again. Invalid if an operator must choose first, or the choice is impossible."""
    choice = _checked_choice(choice)
    catalog = engine.catalog
    branches = drifted_tables(catalog.database).get(table)
    if branches is None:
        return _undrifted(catalog, table)
    judged = _judge(engine, table, branches)
    planned = _planned(judged, choice)
    if planned.choice is None:
        raise _undecided(planned)
    commit = _publish(catalog, judged, planned.choice, engine.actor)
    return replace(planned, outcome=DONE[planned.choice], version=commit.version)


def repair_all(engine: Engine, table: str | None = None, choice: str | None = None) -> list[Repair]:
    """Repair one table, or all that drifted, one publish each. Of all, those that need a choice are only returned."""
    planned = preview(engine, table, choice)
    if table is not None and planned[0].outcome == UNCLEAR:
        raise _undecided(planned[0])
    return [one if one.outcome == UNCLEAR else repair(engine, one.table, choice) for one in planned]


def _undecided(planned: Repair) -> FloodmarkError:
    if planned.unreadable and planned.happened in (CHANGED, DROPPED, FILES_GONE):
        return Corrupt(
            "files of the table are gone", table=planned.table, reason=planned.detail, advice=planned.ways[0]
        )
    return Invalid(
        "it is not clear what to do with this table",
        table=planned.table,
        reason=planned.detail,
        advice=" ".join(planned.ways),
    )


def _checked_choice(choice: str | None) -> str | None:
    if choice in EARLIER_NAMES:
        return EARLIER_NAMES[choice]
    if choice not in (None, ACCEPT, REVERT):
        raise Invalid("unknown kind of repair", choice=choice, advice=f"Choose {ACCEPT} or {REVERT}.")
    return choice


def _branch_of(catalog: Catalog, table: str) -> str:
    """A branch that has the table; NotFound if none does."""
    for branch in catalog.branches.list():
        if any(head.table == table for head in catalog.history.heads(branch.name)):
            return branch.name
    return catalog.history.head(table).branch


def _judge(engine: Engine, table: str, branches: list[str]) -> _DriftedTable:
    """Look at the branch that the other writer wrote on; if none, at main or the first that has the table."""
    catalog = engine.catalog
    current = catalog.history.current_tables(branches[0], [table])[table]
    moved = [branch for branch in branches if branch in moved_branches(catalog.files, current)]
    if moved and moved[0] != branches[0]:
        current = catalog.history.current_tables(moved[0], [table])[table]
    drift = classify(catalog.files, current)
    if drift is None:
        raise Conflict("the table was repaired meanwhile", table=table, advice="Look again.")
    drift = with_names(catalog.database, drift, catalog.files.metadata(current.pointer_known).location)
    rows = ForeignRows(catalog, engine.sessions, current, drift)
    if drift.happened == REWRITTEN and rows.new_rows is None:
        # Then it does not match its snapshot.
        drift = replace(drift, happened=OVERWRITTEN, unclear=NOT_THE_SAME, takeable=True)
        rows = ForeignRows(catalog, engine.sessions, current, drift)
    takeable = (drift.added or drift.removed) and (not drift.unclear or drift.takeable)
    return _DriftedTable(
        current, drift, rows, rows.misfit() if takeable else "", look_at_history(catalog, table, deep=True)
    )


def _planned(judged: _DriftedTable, choice: str | None) -> Repair:
    drift = judged.drift
    if choice == ACCEPT and not judged.can_take:
        raise Invalid(
            "the change of the other writer cannot be accepted",
            table=drift.table,
            reason=judged.unclear or "no row was added or removed",
            advice=" ".join(_ways(judged)),
        )
    chosen = choice or judged.usual
    said = (happened_text(drift), _same_text(judged), judged.misfit, _unreadable_text(judged.files))
    detail = "; ".join(text for text in said if text)
    taken = chosen == ACCEPT
    new = judged.rows.new_rows
    return Repair(
        drift.table,
        drift.branch,
        drift.happened,
        UNCLEAR if chosen is None else PLANNED,
        chosen,
        detail,
        _ways(judged),
        rows_added=(drift.rows_added if new is None else new.num_rows) if taken else 0,
        rows_removed=drift.rows_removed if taken and new is None else 0,
        unreadable=judged.files.versions,
    )


def _same_text(judged: _DriftedTable) -> str:
    """The result of comparing the rows."""
    new = judged.rows.new_rows
    if new is None:
        return ""
    if not new.num_rows:
        return "they are the same rows, by checksum, so Floodmark's own files stay: no row counts as new"
    return f"all earlier rows still exist, by checksum, and keep their sequences; {new.num_rows} row(s) are new"


def _unreadable_text(files: HistoryCheck) -> str:
    if not files.versions:
        return ""
    return (
        f"files are missing or damaged, so version(s) {versions_text(files.versions)} cannot be read: "
        f"{files.faults[0]}; restore them from a copy, or `floodmark repair --give-up` shows which can be given up"
    )


def _ways(judged: _DriftedTable) -> tuple[str, ...]:
    drift = judged.drift
    back = f"--revert: the table gets the state that Floodmark left; {_left_behind(judged)}"
    if judged.lost:
        back = f"--revert is not possible before these are restored from a copy: {judged.lost}."
    if judged.can_take:
        again = drift.removed and judged.rows.new_rows is None
        new = " Rows in rewritten files count as new." if again else ""
        return (f"--accept: their rows become a commit of `{EXTERNAL}`, with new sequences.{new}", back)
    if not judged.unclear:
        return (back,)
    return (f"--accept is not possible: {judged.unclear}. {ways_text(drift)}.", back)


def _left_behind(judged: _DriftedTable) -> str:
    drift = judged.drift
    names = [entry.data_file.file_path for entry in drift.added]
    if drift.other_names:
        return f"{other_names_text(drift)}."
    if not names and drift.unclear and drift.pointer:
        return f"their files stay on disk, unreferenced; the catalog pointed to {drift.pointer}."
    if not names and judged.files.versions:
        return f"version(s) {versions_text(judged.files.versions)} stay unreadable."
    if not names:
        return "none of their rows is lost."
    new = judged.rows.new_rows
    if new is not None and not new.num_rows:
        return f"their {len(names)} file(s) with the same rows stay on disk, unreferenced: {', '.join(names[:3])}."
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"their {drift.rows_added} row(s) stay on disk, unreferenced: {', '.join(names[:3])}{more}."


# ── the repair ──


def _publish(catalog: Catalog, judged: _DriftedTable, choice: str, actor: str) -> Commit:
    if choice != ACCEPT:
        _check_files(catalog, judged)
    detail = f"{judged.drift.table}: {happened_text(judged.drift)} (asked by {actor})"
    intent = Intent(
        KIND,
        judged.drift.branch,
        EXTERNAL if choice == ACCEPT else actor,
        f"{'accept' if choice == ACCEPT else 'revert'} {detail}",
    )
    return publish(catalog, intent, _Repairing(catalog, judged, choice, detail))


class _Repairing(PublishPlan):
    """Not repeatable, since the other writer may have gone on: after a crash, recovery rolls it back."""

    def __init__(self, catalog: Catalog, judged: _DriftedTable, choice: str, detail: str) -> None:
        self._catalog = catalog
        self._judged = judged
        self._choice = choice
        self._audit = AuditRider(KIND, "drifted", DONE[choice], detail)
        self._location = judged.rows.metadata.location
        self._taken: TakenIn | None = None

    def start(self) -> Start:
        return Start([self._location])

    def stage(self, work: Publication) -> None:
        if self._choice == ACCEPT:
            self._taken = self._judged.rows.take(work.operation.folder(self._location, "data"))
        # Crash here: removed keys, and rows staged anew, in the operation's own folder; recovery deletes them.
        hit(f"{KIND}.rewritten")

    def plan(self) -> Planned:
        edit = _edit(self._judged, self._location, self._taken)
        return Planned((edit, *_depended(self._catalog, self._judged, self._choice)), audit=self._audit)

    def plan_again(self, lost: PlanAgain) -> None:
        raise Conflict(
            "the table changed while it was repaired", table=lost.table, reason=lost.reason, advice="Look again."
        ) from lost

    @property
    def used_spark(self) -> bool:
        return self._judged.rows.used_spark


def _check_files(catalog: Catalog, judged: _DriftedTable) -> None:
    """The process that dropped the table may have deleted its files: then nothing is left to revert to."""
    head = judged.current.head
    gone = look_at_head(catalog, head)
    if gone:
        raise Corrupt(
            "files of the table are gone",
            table=head.table,
            files=len(gone),
            first=gone[0].location,
            problem=gone[0].problem,
            advice="Nothing was changed. Restore them from a copy of the storage, then repair the table.",
        )


def _depended(catalog: Catalog, judged: _DriftedTable, choice: str) -> list[Edit]:
    """Tables that rows refer to, or that refer to them: they must be unchanged since they were read."""
    if choice != ACCEPT:
        return []
    return [
        Edit.at(head, catalog.files.metadata(head.metadata_location).location, checked=True)
        for head in judged.rows.references.others
    ]


def _edit(judged: _DriftedTable, location: str, taken: TakenIn | None) -> Edit:
    """One write on our own newest state, which replaces the pointer that was judged and no other."""
    head = judged.current.head
    revert = replace(
        Edit.at(head, location, new_snapshot_id(), checked=True),
        pointer_found=judged.drift.pointer or "",
        sequence_above=judged.drift.sequence,
    )
    if taken is None:
        return revert
    return replace(
        revert,
        added=taken.added,
        removed=taken.removed,
        deletions=taken.deletions,
        rows_added=taken.rows_added,
        rows_updated=taken.rows_updated,
        rows_deleted=taken.rows_deleted,
    )
