"""Changes between two sequences, read without Spark: every key once, nothing outside, and folded they are the table."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

from floodmark import clock
from floodmark.commit.live_files import LiveFile, seq_field_id
from floodmark.commit.manifests import data_file
from floodmark.errors import Corrupt
from floodmark.model import BEGINNING, SEQ_COLUMN, DeletionsFile, FileRecord
from floodmark.rows.reading.arrow_reader import arrow_batches, arrow_read_schema
from floodmark.rows.reading.changes import ChangePlan, changes_batches, changes_schema, plan_changes
from floodmark.rows.schema import arrow_schema, table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.rows.staging.statistics import field_leaves, file_record
from floodmark.storage import Storage, join

Row = dict[str, Any]


@dataclass
class Files:
    """Makes the files of one table, as planning sees them, in a folder."""

    schema: Schema
    folder: str = field(default_factory=lambda: f"memory://lake/{clock.new_id()}")
    storage: Storage = field(default_factory=lambda: Storage({}))

    def __post_init__(self) -> None:
        self.metadata = new_table_metadata(
            self.schema, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, self.folder, {}
        )

    @property
    def key(self) -> list[str]:
        return [field.name for field in self.schema.fields if field.field_id in self.schema.identifier_field_ids]

    def fresh(self, sequence: int | None, rows: Sequence[Row]) -> LiveFile:
        """A file whose rows have the sequence of its commit."""
        spec = UNPARTITIONED_PARTITION_SPEC.model_dump_json()
        target = StageTarget(self.folder, self.schema.model_dump_json(), spec)
        (record,) = stage_in_process(target, list(rows), self.storage)
        return self._live(record, sequence)

    def settled(self, sequence: int | None, rows: Sequence[Row], name: str | None = None) -> LiveFile:
        """A file whose rows say their own sequences; mixed, if some do not."""
        fields = arrow_schema(self.schema, with_seq=True, file_names=True)
        columns = [field.name for field in self.schema.fields]
        return self._live(self._write(name or clock.new_id(), columns, list(fields), rows), sequence)

    def deletions(self, sequence: int, keys: Sequence[Row], name: str | None = None) -> DeletionsFile:
        fields = arrow_schema(self.schema, file_names=True)
        names = [field.name for field in user_fields(self.schema)]
        arrow = [fields.field(names.index(name)) for name in self.key]
        record = self._write(name or f"{clock.new_id()}-deletions", self.key, arrow, keys)
        return DeletionsFile(record.path, sequence, record.rows, record.size_bytes)

    def changes(
        self,
        files: Iterable[LiveFile],
        deletions: Iterable[DeletionsFile] = (),
        since: int | None = None,
        until: int = 1_000_000,
        chunk_rows: int = 1_000_000,
    ) -> list[Row]:
        plan = plan_changes(self.schema, files, deletions, since, until)
        return rows_of(changes_batches(self.storage, plan, chunk_rows), plan)

    def _write(self, name: str, columns: Sequence[str], fields: list[pa.Field], rows: Sequence[Row]) -> FileRecord:
        arrays = [
            pa.array([row.get(column) for row in rows], field.type)
            for column, field in zip(columns, fields, strict=True)
        ]
        table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
        location = join(self.folder, f"{name}.parquet")
        with self.storage.writer(location) as stream:
            pq.write_table(table, stream, store_schema=False)
        leaves = tuple(leaf for column in columns for leaf in field_leaves(self.schema.find_field(column)))
        with self.storage.open_input(location) as stream:
            footer = pq.read_metadata(stream)
        return file_record(location, footer, self.storage.size(location), leaves)

    def _live(self, record: FileRecord, sequence: int | None) -> LiveFile:
        return LiveFile(data_file(record, self.metadata, 0), sequence, seq_field_id(self.schema))


def rows_of(batches: Iterable[pa.RecordBatch], plan: ChangePlan) -> list[Row]:
    found = []
    for batch in batches:
        assert batch.schema.equals(changes_schema(plan))
        found += batch.to_pylist()
    return found


def upsert(seq: int, **row: Any) -> Row:
    return {**row, "_change": "upsert", "_seq": seq}


def delete(seq: int, **row: Any) -> Row:
    return {**row, "_change": "delete", "_seq": seq}


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [repr(value) for value in row.values()])


@pytest.fixture
def keyed() -> Files:
    return Files(table_schema("id long not null, v string", ["id"]))


# ── what is looked at ──


def test_a_plan_keeps_only_files_that_may_hold_rows_of_the_range(keyed: Files) -> None:
    fresh = [keyed.fresh(sequence, [{"id": sequence}]) for sequence in (1, 2, 3, 4)]
    low = keyed.settled(4, [{"id": 11, "_seq": 1}, {"id": 12, "_seq": 2}])
    across = keyed.settled(4, [{"id": 13, "_seq": 1}, {"id": 14, "_seq": 4}])
    mixed = keyed.settled(4, [{"id": 15, "_seq": 1}, {"id": 16, "_seq": None}])
    gone = [keyed.deletions(sequence, [{"id": 0}]) for sequence in (2, 3, 4)]
    plan = plan_changes(keyed.schema, [*fresh, low, across, mixed], gone, 2, 3)
    assert plan.key == ("id",)
    assert plan.files == (fresh[2], across, mixed)
    assert plan.deletions == (gone[1],)
    assert plan.rows_max == 1 + 2 + 2 + 1
    assert plan.size_bytes == sum(file.size_bytes for file in (fresh[2], across, mixed, gone[1]))
    assert not plan.empty


def test_a_file_that_says_nothing_about_its_rows_is_always_read(keyed: Files) -> None:
    file = keyed.settled(9, [{"id": 1, "_seq": 2}, {"id": 2, "_seq": 7}])
    silent = replace(file, data_file=_without_counts(file))
    assert (silent.fresh, silent.settled) == (False, False)
    assert keyed.changes([silent], since=1, until=3) == [upsert(2, id=1, v=None)]
    assert plan_changes(keyed.schema, [silent], [], 100, 200).files == (silent,)


def _without_counts(file: LiveFile) -> Any:
    record = FileRecord(file.path, file.rows, file.size_bytes)
    metadata = new_table_metadata(table_schema("id long"), UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, "x", {})
    return data_file(record, metadata, 0)


def test_the_beginning_includes_files_of_sequence_zero(keyed: Files) -> None:
    old = keyed.fresh(0, [{"id": 1, "v": "old"}])
    assert plan_changes(keyed.schema, [old], [], None, 5).since == BEGINNING
    assert keyed.changes([old], since=None, until=5) == [upsert(0, id=1, v="old")]
    assert plan_changes(keyed.schema, [old], [], 0, 5).empty


@pytest.mark.parametrize(("since", "until"), [(3, 3), (5, 3), (2, 3)])
def test_a_range_without_changes_reads_nothing(keyed: Files, since: int, until: int) -> None:
    files = [keyed.fresh(2, [{"id": 1}]), keyed.settled(4, [{"id": 2, "_seq": 1}])]
    plan = plan_changes(keyed.schema, files, [keyed.deletions(2, [{"id": 7}])], since, until)
    assert (plan.empty, plan.rows_max, plan.size_bytes) == (True, 0, 0)
    before = keyed.storage.counters.snapshot()
    assert list(changes_batches(keyed.storage, plan)) == []
    assert keyed.storage.counters.difference(before).total == 0
    assert changes_schema(plan).names == ["id", "v", "_change", "_seq"]


def test_a_file_that_is_not_committed_is_refused(keyed: Files) -> None:
    with pytest.raises(Corrupt, match="no sequence"):
        plan_changes(keyed.schema, [keyed.fresh(None, [{"id": 1}])], [], None, 5)


# ── rows and deletions ──


def test_without_deletions_every_file_is_opened_once(keyed: Files) -> None:
    live = [keyed.fresh(2, [{"id": 1}]), keyed.settled(4, [{"id": 2, "_seq": 3}, {"id": 3, "_seq": 1}])]
    before = keyed.storage.counters.snapshot()
    assert len(keyed.changes(live, [keyed.deletions(9, [{"id": 1}])], 1, 5)) == 2
    assert keyed.storage.counters.difference(before).calls["open_input"] == 2 + 1  # one by writing the deletions


def test_a_row_has_its_own_sequence_or_its_files(keyed: Files) -> None:
    files = [
        keyed.fresh(3, [{"id": 1, "v": "a"}]),
        keyed.settled(9, [{"id": 2, "_seq": 2}, {"id": 3, "_seq": 4}, {"id": 4, "_seq": 5}]),
        keyed.settled(4, [{"id": 5, "_seq": None}, {"id": 6, "_seq": 1}]),
    ]
    assert in_order(keyed.changes(files, since=2, until=4)) == [
        upsert(3, id=1, v="a"),
        upsert(4, id=3, v=None),
        upsert(4, id=5, v=None),
    ]


def test_of_a_key_only_the_newest_deletion_counts(keyed: Files) -> None:
    gone = [keyed.deletions(3, [{"id": 1}, {"id": 2}]), keyed.deletions(5, [{"id": 2}, {"id": 3}])]
    for chunk_rows in (1, 1000):
        found = in_order(keyed.changes([], gone, 1, 9, chunk_rows))
        assert found == [delete(3, id=1, v=None), delete(5, id=2, v=None), delete(5, id=3, v=None)]


def test_a_row_of_the_range_hides_the_deletion_of_its_key_also_of_the_same_commit(keyed: Files) -> None:
    files = [keyed.fresh(5, [{"id": 1, "v": "again"}]), keyed.settled(7, [{"id": 2, "_seq": 6}])]
    gone = [keyed.deletions(4, [{"id": 1}]), keyed.deletions(6, [{"id": 2}, {"id": 3}])]
    for chunk_rows in (1, 1000):
        assert in_order(keyed.changes(files, gone, 3, 9, chunk_rows)) == [
            upsert(5, id=1, v="again"),
            upsert(6, id=2, v=None),
            delete(6, id=3, v=None),
        ]


def test_a_row_outside_the_range_hides_no_deletion(keyed: Files) -> None:
    fresh = keyed.fresh(8, [{"id": 1, "v": "later"}])
    settled = keyed.settled(8, [{"id": 2, "_seq": 8}, {"id": 4, "_seq": 4}])
    gone = [keyed.deletions(4, [{"id": 1}, {"id": 2}])]
    assert in_order(keyed.changes([fresh, settled], gone, 3, 5)) == [
        delete(4, id=1, v=None),
        delete(4, id=2, v=None),
        upsert(4, id=4, v=None),
    ]
    assert [row["id"] for row in keyed.changes([fresh, settled], gone, 5, 9)] == [1, 2]


def test_keys_of_several_columns_with_any_names_and_types() -> None:
    text = (
        "`a.b``c` string, `key 0` int, Upper decimal(20,2) not null, d date, b binary, ts timestamp, ok boolean, "
        "rest struct<x:array<int>>"
    )
    key = ["a.b`c", "key 0", "Upper", "d", "b", "ts", "ok"]
    files = Files(table_schema(text, key))
    ts = "2026-01-01T00:00:00Z"
    base = {"a.b`c": "é", "key 0": 1, "Upper": Decimal("1.50"), "d": date(2026, 1, 1), "b": b"\0", "ts": ts, "ok": True}
    fresh = files.fresh(5, [{**base, "rest": {"x": [1, None]}}, {**base, "key 0": 2, "rest": None}])
    (first, second) = files.changes([fresh])
    keys = [{name: row[name] for name in key} for row in (first, second)]
    third = {**keys[0], "Upper": Decimal("1.51")}
    found = files.changes([fresh], [files.deletions(4, [*keys, third])], 0, 9)
    assert found == [
        {**keys[0], "rest": {"x": [1, None]}, "_change": "upsert", "_seq": 5},
        {**keys[1], "rest": None, "_change": "upsert", "_seq": 5},
        {**third, "rest": None, "_change": "delete", "_seq": 4},
    ]


def test_a_table_without_a_key_gives_every_row_and_no_deletion() -> None:
    files = Files(table_schema("n int"))
    live = [files.fresh(2, [{"n": 1}, {"n": 1}]), files.settled(4, [{"n": 1, "_seq": 3}, {"n": 1, "_seq": 1}])]
    plan = plan_changes(files.schema, live, [DeletionsFile("memory://lake/none", 3, 1, 1)], 1, 3)
    assert (plan.key, plan.deletions) == ((), ())
    found = rows_of(changes_batches(files.storage, plan), plan)
    assert found == [upsert(2, n=1), upsert(2, n=1), upsert(3, n=1)]


def test_a_table_without_the_hidden_column_has_the_sequences_of_its_files() -> None:
    with_seq = table_schema("id long not null, v string", ["id"])
    schema = Schema(*user_fields(with_seq), schema_id=0, identifier_field_ids=with_seq.identifier_field_ids)
    files = Files(schema)
    live = [files.fresh(0, [{"id": 1}]), files.fresh(4, [{"id": 2}])]
    gone = [files.deletions(3, [{"id": 2}, {"id": 9}])]
    assert files.changes(live, gone, 0, 9) == [upsert(4, id=2, v=None), delete(3, id=9, v=None)]
    assert [row["_seq"] for row in files.changes(live)] == [0, 4]


def test_a_missing_file_is_an_error_not_fewer_changes(keyed: Files) -> None:
    fresh, gone = keyed.fresh(2, [{"id": 1}]), keyed.deletions(2, [{"id": 7}])
    plan = plan_changes(keyed.schema, [fresh], [gone], None, 5)
    keyed.storage.delete(gone.location)
    with pytest.raises(Exception, match="deletions"):
        list(changes_batches(keyed.storage, plan))
    keyed.storage.delete(fresh.path)
    with pytest.raises(Exception, match=fresh.path.rpartition("/")[2]):
        list(changes_batches(keyed.storage, plan))


# ── rows of a table, in process ──


def test_rows_of_a_table_stream_with_and_without_sequences(keyed: Files) -> None:
    live = [
        keyed.fresh(3, [{"id": 1, "v": "a"}]),
        keyed.settled(9, [{"id": 2, "_seq": 2}]),
        keyed.settled(4, [{"id": 5, "_seq": None}, {"id": 6, "_seq": 1}]),
    ]
    for with_seq, columns in ((False, ["id", "v"]), (True, ["id", "v", "_seq"])):
        batches = list(arrow_batches(keyed.storage, live, keyed.schema, with_seq))
        assert arrow_read_schema(keyed.schema, with_seq).names == columns
        assert all(batch.schema.equals(arrow_read_schema(keyed.schema, with_seq)) for batch in batches)
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert [row["id"] for row in rows] == [1, 2, 5, 6]
        assert [row.get("_seq") for row in rows] == ([3, 2, 4, 1] if with_seq else [None] * 4)


def test_reading_changes_in_process_needs_no_spark() -> None:
    code = "import floodmark.rows.reading.changes, sys; assert 'pyspark' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ── random histories ──


class History:
    """A keyed table that lives: a model of what it holds, and its files as writes would leave them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files = Files(table_schema("id long not null, v string", ["id"]))
        self.sequence = 0
        self.rows: dict[int, tuple[str, int]] = {}
        self.deleted: list[tuple[int, int]] = []
        self.live: dict[str, tuple[LiveFile, list[Row]]] = {}
        self.gone: list[DeletionsFile] = []

    def step(self) -> None:
        # A table's sequences may have gaps: other branches use them too.
        self.sequence += self.chance.randint(1, 2)
        kind = self.chance.choices(["append", "merge", "delete", "replace", "compact"], [3, 4, 3, 1, 2])[0]
        getattr(self, f"_{kind}")()

    def _append(self) -> None:
        """New keys, some of them deleted before."""
        self._put([key for key in self._some(range(60)) if key not in self.rows])

    def _merge(self) -> None:
        keys = self._some(range(60))
        self._carry(set(keys))
        self._put(keys)

    def _delete(self) -> None:
        keys = self._some(sorted(self.rows))
        self._carry(set(keys))
        self._forget(keys)

    def _replace(self) -> None:
        """Deletes keys and writes some of them again, in one commit."""
        keys = self._some(sorted(self.rows))
        self._carry(set(keys))
        self._forget(keys)
        self._put(keys[::2])

    def _compact(self) -> None:
        taken = self._some(list(self.live))
        rows = [row for path in taken for row in self.live.pop(path)[1]]
        if rows:
            self._settle(rows)

    def _some(self, things: Sequence[Any]) -> list[Any]:
        return self.chance.sample(things, min(len(things), self.chance.randint(1, 6)))

    def _put(self, keys: Sequence[int]) -> None:
        if keys:
            rows = [{"id": key, "v": f"{key} at {self.sequence}"} for key in keys]
            self.rows |= {row["id"]: (row["v"], self.sequence) for row in rows}
            self._keep(self.files.fresh(self.sequence, rows), [{**row, "_seq": self.sequence} for row in rows])

    def _forget(self, keys: Sequence[int]) -> None:
        if keys:
            self.gone.append(self.files.deletions(self.sequence, [{"id": key} for key in keys]))
            self.deleted += [(key, self.sequence) for key in keys]
            for key in keys:
                del self.rows[key]

    def _carry(self, keys: set[int]) -> None:
        """Rewrite the files that hold these keys, without them: what is carried keeps its sequence."""
        for path, (_, rows) in list(self.live.items()):
            if any(row["id"] in keys for row in rows):
                del self.live[path]
                if kept := [row for row in rows if row["id"] not in keys]:
                    self._settle(kept)

    def _settle(self, rows: list[Row]) -> None:
        self._keep(self.files.settled(self.sequence, rows), rows)

    def _keep(self, file: LiveFile, rows: list[Row]) -> None:
        self.live[file.path] = file, rows

    def expected(self, since: int, until: int) -> list[Row]:
        found = {key: upsert(seq, id=key, v=v) for key, (v, seq) in self.rows.items() if since < seq <= until}
        for key, seq in reversed(self.deleted):
            if since < seq <= until:
                found.setdefault(key, delete(seq, id=key, v=None))
        return in_order(found.values())

    def changes(self, since: int, until: int) -> list[Row]:
        chunk_rows = self.chance.choice([15, 1000, 1000, 1000])
        files = [file for file, _ in self.live.values()]
        return self.files.changes(files, self.gone, since, until, chunk_rows)


