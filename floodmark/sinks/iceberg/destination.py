"""A sink into a table of another Iceberg catalog: the rows of a unit and the unit itself in one commit of that table.

    look      the table's property names its unit: this one → done; the one before → go on; else Corrupt, also if
              this catalog has no such unit: then the catalog was rolled back
    stage     files under <table>/data/floodmark-<sink>/<unit>/<attempt>/, nothing refers to them
    commit    one snapshot, and the property, if the table is still in the state that was read; else look again
    clean     what other attempts of the unit left is deleted, then the unit is acknowledged

Exactly once (I9): the property and the rows are one commit, which the table's catalog accepts only on the state that
was read. So a retry after a lost reply, a second run and a zombie find the unit in the table, or are refused; nothing
is sent blindly (I13). A unit without a row is a commit too, so that the lineage moves with every unit. A ship never
compacts.
"""

from __future__ import annotations

import json
import random
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from floodmark import clock, log
from floodmark.catalog.unit import ACKNOWLEDGED, Part, Shipped, Unit, UnitLog, Watch
from floodmark.catalog.units import refill, rolled_back
from floodmark.commit.live_files import LiveFile
from floodmark.commit.metadata import add_schema, new_snapshot_id
from floodmark.errors import Conflict, Corrupt, FloodmarkError, Unavailable
from floodmark.failpoints import hit
from floodmark.model import FileRecord
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.reading.shipment import Shipment
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.session import Sessions
from floodmark.rows.staging.stage import StageTarget
from floodmark.runs import Stopped
from floodmark.sinks.iceberg.clean import clean_unit, unit_folders
from floodmark.sinks.iceberg.commit import LOST, SINK_NOTE, PlannedCommit, build_commit, commit, next_sequence
from floodmark.sinks.iceberg.stage import StagedUnit, merge_by_key, shipped_columns, stage_unit
from floodmark.sinks.iceberg.table import IcebergPlace, IcebergState, SentUnit, unit_property
from floodmark.sinks.settings import IcebergSettings
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyiceberg.schema import Schema

# How often a commit is tried while others commit to the same table, and the maximum wait in between.
TRIES_MAX = 12
WAIT_S_MAX = 2.0
# The whole unit is one part: one commit brings it, or none.
WHOLE = Part(0, 1)


class IcebergDestination:
    def __init__(self, settings: IcebergSettings, storage: Storage, sessions: Sessions) -> None:
        self.settings = settings
        self.sessions = sessions
        self.source = storage

    @cached_property
    def place(self) -> IcebergPlace:
        return IcebergPlace(self.settings, self.source)

    def ship(self, unit: Unit, shipment: Shipment, log: UnitLog, watch: Watch) -> Shipped:
        """Ship the unit to its table and acknowledge it, once."""
        parts = log.parts()
        if any(part.state == ACKNOWLEDGED for part in parts):
            return Shipped()
        log.seal([] if parts else [WHOLE])
        # Crash here: nothing of the unit has reached the destination.
        hit("unit.sealed")
        with closing(self.place):
            return _Attempt(self, unit, shipment, log, watch).run()


@dataclass(frozen=True)
class _Plan:
    """The unit's staged rows, for which schema and layout of the table; `schema` if that is a new one."""

    target: StageTarget
    schema: Schema | None
    staged: StagedUnit


