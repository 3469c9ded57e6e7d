"""Many files into few: the same rows with the same sequences, proved by reading them back, or nothing at all."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema

from floodmark import clock
from floodmark.errors import Corrupt
from floodmark.model import FileRecord
from floodmark.rows.checksum import RowChecksum
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.project import read_file, read_schema
from floodmark.rows.rewriting.gather import Gathered, Group, gather, run_groups
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage
from tests.unit.test_compare import EVERY_TYPE, plain, some_value
from tests.without_spark import NO_SPARK

Row = dict[str, Any]


@dataclass
class Lake:
    """The files of one table: sources in one folder, what is gathered in another."""

    schema: Schema
    storage: Storage = field(default_factory=lambda: Storage({}))
    partition: tuple[str, ...] = ()
    sort: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.folder = f"memory://lake/{clock.new_id()}"

    def target(self, **extra: Any) -> StageTarget:
        spec = partition_spec(self.schema, self.partition).model_dump_json()
        order = sort_order(self.schema, self.sort).model_dump_json() if self.sort else None
        return StageTarget(f"{self.folder}/new", self.schema.model_dump_json(), spec, sort_json=order, **extra)

    def fresh(self, sequence: int | None, rows: pa.Table, schema: Schema | None = None) -> InputFile:
        """A file whose rows have no sequence of their own."""
        return self._source(sequence, rows, schema or self.schema, settled=False)

    def settled(self, sequence: int | None, rows: pa.Table) -> InputFile:
        """A file whose rows say their own sequences."""
        return self._source(sequence, rows, self.schema, settled=True)

    def _source(self, sequence: int | None, rows: pa.Table, schema: Schema, *, settled: bool) -> InputFile:
        spec = partition_spec(schema, ()).model_dump_json()
        target = StageTarget(f"{self.folder}/old", schema.model_dump_json(), spec, settled=settled)
        (record,) = stage_in_process(target, rows, self.storage)
        return InputFile(record.path, record.rows, record.size_bytes, sequence, not settled)

    def rows(self, records: Sequence[FileRecord]) -> list[Row]:
        return [row for record in records for row in rows_in(self.storage, record.path, self.schema)]

    def new_files(self) -> list[str]:
        return sorted(entry.location for entry in self.storage.list(f"{self.folder}/new"))


def rows_in(storage: Storage, path: str, schema: Schema) -> list[Row]:
    return [row for batch in read_file(storage, path, schema.fields) for row in batch.to_pylist()]


def multiset(rows: Sequence[Row]) -> Counter[str]:
    return Counter(repr(plain(row)) for row in rows)


def numbers(first: int, count: int, **more: Any) -> pa.Table:
    return pa.table({"id": range(first, first + count), "s": [f"row {n}" for n in range(first, first + count)], **more})


def random_texts(chance: random.Random, count: int) -> list[str]:
    return [chance.randbytes(40).hex() for _ in range(count)]


def large(first: int) -> pa.Table:
    """More than is gathered into one batch, in few rows."""
    texts = [random.Random(first + n).randbytes(5_000).hex() for n in range(500)]
    return pa.table({"id": range(first, first + 500), "s": texts})


def simple(**extra: Any) -> Lake:
    return Lake(table_schema("id long not null, s string"), **extra)


def with_sequences(source: InputFile, rows: Sequence[Row]) -> list[Row]:
    return [{**row, "_seq": source.sequence if row["_seq"] is None else row["_seq"]} for row in rows]


# ── the same rows ──


def test_rows_of_every_type_are_the_same_rows_in_one_file() -> None:
    lake = Lake(table_schema(EVERY_TYPE))
    chance = random.Random("gather")
    columns = read_schema(lake.schema.fields[:-1])
    sources = []
    for number, count in enumerate([1, 40, 150, 7]):
        rows = pa.table(
            {one.name: pa.array([some_value(one.type, chance) for _ in range(count)], one.type) for one in columns}
        )
        if number % 2:
            rows = rows.append_column("_seq", pa.array([100 + n for n in range(count)]))
        sources.append((lake.settled if number % 2 else lake.fresh)(number + 1, rows))
    expected = [
        row for source in sources for row in with_sequences(source, rows_in(lake.storage, source.path, lake.schema))
    ]
    done = gather(lake.target(), Group(3, tuple(sources)), lake.storage)
    assert (done.number, done.rows, len(done.records), done.records[0].rows) == (3, 198, 1, 198)
    assert lake.new_files() == [done.records[0].path]
    found = lake.rows(done.records)
    assert multiset(found) == multiset(expected)
    # Nothing asked for another order.
    assert [plain(row) for row in found] == [plain(row) for row in expected]
    total = RowChecksum()
    for batch in read_file(lake.storage, done.records[0].path, lake.schema.fields):
        total.add(batch)
    assert (total.rows, total.hexdigest()) == (done.rows, done.checksum)


def test_every_row_keeps_its_sequence_its_own_or_its_files() -> None:
    lake = simple()
    sources = (
        lake.fresh(5, numbers(0, 3)),
        lake.settled(9, numbers(10, 3, _seq=[2, 7, 2])),
        lake.fresh(6, numbers(20, 2)),
    )
    done = gather(lake.target(), Group(0, sources), lake.storage)
    assert [(row["id"], row["_seq"]) for row in lake.rows(done.records)] == [
        (0, 5), (1, 5), (2, 5), (10, 2), (11, 7), (12, 2), (20, 6), (21, 6),
    ]  # fmt: skip
    seq = lake.schema.find_field("_seq").field_id
    assert (done.records[0].value_counts[seq], done.records[0].null_counts[seq]) == (8, 0)


def test_a_file_where_only_some_rows_have_a_sequence_gives_the_others_its_own() -> None:
    lake = simple()
    plain_source = lake.settled(9, numbers(0, 4, _seq=[1, 2, 3, 4]))
    with lake.storage.open_input(plain_source.path) as stream:
        table = pq.read_table(stream)
    mixed = table.set_column(2, table.schema.field("_seq"), pa.array([1, None, 3, None], pa.int64()))
    with lake.storage.writer(plain_source.path) as sink:
        pq.write_table(mixed, sink, store_schema=False)
    done = gather(lake.target(), Group(0, (plain_source,)), lake.storage)
    assert [row["_seq"] for row in lake.rows(done.records)] == [1, 9, 3, 9]


def test_files_of_an_older_schema_come_out_in_the_tables_schema_of_today() -> None:
    old = table_schema("n int, st struct<a:float>, s string")
    brought = pa.schema(
        [
            ("n", pa.int64()),
            ("st", pa.struct([("a", pa.float64()), ("b", pa.string())])),
            ("s", pa.string()),
            ("late", pa.list_(pa.int64())),
        ]
    )
    new = evolve_schema(old, brought, old.highest_field_id, 1)
    assert new is not None
    lake = Lake(new)
    early = pa.table({"n": pa.array([1, None], pa.int32()), "st": [{"a": 0.5}, None], "s": ["x", "y"]})
    early = early.set_column(1, "st", early["st"].cast(pa.struct([("a", pa.float32())])))
    late = pa.table({"n": [2**40], "st": [{"a": 0.1, "b": "b"}], "s": [None], "late": [[1, 2]]}, schema=brought)
    done = gather(lake.target(), Group(0, (lake.fresh(1, early, old), lake.fresh(2, late))), lake.storage)
    assert lake.rows(done.records) == [
        {"n": 1, "st": {"a": 0.5, "b": None}, "s": "x", "late": None, "_seq": 1},
        {"n": None, "st": None, "s": "y", "late": None, "_seq": 1},
        {"n": 2**40, "st": {"a": 0.1, "b": "b"}, "s": None, "late": [1, 2], "_seq": 2},
    ]
    with lake.storage.open_input(done.records[0].path) as stream:
        assert pq.read_schema(stream).field("n").type == pa.int64()


def test_the_target_size_cuts_what_was_gathered_into_files() -> None:
    lake = simple(sort=("id",))
    chance = random.Random(2)
    sources = tuple(
        lake.fresh(at, pa.table({"id": chance.sample(range(10**6), 400), "s": random_texts(chance, 400)}))
        for at in range(1, 11)
    )
    target = lake.target(target_file_bytes=30_000, properties={"write.parquet.row-group-size-bytes": "20000"})
    done = gather(target, Group(0, sources), lake.storage, sort_bytes=50_000)
    assert len(done.records) > 3
    assert sum(record.rows for record in done.records) == done.rows == 4000
    assert lake.new_files() == sorted(record.path for record in done.records)
    # In order from file to file too: that is what makes their bounds narrow.
    ids = [row["id"] for row in lake.rows(done.records)]
    assert ids == sorted(ids)


@pytest.mark.parametrize("sort_bytes", [20_000, 100_000_000])
def test_sorted_rows_are_in_the_tables_order_and_equal_ones_as_they_came(sort_bytes: int) -> None:
    lake = Lake(table_schema("`the key` int, x double, at long"), sort=("the key desc", "x"))
    chance = random.Random(4)
    sources = []
    for number in range(1, 9):
        rows = pa.table(
            {
                "the key": pa.array([chance.choice([1, 2, 3, None]) for _ in range(200)], pa.int32()),
                "x": pa.array([chance.choice([0.0, 1.0, None, float("nan")]) for _ in range(200)], pa.float64()),
                "at": range(200 * number, 200 * number + 200),
            }
        )
        sources.append(lake.fresh(number, rows))
    done = gather(lake.target(), Group(0, tuple(sources)), lake.storage, sort_bytes=sort_bytes)
    found = lake.rows(done.records)
    table = pa.Table.from_pylist(found)
    keys = [("the key", "descending"), ("x", "ascending"), ("at", "ascending")]
    assert table.sort_by(keys)["at"].to_pylist() == table["at"].to_pylist()
    assert all(row["_seq"] == row["at"] // 200 for row in found)
    assert len(found) == 1600


def test_rows_of_several_partitions_are_written_by_partition_and_in_order() -> None:
    lake = Lake(table_schema("part string, id long"), partition=("part",), sort=("id desc",))
    sources = tuple(
        lake.fresh(at, pa.table({"part": ["ab"[n % 2] for n in range(50)], "id": [n * 7 % 50 for n in range(50)]}))
        for at in (1, 2, 3)
    )
    done = gather(lake.target(), Group(0, sources), lake.storage)
    assert len(done.records) == len({record.partition for record in done.records}) == 2
    for record in done.records:
        rows = lake.rows([record])
        assert len({row["part"] for row in rows}) == 1
        assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True)


def test_sources_are_left_as_they_are_and_no_rows_give_no_file() -> None:
    lake = simple()
    source = lake.fresh(1, numbers(0, 5))
    before = lake.storage.read(source.path)
    gather(lake.target(), Group(0, (source,)), lake.storage)
    assert lake.storage.read(source.path) == before
    assert gather(lake.target(), Group(1, ()), lake.storage) == Gathered(1, (), 0, "0" * 32)


def test_memory_does_not_grow_with_the_group() -> None:
    lake = simple(sort=("s",))
    sizes, sources = [], []
    for at in range(1, 23):
        rows = pa.table({"id": range(10_000), "s": random_texts(random.Random(at), 10_000)})
        sizes.append(rows.nbytes)
        sources.append(lake.fresh(at, rows))
    del rows
    start, seen = pa.total_allocated_bytes(), []

    class Watched(Storage):
        def open_input(self, location: str, size_bytes: int | None = None) -> Any:
            seen.append(pa.total_allocated_bytes() - start)
            return super().open_input(location, size_bytes)

        def writer(self, location: str, held: Any = None) -> Any:
            seen.append(pa.total_allocated_bytes() - start)
            return super().writer(location, held)

    lake.storage = shared(Watched, lake.storage)
    # Small files: there is a look at the memory again and again.
    target = lake.target(target_file_bytes=1_000_000)
    done = gather(target, Group(0, tuple(sources)), lake.storage, sort_bytes=3_000_000)
    assert done.rows == 220_000
    assert len(done.records) > 5
    assert max(seen) < sum(sizes) / 2


def shared(kind: type[Storage], storage: Storage) -> Storage:
    """A storage of this kind that sees the same files in memory."""
    other = kind({})
    other._buckets = storage._buckets
    return other


# ── or nothing at all ──


@pytest.mark.parametrize("more", [1, -1])
@pytest.mark.parametrize("sort", [(), ("id",)])
def test_a_source_without_as_many_rows_as_the_catalog_says_leaves_nothing(more: int, sort: tuple[str, ...]) -> None:
    lake = simple(sort=sort)
    good = tuple(lake.fresh(at, large(1000 * at)) for at in (1, 2, 3))
    bad = replace(good[2], rows=500 + more)
    # So small that, without sorting, files are closed long before the bad source is read to its end.
    target = lake.target(target_file_bytes=100_000)
    other = f"{target.folder}/another-file.parquet"
    lake.storage.put(other, b"of somebody else")
    with pytest.raises(Corrupt, match="the number of rows") as raised:
        gather(target, Group(0, (*good[:2], bad)), lake.storage)
    assert raised.value.facts == {"file": bad.path, "rows": 500, "rows_expected": 500 + more}
    assert "doctor" in raised.value.advice
    assert lake.new_files() == [other]
    assert all(lake.storage.exists(source.path) for source in good)


def test_a_source_that_is_gone_or_damaged_leaves_nothing() -> None:
    lake = simple()
    first, second = lake.fresh(1, numbers(0, 500)), lake.fresh(2, numbers(500, 500))
    data = lake.storage.read(second.path)
    lake.storage.put(second.path, bytes(len(data) // 2) + data[len(data) // 2 :])
    with pytest.raises(Corrupt, match="cannot be read") as raised:
        gather(lake.target(), Group(0, (first, second)), lake.storage)
    assert raised.value.facts["file"] == second.path
    lake.storage.delete(second.path)
    with pytest.raises(Corrupt, match="gone"):
        gather(lake.target(), Group(0, (first, second)), lake.storage)
    assert lake.new_files() == []


def test_rows_that_the_table_cannot_hold_leave_nothing() -> None:
    loose, strict = table_schema("id long, s string"), table_schema("id long not null, s string")
    lake = Lake(strict)
    source = lake.fresh(1, pa.table({"id": [1, None], "s": ["a", "b"]}), loose)
    with pytest.raises(Corrupt, match="do not fit") as raised:
        gather(lake.target(), Group(0, (source,)), lake.storage)
    assert "id" in str(raised.value.facts["cause"])
    assert lake.new_files() == []


def test_rows_without_any_sequence_are_corrupt() -> None:
    lake = simple()
    with pytest.raises(Corrupt, match="sequence"):
        gather(lake.target(), Group(0, (lake.fresh(None, numbers(0, 3)),)), lake.storage)
    assert lake.new_files() == []


def swap(table: pa.Table, name: str) -> pa.Table:
    values = table[name].to_pylist()
    values[3], values[4] = values[4], values[3]
    return with_column(table, name, values)


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def one_changed(table: pa.Table, name: str, value: Any) -> pa.Table:
    values = table[name].to_pylist()
    return with_column(table, name, [*values[:5], value, *values[6:]])


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: one_changed(table, "id", 999),
        lambda table: one_changed(table, "s", "row 5 "),
        lambda table: one_changed(table, "s", None),
        lambda table: one_changed(table, "_seq", 2),
        lambda table: one_changed(table, "_seq", None),
        lambda table: swap(table, "id"),
        lambda table: swap(table, "s"),
        lambda table: table.take([*range(9), 8]),
        lambda table: table.slice(1),
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),
        lambda table: with_column(table, "id", list(range(1, 11))),
    ],
    ids=["number", "text", "null", "sequence", "no sequence", "swapped ids", "swapped texts", "lost and doubled",
         "lost", "doubled", "shifted"],
)  # fmt: skip
def test_what_does_not_read_back_as_it_was_is_corrupt_and_deleted(damage: Callable[[pa.Table], pa.Table]) -> None:
    lake = simple()
    source = lake.fresh(1, numbers(0, 10))

    class Lying(Storage):
        """Gives back other rows than were written."""

        def open_input(self, location: str, size_bytes: int | None = None) -> Any:
            if "/new/" not in location:
                return super().open_input(location, size_bytes)
            with super().open_input(location, size_bytes) as stream:
                table = pq.read_table(stream)
            lie = location.replace("/new/", "/lie/")
            with super().writer(lie) as sink:
                pq.write_table(damage(table), sink, store_schema=False)
            return super().open_input(lie)

    lake.storage = shared(Lying, lake.storage)
    with pytest.raises(Corrupt, match="differ from the rows that were read") as raised:
        gather(lake.target(), Group(0, (source,)), lake.storage)
    facts = raised.value.facts
    assert facts["files"] == source.path
    assert facts["rows_expected"] == 10
    assert facts["checksum"] != facts["checksum_expected"]
    assert lake.new_files() == []


def test_an_interruption_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    # Files have their names as soon as they are written.
    monkeypatch.setattr("floodmark.storage.held.FILES_MAX", 1)
    lake = simple()
    sources = tuple(lake.fresh(at, large(1000 * at)) for at in (1, 2, 3))
    there = []

    class Interrupted(Storage):
        def open_input(self, location: str, size_bytes: int | None = None) -> Any:
            if location == sources[2].path:
                there.extend(lake.new_files())
                raise KeyboardInterrupt
            return super().open_input(location, size_bytes)

    lake.storage = shared(Interrupted, lake.storage)
    with pytest.raises(KeyboardInterrupt):
        gather(lake.target(target_file_bytes=100_000), Group(0, sources), lake.storage)
    assert there
    assert lake.new_files() == []


# ── many groups ──


def test_groups_and_results_travel() -> None:
    lake = simple()
    group = Group(7, (lake.fresh(1, numbers(0, 3)), InputFile("x", 1, 2, None, False, ("p",), ("q", "r"))))
    assert pickle.loads(pickle.dumps(group)) == group
    done = gather(lake.target(), Group(7, group.sources[:1]), lake.storage)
    assert pickle.loads(pickle.dumps(done)) == done


def test_little_is_gathered_in_this_process_and_progress_is_told() -> None:
    lake = simple()
    groups = [Group(at, (lake.fresh(at, numbers(at, 3)), lake.fresh(9, numbers(50 + at, 3)))) for at in (4, 2)]
    told: list[int] = []
    done, used_spark = run_groups(lake.storage, NO_SPARK, "tag", lake.target(), groups, progress=told.append)
    assert ([one.number for one in done], used_spark, told) == ([4, 2], False, [1, 2])
    assert [len(one.records) for one in done] == [1, 1]
    assert run_groups(lake.storage, NO_SPARK, "tag", lake.target(), []) == ([], False)


class LocalTasks:
    """As much of a Spark session as `run_tasks` needs: each task gets what survives a journey to an executor."""

    def __init__(self) -> None:
        self.tasks = 0
        self.tags: list[str] = []

    @property
    def sparkSession(self) -> LocalTasks:
        return self

    @property
    def sessions(self) -> Any:
        return self

    def get(self) -> LocalTasks:
        return self

    def range(self, start: int, end: int, step: int, partitions: int) -> LocalTasks:
        assert partitions == end
        self.tasks = end
        return self

    def mapInArrow(self, work: Any, schema: str) -> LocalTasks:
        from pyspark import cloudpickle

        self._work = cloudpickle.dumps(work)
        return self

    def collect(self) -> list[Row]:
        from pyspark import cloudpickle

        def batches(number: int) -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"id": [number]})

        # Later tasks may be done first.
        results = [cloudpickle.loads(self._work)(batches(number)) for number in reversed(range(self.tasks))]
        return [row for result in results for batch in result for row in batch.to_pylist()]

    def addTag(self, tag: str) -> None:
        self.tags.append(tag)

    def removeTag(self, tag: str) -> None:
        self.tags.remove(tag)

    def interruptTag(self, tag: str) -> None: ...


def on_disk(folder: str) -> Lake:
    """Tasks have a storage of their own: what is only in memory would not be there."""
    lake = simple()
    lake.folder = folder
    return lake


def test_much_is_gathered_by_one_task_for_each_group(tmp_path: Any) -> None:
    lake, tasks, told = on_disk(f"file://{tmp_path}"), LocalTasks(), list[int]()
    # The catalog's word decides, before anything is read.
    sources = [replace(lake.fresh(at, numbers(10 * at, 3)), size_bytes=2**25 * at) for at in (1, 2, 3)]
    groups = [Group(at, (source,)) for at, source in enumerate(sources)]
    done, used_spark = run_groups(
        lake.storage,
        tasks.sessions,
        "floodmark-op",
        lake.target(),
        groups,
        progress=told.append,
    )
    assert used_spark
    assert (tasks.tasks, tasks.tags, told) == (3, [], [3])
    assert [one.number for one in done] == [0, 1, 2]
    for at, one in enumerate(done):
        assert [row["id"] for row in lake.rows(one.records)] == [10 * (at + 1) + n for n in range(3)]
        assert one == replace(gather(lake.target(), groups[at], lake.storage), records=one.records)


def test_what_a_task_found_corrupt_comes_back_as_such(tmp_path: Any) -> None:
    lake, tasks = on_disk(f"file://{tmp_path}"), LocalTasks()
    good = replace(lake.fresh(1, numbers(0, 3)), size_bytes=2**27)
    bad = replace(lake.fresh(2, numbers(5, 3)), rows=4)
    groups = [Group(0, (good,)), Group(1, (bad,))]
    with pytest.raises(Corrupt, match="the number of rows") as raised:
        run_groups(lake.storage, tasks.sessions, "tag", lake.target(), groups)
    assert raised.value.facts["file"] == bad.path
