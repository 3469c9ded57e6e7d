"""What one change does to one table: steps applied to its files, on paper, until the publish makes them true.

The table's working state is its live files at the head that the change planned on, without those removed so far and
with those staged so far; each step works on that state, so a later step of a transaction sees an earlier one. The steps
are kept with the rows that came in, as staged files: if the table moved in a way that matters, they are taken again on
the new head, without asking the caller for the rows a second time (protocol 1, plan again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata

from floodmark.catalog.fills import lacking
from floodmark.catalog.live import LiveFile, live_files
from floodmark.catalog.metadata import has_renamed_columns, schema_of
from floodmark.catalog.references import referrers_of
from floodmark.catalog.riders import PlanAgain, Rider
from floodmark.catalog.seal import Edit
from floodmark.errors import Conflict, Invalid
from floodmark.model import FileRecord, Head
from floodmark.rows.duplicates import find_duplicates
from floodmark.rows.keys import examples
from floodmark.rows.packed import unpack_positions
from floodmark.rows.rewrite import ALL, BY_KEY, BY_POSITIONS, BY_WHERE, NONE, Result, Rewrite, Source
from floodmark.rows.schema import arrow_schema, user_fields
from floodmark.rows.where import Where
from floodmark.write import refusals
from floodmark.write.by_key import rows_of_keys
from floodmark.write.planned import PlannedTable
from floodmark.write.prune import key_fields, may_hold_keys
from floodmark.write.reshape import check_condition, check_required, present_name, translated
from floodmark.write.shaped import Means
from floodmark.write.step import APPEND, DELETE, DELETE_KEYS, MERGE, OVERWRITE, RETAIN, Part, Step, TableState
from floodmark.write.working import WorkingFiles

if TYPE_CHECKING:
    pass


class TableChange(PlannedTable):
    def __init__(self, name: str, metadata: TableMetadata, head: Head | None, folder: str, means: Means) -> None:
        super().__init__(name, metadata, head, folder, means)
        self._steps: list[Step] = []
        # Files that came after planning and were looked at: none of their rows matter to the steps.
        self._looked: set[str] = set()
        # Staged files whose keys are unique; looking once is enough.
        self._unique: set[tuple[str, ...]] = set()

    # ── steps ──

    def take(self, step: Step) -> None:
        """Apply a step to the working state. An error leaves the state as it was: the caller may go on without it."""
        before = self._state.copy(), self.schema, self.metadata
        try:
            step = self._shaped(step)
            self._apply(step)
        except BaseException:
            self._state, self.schema, self.metadata = before
            self._state.leftovers = True
            raise
        self._steps.append(step)

    def _shaped(self, step: Step, *, anew: bool = False) -> Step:
        """The step with its rows in the table's shape, which becomes the one that they bring; staged again if need be.

        `anew`: the table's own shape may have changed since they were staged.
        """
        if step.verb == DELETE_KEYS and anew and step.spec_id != self.spec_id:
            return self._keys_again(step)
        if step.options.partial:
            return self._parts_shaped(step, anew=anew)
        if step.schema is None:
            return step
        source = translated(step.schema, step.planned or step.schema, self.schema)
        self._evolve(self.evolved(arrow_schema(source)) if step.options.evolve else self.schema)
        fits = step.schema == self.schema and step.spec_id == self.spec_id
        if fits or not (anew or step.options.evolve) or not step.incoming:
            return step
        # Columns that came meanwhile are filled in rows that were sent before, or null.
        fills = lacking(self.fills, [field.name for field in source.fields])
        target = self.target(fill_missing=True)
        unfilled = target.without(tuple(fill.field_id for fill in fills))
        unfilled.conformer(arrow_schema(source)).problems.raise_invalid()
        check_required(step.incoming, source, self.schema)
        self._state.leftovers = True
        incoming = self.staged_again(step.incoming, source, target, fills)
        return replace(step, incoming=incoming, schema=self.schema, spec_id=self.spec_id, planned=self.own)

    def _parts_shaped(self, step: Step, *, anew: bool) -> Step:
        """The rows of a partial merge under the ids that their columns have now; staged again if these are others."""
        sources = [translated(part.schema, step.planned or self.own, self.schema) for part in step.parts]
        for source in sources if step.options.evolve else ():
            self._evolve(self.evolved(arrow_schema(source)))
        parts = []
        for part, source in zip(step.parts, sources, strict=True):
            target, schema = self.part_target(self.schema, [column.name for column in source.fields])
            if (anew or step.options.evolve) and (part.schema != schema or step.spec_id != self.spec_id):
                target.conformer(arrow_schema(source)).problems.raise_invalid()
                check_required(part.records, source, schema)
                part = Part(schema, self.staged_again(part.records, source, target, ()))
            parts.append(part)
        incoming = tuple(record for part in parts for record in part.records)
        return replace(step, incoming=incoming, parts=tuple(parts), spec_id=self.spec_id, planned=self.own)

    def _keys_again(self, step: Step) -> Step:
        """Keys that were staged in partitions of another spec, staged again."""
        keys = Schema(*key_fields(self.schema))
        incoming = self.staged_again(step.incoming, keys, self.keys_target(), ())
        return replace(step, incoming=incoming, spec_id=self.spec_id, planned=self.own)

    def _apply(self, step: Step) -> None:
        if step.verb == MERGE:
            self._merge(step)
        elif step.verb == DELETE:
            self._remove(step)
        elif step.verb == DELETE_KEYS:
            self._delete_keys(step)
        elif step.verb == OVERWRITE:
            self._overwrite(step)
        elif step.verb == RETAIN:
            self._retain(step)
        else:
            self._append(step)

    def _append(self, step: Step) -> None:
        if self.key and step.incoming:
            self._check_unique(step)
            self._check_new(step)
        self._state.add(step.incoming)
        self._state.rows_added += step.rows

    def check_verb(self, verb: str) -> None:
        """Refuse what this table cannot do, before a row is staged for it."""
        if verb in (MERGE, DELETE_KEYS) and not self.key:
            raise refusals.no_key(self.name)
        referrers = referrers_of(self.metadata.properties) if verb == RETAIN else ()
        if referrers:
            raise refusals.referred_to(self.name, referrers[0].table)

    def _merge(self, step: Step) -> None:
        if not step.incoming:
            return
        self._check_unique(step)
        result = self._runner.run(
            Rewrite(
                self.target(),
                BY_KEY,
                self.key,
                incoming=step.paths,
                compare=step.options.skip_unchanged,
                newest_by=step.options.newest_by,
                held=step.held,
                refilled=tuple(fill.field_id for fill in self.fills) if step.options.partial else (),
            ),
            self._sources(self._may_hold(step, self.working_files())),
        )
        self._replace(result)
        cut: dict[int, list[str]] = {}
        for file in result.files:
            for number, packed in file.places:
                cut.setdefault(number, []).append(packed)
        if step.options.partial:
            self._add_parts(step, result, cut)
        else:
            self._state.add(self._without(step.incoming, cut))
        updated = sum(file.removed for file in result.files)
        same = sum(file.unchanged for file in result.files)
        self._state.rows_updated += updated
        self._state.rows_added += step.rows - updated - same

    def _add_parts(self, step: Step, result: Result, matched: Mapping[int, Sequence[str]]) -> None:
        """Add the rows of a partial merge: those that were completed, and those that no row of the table matched."""
        # The files of the columns that came in are never published.
        self._state.leftovers = True
        lacking: dict[tuple[int, ...], list[FileRecord]] = {}
        for completed in result.completed:
            lacking.setdefault(completed.lacking, []).extend(completed.records)
        number = 0
        for part in step.parts:
            absent = tuple(fill.field_id for fill in self.fills if fill.field_id not in part.held)
            new = self._new_rows(part, range(number, number + len(part.records)), matched)
            lacking.setdefault(absent, []).extend(self._stage_new(part, new, absent))
            number += len(part.records)
        for absent, records in lacking.items():
            fills = [fill for fill in self.fills if fill.field_id in absent]
            filled = self.staged_again(records, self.schema, self.target(), fills) if fills and records else records
            self._state.add(filled)

    def _new_rows(self, part: Part, numbers: range, matched: Mapping[int, Sequence[str]]) -> list[Source]:
        """The files of a part that hold rows whose key the table does not have, without the others."""
        found = []
        for number, record in zip(numbers, part.records, strict=True):
            packed = tuple(matched.get(number, ()))
            if sum(len(unpack_positions(text)) for text in packed) < record.rows:
                found.append(Source(record.path, record.rows, record.size_bytes, None, True, packed=packed))
        return found

    def _stage_new(self, part: Part, sources: Sequence[Source], absent: tuple[int, ...]) -> list[FileRecord]:
        """New rows of a partial merge as whole rows: columns that they do not bring are null, if they may be."""
        known = {*part.held, *absent}
        needed = [one.name for one in user_fields(self.schema) if one.required and one.field_id not in known]
        if sources and needed:
            raise refusals.new_rows_lack(self.name, needed, self._examples(sources[0]))
        target = self.target(fill_missing=True).without(absent)
        rewrite = Rewrite(target, BY_POSITIONS, source_schema_json=part.schema.model_dump_json())
        records = []
        for find in (NONE, BY_POSITIONS):
            some = [source for source in sources if bool(source.packed) == (find == BY_POSITIONS)]
            result = self._runner.run(replace(rewrite, find=find), some)
            records += [record for file in result.files for record in file.records]
        return records

    def _examples(self, source: Source) -> str:
        taken = np.concatenate([np.empty(0, np.int64), *(unpack_positions(text) for text in source.packed)])
        new = np.setdiff1d(np.arange(source.rows), taken)[:3]
        return "; ".join(examples(self._storage, source.path, key_fields(self.schema), new))

    def _overwrite(self, step: Step) -> None:
        if self.key and step.incoming:
            self._check_unique(step)
        self._check_inside(step)
        replaced = self._remove(step)
        if self.key and step.incoming:
            self._check_new(step)
        self._state.add(step.incoming)
        self._state.rows_added += step.rows - replaced
        self._state.rows_updated += replaced
        self._state.rows_deleted -= replaced

    def _remove(self, step: Step) -> int:
        """Take out the rows that a condition matches; returns how many of them come in again under the same key."""
        where = self._where(step)
        self._runner.check(where, self.schema)
        files = [file for file in self.working_files() if where.may_match(file, self.metadata)]
        whole = [file for file in files if where.must_match(file, self.metadata)]
        if not self.key:
            # Nobody asks which rows went: files that match as a whole need not be opened.
            for file in whole:
                self._state.drop(file)
            self._state.rows_deleted += sum(file.rows for file in whole)
        rewrite = Rewrite(
            self.target(),
            ALL,
            self.key,
            incoming=step.paths if self.key else (),
            where=where.text,
            deletions=bool(self.key),
            existed_in=tuple(self._state.removed),
        )
        results = [self._runner.run(rewrite, self._sources(whole) if self.key else [])]
        gone = {file.path for file in whole}
        rest = [file for file in files if file.path not in gone]
        results.append(self._remove_matching(replace(rewrite, find=BY_WHERE), where, rest))
        for result in results:
            self._replace(result)
        self._state.rows_deleted += sum(file.removed for result in results for file in result.files)
        return sum(file.replaced for result in results for file in result.files)

    def _delete_keys(self, step: Step) -> None:
        """Take out the rows that have one of these keys; a key that no row has changes nothing."""
        # The keys themselves are files of this operation that its commit does not name.
        self._state.leftovers = True
        held = {file.path for file in self._look_for_keys(step, self.working_files()).files if file.matched}
        files = [file for file in self.working_files() if file.path in held]
        rewrite = Rewrite(self.target(), BY_POSITIONS, self.key, deletions=True, existed_in=tuple(self._state.removed))
        result = self._runner.run(rewrite, rows_of_keys(self._storage, self._sources(files), step.paths, self.schema))
        self._replace(result)
        self._state.rows_deleted += sum(file.removed for file in result.files)

    def _where(self, step: Step) -> Where:
        """The step's condition; only an overwrite may mean everything by leaving it out."""
        everything = step.options.where is None and step.verb == OVERWRITE
        return Where.everything() if everything else Where.parse(step.options.where or "", self.schema)

    def _remove_matching(self, rewrite: Rewrite, where: Where, files: Sequence[LiveFile]) -> Result:
        if where.plain or not files:
            return self._runner.run(rewrite, self._sources(files))
        found = self._find_positions(where, [file.path for file in files])
        sources = self._sources([file for file in files if file.path in found])
        sources = [replace(source, positions=tuple(found[source.path])) for source in sources]
        return self._runner.run(replace(rewrite, find=BY_POSITIONS), sources)

    def _find_positions(self, where: Where, paths: Sequence[str]) -> Mapping[str, Sequence[str]]:
        # The positions themselves are files of this operation that its commit does not name.
        self._state.leftovers = True
        arrow = True if has_renamed_columns(self.metadata) else None
        return self._runner.find_positions(where, paths, self.schema, self.folder, arrow=arrow)

    def _retain(self, step: Step) -> None:
        """Take out what the step's remover says, of rows that are there; no deletion is written down for them."""
        if step.options.remover is None or self.head is None:
            raise Invalid("there is nothing to take rows out by", table=self.name)
        there = [file for path, file in self._base().items() if path not in self._state.removed]
        removed = step.options.remover.remove(self._at(self.head, there))
        for file in removed.dropped:
            self._state.drop(file)
        for result in removed.results:
            self._replace(result)
        self._state.rows_deleted += removed.rows

    def _at(self, head: Head, files: Sequence[LiveFile]) -> TableState:
        return TableState(head, self.metadata, self.schema, files, self._runner, self.target())

    # ── checks of what comes in ──

    def _check_unique(self, step: Step) -> None:
        known = step.paths in self._unique
        twice = [] if known else find_duplicates(self._storage, step.paths, key_fields(self.schema))
        self._unique.add(step.paths)
        if twice:
            raise refusals.keys_twice(self.name, twice)

    def _check_new(self, step: Step) -> None:
        """No live row has a key that comes in."""
        found = self._look_for_keys(step, self.working_files())
        if found.matched:
            raise refusals.keys_there(self.name, found.matched, found.examples())

    def _look_for_keys(self, step: Step, files: Sequence[LiveFile]) -> Result:
        rewrite = Rewrite(self.target(), BY_KEY, self.key, incoming=step.paths, look_only=True)
        return self._runner.run(rewrite, self._sources(self._may_hold(step, files)))

    def _check_inside(self, step: Step) -> None:
        """Rows that overwrite a part of a table belong to that part: otherwise a second run would not replace them."""
        if step.options.where is None or not step.incoming:
            return
        where = Where.parse(step.options.where, self.schema)
        outside = step.rows - self._count_matching(where, self._staged(step.incoming))
        if outside:
            raise refusals.rows_outside(self.name, outside, step.options.where)

    def _count_matching(self, where: Where, files: Sequence[LiveFile]) -> int:
        rewrite = Rewrite(self.target(), BY_WHERE, where=where.text, look_only=True)
        return self._remove_matching(rewrite, where, files).matched

    # ── files ──

    def _may_hold(self, step: Step, files: Sequence[LiveFile]) -> list[LiveFile]:
        return may_hold_keys(files, step.incoming, self.metadata, self.schema, self.spec_id)

    def _without(self, records: Sequence[FileRecord], unchanged: dict[int, list[str]]) -> list[FileRecord]:
        """The incoming files without the rows that are there already just so."""
        kept = [record for number, record in enumerate(records) if number not in unchanged]
        if unchanged:
            self._state.leftovers = True
            cut = {records[number].path: tuple(packed) for number, packed in unchanged.items()}
            sources = self._sources([file for file in self._staged(records) if file.path in cut])
            sources = [replace(source, packed=cut[source.path]) for source in sources]
            result = self._runner.run(Rewrite(self.target(), BY_POSITIONS), sources)
            kept += [record for file in result.files for record in file.records]
        return kept

    # ── seal, look again, plan again ──

    def edit(self) -> Edit | None:
        """What the steps come to; None if nothing. Steps that read and changed nothing are still to be checked."""
        checked = self.head is not None and (bool(self.key) or any(step.verb != APPEND for step in self._steps))
        bound = self.strict or self.depended
        checked = checked or (bound and self.head is not None)
        if not (self._state.changed or self.head is None or bound or (checked and self._steps)):
            return None
        return self._edit(checked=checked)

    def riders(self) -> list[Rider]:
        """What the removers want to hold in the publish, if there will be one."""
        removers = [
            step.options.remover for step in self._steps if step.options.remover is not None and self._state.changed
        ]
        return [rider for remover in removers for rider in remover.riders()]

    def recheck(self, head: Head) -> None:
        """The table is at another head than planned, with all files that were read: do rows that came matter?"""
        known = self._base()
        now = live_files(self._files, head, self.schema)
        came = [file for file in now if file.path not in known and file.path not in self._looked]
        for step in self._steps:
            if self.key and step.incoming and self._look_for_keys(step, came).matched:
                raise PlanAgain(self.name, "a row with one of these keys came meanwhile")
            if step.verb in (DELETE, OVERWRITE) and self._came_inside(step, came):
                raise PlanAgain(self.name, "a row that the condition matches came meanwhile")
            if step.options.remover is not None:
                step.options.remover.recheck(self._at(head, now))
        self._looked.update(file.path for file in came)

    def _came_inside(self, step: Step, came: Sequence[LiveFile]) -> bool:
        where = self._where(step)
        files = [file for file in came if where.may_match(file, self.metadata)]
        if any(where.must_match(file, self.metadata) for file in files):
            return True
        return bool(self._count_matching(where, files))

    def plan_again(self, head: Head, metadata: TableMetadata) -> None:
        """Take the steps again on the table's new head; rows staged for another shape are staged again first."""
        if self._decided or self.strict:
            raise Conflict("the table moved under what was decided for it", table=self.name, advice="Run it again.")
        self.head, self.metadata = head, metadata
        self.own = self.schema = schema_of(metadata, head)
        steps, self._steps, self._state, self._looked = (
            self._steps,
            [],
            WorkingFiles(self.folder, leftovers=True),
            set(),
        )
        for step in steps:
            self.take(self._again(step))

    def _again(self, step: Step) -> Step:
        """The step in the table's present shape. What does not go into it any more is the caller's to say anew."""
        try:
            self.check_verb(step.verb)
            planned = step.planned or self.own
            if step.options.where is not None:
                check_condition(step.options.where, planned, self.own)
            if step.options.newest_by:
                named = present_name(step.options.newest_by, planned, self.own)
                step = replace(step, options=replace(step.options, newest_by=named))
            return self._shaped(step, anew=True)
        except Invalid as error:
            if step.options.evolve:
                raise
            raise Conflict(
                "the table's shape changed under this write",
                table=self.name,
                cause=error,
                advice="Nothing was written. Run it again with rows for the table's new shape.",
            ) from error