class _Attempt:
    """One try to ship a unit to its table; it owns what it stages."""

    def __init__(
        self, destination: IcebergDestination, unit: Unit, shipment: Shipment, log: UnitLog, watch: Watch
    ) -> None:
        self.id = clock.new_id()
        self._destination = destination
        self._place = destination.place
        self._unit = unit
        self._shipment = shipment
        self._log = log
        self._watch = watch
        self._runner = Runner(self._place.storage, destination.sessions, self.id)
        # One per sink and table of the lake: several of them may ship into one table.
        self._property = unit_property(unit.sink_id, unit.table_id)
        self._folders: tuple[str, ...] = ()
        # A commit has succeeded, or may still succeed: what it names must not be deleted.
        self._may_exist = False

    def run(self) -> Shipped:
        try:
            state, sent = self._bring()
        except BaseException:
            self._give_up()
            raise
        # Crash here: the table has rows and property, the lake has no record of it; the next try finds them.
        hit("unit.committed")
        # Before the unit is acknowledged: afterwards no run would look at it again.
        clean_unit(self._place.storage, state, sent, self._unit)
        detail = {"rows": sent.rows, "deletions": sent.deletions, "bytes": sent.bytes, "snapshot": sent.snapshot}
        self._log.acknowledge([replace(WHOLE, detail=json.dumps(detail))], destination=state.id)
        hit("unit.acknowledged")
        if sent.attempt != self.id:
            return Shipped()
        return Shipped(sent.rows, sent.deletions, sent.bytes, parts=1)

    # ── look, stage, commit ──

    def _bring(self) -> tuple[IcebergState, SentUnit]:
        """The table once it has the unit, and its property of the unit."""
        plan: _Plan | None = None
        error: Exception | None = None
        for tries in range(TRIES_MAX + 1):
            state = self._look(first=tries == 0)
            sent = self._found(state)
            if sent is not None:
                return state, sent
            if tries == TRIES_MAX:
                break
            if tries > 1 and self._watch.wait(random.uniform(0, min(WAIT_S_MAX, 0.01 * 2**tries))):
                raise Stopped
            plan = self._plan(state, plan)
            error = self._commit(state, self._change(state, plan))
        if error is not None:
            raise Unavailable(
                "the destination's catalog did not confirm the unit, and does not have it",
                table=state.name,
                unit=self._unit.id,
                cause=error,
                advice="The next run reads the table again and continues from there.",
            ) from error
        raise Conflict(
            "the destination's table kept changing",
            table=state.name,
            unit=self._unit.id,
            tries=TRIES_MAX,
            advice="Nothing of the unit was committed; the next run tries again.",
        )

    def _look(self, *, first: bool) -> IcebergState:
        state = self._place.load(self._unit.table)
        if state is not None:
            return state
        name = ".".join(self._place.identifier(self._unit.table))
        if not first:
            raise Conflict("the destination's table was dropped meanwhile", table=name, unit=self._unit.id)
        if self._settled is not None:
            raise self._strange(name, "the destination's table is gone", None, None)
        return self._place.create(self._unit.table, shipped_columns(self._shipment), self._shipment.key)

    def _found(self, state: IcebergState) -> SentUnit | None:
        """The table's property of this unit, if it has it; Corrupt if it does not end where the units
        before it ended.
        """
        unit = self._unit
        sent = state.sent(self._property)
        if sent is not None and sent.lake == unit.lake and sent.unit != unit.id and sent.epoch >= unit.epoch:
            self._check_known(state, sent)
        mine = sent is not None and (sent.lake, sent.epoch) == (unit.lake, unit.epoch)
        if self._log.destination() not in (None, state.id):
            raise self._strange(state.name, "the destination has another table than before", sent, None)
        if sent is None or not mine:
            if sent is not None and sent.lake == unit.lake and sent.epoch > unit.epoch:
                raise self._strange(state.name, "the destination has units of a newer epoch", sent, None)
            # Another incarnation of the lake: only the first unit of an epoch, which an operator chose, may follow it.
            self._check_end(state, sent, None)
            return None
        if state.went_back(sent):
            # The property does not match what the table holds: where its rows end is unknown.
            raise self._strange(
                state.name, "the destination's table was rolled back to a state before a unit", sent, None
            )
        if sent.until >= unit.until:
            return sent
        self._check_end(state, sent, sent.until)
        return None

    def _check_end(self, state: IcebergState, sent: SentUnit | None, until: int | None) -> None:
        """Check that the table ends where the lake's last unit ended: nothing was lost in between."""
        if until != self._settled:
            raise self._strange(state.name, "the destination does not have what this sink sent to it", sent, until)

    def _check_known(self, state: IcebergState, sent: SentUnit) -> None:
        """Check that this catalog has the newest unit of the table: else its sequences were given to other rows."""
        if not self._log.knows(sent.unit, sent.epoch):
            raise rolled_back(self._unit, sent.unit, destination=state.name, has_epoch=sent.epoch, has_until=sent.until)

    @cached_property
    def _settled(self) -> int | None:
        return self._log.settled_until()

    def _strange(self, table: str, message: str, sent: SentUnit | None, until: int | None) -> Corrupt:
        """`until`: where the rows of the table end, if that is certain."""
        unit = self._unit
        return Corrupt(
            f"{message}: it was restored, or created again",
            destination=table,
            unit=unit.id,
            epoch=unit.epoch,
            since=unit.since,
            has_epoch=None if sent is None else sent.epoch,
            has_until=None if sent is None else sent.until,
            advice=refill(unit.sink, unit.table, until),
        )

    def _plan(self, state: IcebergState, before: _Plan | None) -> _Plan:
        """The unit's rows in the table's schema and layout: those staged before, unless these changed since."""
        metadata = state.metadata
        known = [schema.schema_id for schema in metadata.schemas]
        wider = evolve_schema(
            metadata.schema(),
            shipped_columns(self._shipment),
            last_column_id=metadata.last_column_id,
            next_schema_id=max(known) + 1,
        )
        self._folders = unit_folders(state, self._unit, self.id)
        target = StageTarget.of(metadata, self._folders[0], self._place.storage, schema=wider, fill_missing=True)
        if before is not None and _same_shape(before.target, target):
            return _Plan(target, wider, before.staged)
        staged = stage_unit(
            self._shipment,
            self._destination.source,
            target,
            self._place.storage,
            self._destination.sessions,
            f"floodmark-{self.id}",
            self._watch,
        )
        log.get().info("staged", unit=self._unit.id, table=state.name, rows=staged.rows, files=len(staged.records))
        return _Plan(target, wider, staged)

    def _change(self, state: IcebergState, plan: _Plan) -> PlannedCommit:
        """What the commit does to the table: it removes rows with one of the unit's keys and adds the unit's rows."""
        unit, staged = self._unit, plan.staged
        carried: tuple[FileRecord, ...] = ()
        removed: tuple[LiveFile, ...] = ()
        if self._shipment.key and staged.paths:
            metadata = state.metadata if plan.schema is None else add_schema(state.metadata, plan.schema)
            carried, removed = merge_by_key(
                staged, state.live(), metadata, plan.target, self._shipment.key, self._runner
            )
        sent = SentUnit(
            unit.lake,
            unit.epoch,
            unit.since,
            unit.until,
            unit.id,
            self.id,
            snapshot=new_snapshot_id(),
            sequence=next_sequence(state),
            rows=staged.rows,
            deletions=staged.deletions,
            bytes=staged.size_bytes,
        )
        return PlannedCommit(
            snapshot=sent.snapshot,
            folder=self._folders[1],
            added=(*staged.records, *carried),
            removed=removed,
            schema=plan.schema,
            properties={self._property: sent.to_json()},
            note={"floodmark-unit": unit.id, "floodmark-sink": unit.sink, SINK_NOTE: unit.sink_id},
        )

    def _commit(self, state: IcebergState, change: PlannedCommit) -> Exception | None:
        """Call the table's catalog once. Returns the error if the outcome is unknown."""
        built = build_commit(self._place, state, change)
        # A run that was taken over, or a sink that was paused, stops here.
        self._log.seal([])
        # Crash here: files at the destination that nothing refers to; the process that commits the unit deletes them.
        hit("unit.staged")
        before, self._may_exist = self._may_exist, True
        outcome, error = commit(self._place, built)
        if outcome == LOST:
            # Not committed by this call. If an earlier reply was lost, that commit may still succeed.
            self._may_exist = before
        log.get().info("commit of a unit", unit=self._unit.id, table=state.name, outcome=outcome)
        return error

    def _give_up(self) -> None:
        """Delete what this attempt staged, unless a commit may name it; a crash leaves that to the next try."""
        if not self._may_exist:
            for folder in self._folders:
                with suppress(FloodmarkError):
                    self._place.storage.delete_prefix(folder)


def _same_shape(one: StageTarget, other: StageTarget) -> bool:
    return (one.schema_json, one.spec_json) == (other.schema_json, other.spec_json)