def fold(state: dict[int, str], changes: Iterable[Row]) -> None:
    for change in changes:
        if change["_change"] == "delete":
            state.pop(change["id"], None)
        else:
            state[change["id"]] = change["v"]


@pytest.mark.parametrize("seed", range(5))
def test_folded_changes_of_any_ranges_are_the_table(seed: int) -> None:
    history = History(seed)
    follower: dict[int, str] = {}
    mark = BEGINNING
    settled = 0
    for _ in range(200):
        history.step()
        settled += any(file.settled for file, _ in history.live.values())
        if history.chance.random() < 0.15:
            # A follower reads at whatever state it finds.
            fold(follower, history.changes(mark, history.sequence))
            mark = history.sequence
            assert follower == {key: v for key, (v, _) in history.rows.items()}
    assert settled > 100
    assert history.deleted
    for _ in range(10):
        low, high = sorted(history.chance.sample(range(history.sequence), 2))
        state: dict[int, str] = {}
        for since, until in ((BEGINNING, low), (low, high), (high, history.sequence)):
            found = history.changes(since, until)
            assert in_order(found) == history.expected(since, until)
            assert len({row["id"] for row in found}) == len(found)
            assert all(since < row[SEQ_COLUMN] <= until for row in found)
            fold(state, found)
        assert state == {key: v for key, (v, _) in history.rows.items()}
