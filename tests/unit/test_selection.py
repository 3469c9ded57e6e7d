"""Files tested all at once: a file is left out if `may_match` leaves it out, or if no row of it matches; never else."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg import expressions as ex
from pyiceberg import types as it
from pyiceberg.conversions import to_bytes
from pyiceberg.expressions import And, BooleanExpression, Not, Or, visitors
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record

from floodmark.commit.file_columns import FileColumns, PlannedDataFile, columns_of
from floodmark.commit.live_files import live_files
from floodmark.commit.manifests import write_added, write_list, write_merged
from floodmark.commit.metadata import MetadataFiles, add_spec
from floodmark.model import SEQ_COLUMN, FileRecord, Head
from floodmark.rows.reading.changes import plan_changes
from floodmark.rows.reading.selection import select_files, select_newer
from floodmark.rows.sql import file_test
from floodmark.rows.sql.where import Where
from floodmark.storage import Storage
from tests.unit.test_changes import Files
from tests.unit.test_where import CHECKED, PARTITIONS, Staged, damaged, random_condition, random_rows

SNAPSHOT = 77


@dataclass
class Listed:
    """A table whose files are in manifests of a published list."""

    table: Staged
    folder: Path

    def __post_init__(self) -> None:
        self.files = MetadataFiles(Storage())
        self.metadata = self.table.metadata
        self.manifests: list[ManifestFile] = []

    def add(self, records: Sequence[FileRecord], spec_id: int = 0) -> None:
        location = f"file://{self.folder}/{uuid.uuid4()}.avro"
        manifest, _ = write_added(self.files.io, location, self.metadata, spec_id, SNAPSHOT, records)
        self.manifests.append(manifest)

    def head(self) -> Head:
        location = f"file://{self.folder}/{uuid.uuid4()}.avro"
        write_list(self.files.io, location, SNAPSHOT, None, 9, self.manifests)
        self.files.remember_metadata("metadata", self.metadata)
        return Head("main", "t", "t", SNAPSHOT, 9, 0, 0, location, "metadata", 1, 1000, 500, 10_000)

    def columns(self, head: Head) -> list[FileColumns]:
        return [self.files.columns(manifest) for manifest in self.files.manifests(head.manifest_list)]


def versions(records: Sequence[FileRecord]) -> list[FileRecord]:
    """Each file as its writer described it, and with less."""
    found = [(record, list(damaged(record))) for record in records]
    return [replace(one, path=f"{record.path}#{number}") for record, all_ in found for number, one in enumerate(all_)]


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: "+".join(partition) or "none")
def test_files_are_left_out_as_one_by_one(tmp_path: Path, partition: tuple[str, ...]) -> None:
    chance = random.Random(f"all at once {partition}")
    listed = Listed(Staged(tmp_path, CHECKED, partition), tmp_path)
    table = listed.table
    groups = [table.stage(random_rows(chance, count, nulls)) for nulls in (0.0, 0.0, 0.3, 1.0) for count in (1, 2, 5)]
    rows = {record.path: table.rows(record) for records in groups for record in records}
    for records in groups:
        listed.add(versions(records))
    head = listed.head()
    every = live_files(listed.files, head, table.schema)
    assert [file.path for file in select_files(listed.files, head, table.schema).files] == [file.path for file in every]
    left_out = skipped = 0
    for _ in range(60):
        text, model = random_condition(chance)
        where = Where.parse(text, table.schema)
        found = select_files(listed.files, head, table.schema, where)
        assert found.manifests_read + found.manifests_skipped == len(groups)
        paths = {file.path for file in found.files}
        for file in every:
            if file.path not in paths:
                one_by_one = where.may_match(file, listed.metadata)
                matches = one_by_one and any(model(row) is True for row in rows[file.path.partition("#")[0]])
                assert not matches, (text, rows[file.path.partition("#")[0]])
        kept = {file.path for file in every if where.may_match(file, listed.metadata)}
        assert paths <= kept, text
        left_out, skipped = left_out + len(every) - len(paths), skipped + found.manifests_skipped
    # The check would be blind if nothing were ever left out.
    assert left_out > 500
    tells = partition and not partition[0].startswith(("void", "truncate(10", "year"))
    assert skipped > 20 or not tells


def test_a_selection_says_what_the_table_has_and_opens_only_what_it_must(tmp_path: Path) -> None:
    listed = Listed(Staged(tmp_path, CHECKED, ("day",)), tmp_path)
    for day in range(1, 6):
        listed.add(listed.table.stage([{"id": day, "day": date(2024, 1, day)}]))
    head, schema = listed.head(), listed.table.schema
    files = MetadataFiles(Storage({"retry_s": "7"}))  # which no other reader of this process has
    files.remember_metadata("metadata", listed.metadata)
    files.manifests(head.manifest_list)
    before = files.io.storage.counters.snapshot()
    found = select_files(files, head, schema, Where.parse("day = '2024-01-03'", schema))
    assert [file.data_file.partition[0] for file in found.files] == [(date(2024, 1, 3) - date(1970, 1, 1)).days]
    assert (found.manifests_read, found.manifests_skipped) == (1, 4)
    assert (found.all_files, found.all_bytes) == (head.files, head.size_bytes)
    assert files.io.storage.counters.difference(before).total == 1
    # A newer version opens the manifests that are new in it.
    select_files(files, head, schema)
    listed.manifests = list(files.manifests(head.manifest_list))
    listed.add(listed.table.stage([{"id": 6}]))
    newer = listed.head()
    before = files.io.storage.counters.snapshot()
    assert len(select_files(files, newer, schema).files) == 6
    assert files.io.storage.counters.difference(before).total == 2, "the list, and one manifest"


def test_files_of_older_specs_are_judged_by_their_own(tmp_path: Path) -> None:
    listed = Listed(Staged(tmp_path, CHECKED, ("s",)), tmp_path)
    rows = [{"id": 5, "s": "x" * 30}, {"id": 7, "s": "y" * 30}]
    listed.add(listed.table.stage(rows))
    by_id = PartitionSpec(PartitionField(1, 1001, IdentityTransform(), "id"), spec_id=1)
    listed.metadata = add_spec(listed.metadata, by_id)
    fresh = Staged(tmp_path, CHECKED, ("id",))
    listed.add(fresh.stage(rows), spec_id=1)
    head, schema = listed.head(), listed.table.schema

    def count(text: str, schema: Schema = schema) -> int:
        where = Where.parse(text, schema)
        one_by_one = [file for file in live_files(listed.files, head, schema) if where.may_match(file, listed.metadata)]
        found = select_files(listed.files, head, schema, where).files
        assert [file.path for file in found] == [file.path for file in one_by_one]
        return len(found)

    assert count("id = 5") == 2
    assert count(f"s = '{'x' * 29}z'") == 1, "beyond what bounds keep, the partition still shows it"
    assert count("id = 6") == 0
    # A column with another name and a wider type, and a partition whose column was dropped.
    renamed = Schema(
        it.NestedField(1, "number", it.LongType(), required=False),
        *(field for field in schema.fields if field.field_id not in (1, 3)),
        it.NestedField(99, "added", it.StringType(), required=False),
    )
    assert count("number = 7", renamed) == 2
    assert count(f"number > {2**40}", renamed) == 0
    assert count("added is null", renamed) == 4
    assert count("added = 'a'", renamed) == 4, "no file says that it lacks the column"


def moment(year: int) -> datetime:
    return datetime(year, 1, 1, tzinfo=UTC)


def test_years_and_hours_far_off_are_not_trusted(tmp_path: Path) -> None:
    columns = "id int, n long, ts timestamp"
    for partition, rows, text in (
        (("truncate(10, n)",), [{"n": -(2**63)}], "n < 0"),
        (("hour(ts)",), [{"ts": moment(1)}, {"ts": moment(9999)}], "ts < '1969-01-01 00:00:00'"),
        (("year(ts)",), [{"ts": None}, {"ts": moment(1960)}], "ts < '1969-01-01 00:00:00'"),
    ):
        listed = Listed(Staged(tmp_path, columns, partition), tmp_path)
        listed.add(listed.table.stage(rows))
        head, schema = listed.head(), listed.table.schema
        assert len(select_files(listed.files, head, schema, Where.parse(text, schema)).files) == 1
    # Only a manifest of years without a null can be left unopened.
    for rows, skipped in (([{"ts": moment(2020)}], 1), ([{"ts": moment(2020)}, {"ts": None}], 0)):
        listed = Listed(Staged(tmp_path, columns, ("year(ts)",)), tmp_path)
        listed.add(listed.table.stage(rows))
        schema = listed.table.schema
        found = select_files(listed.files, listed.head(), schema, Where.parse("ts < '1969-01-01 00:00:00'", schema))
        assert found.manifests_skipped == skipped
        assert not found.files


# ── all types, with conditions that text cannot express yet ──

MOMENT = datetime(2024, 2, 29, 12)
EPOCH = datetime(1970, 1, 1)
FLOATS = [-math.inf, -1.5, -0.0, 0.0, 0.1, 3.0, math.inf, math.nan]


def micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


KINDS: dict[str, tuple[it.PrimitiveType, list[Any]]] = {
    "flag": (it.BooleanType(), [False, True]),
    "int": (it.IntegerType(), [-(2**31), -1, 0, 7, 2**31 - 1]),
    "long": (it.LongType(), [-(2**63), -1, 0, 7, 2**63 - 1]),
    "float": (it.FloatType(), [float(np.float32(value)) for value in FLOATS]),
    "double": (it.DoubleType(), FLOATS),
    "day": (it.DateType(), [-719162, -1, 0, 19000, 2932896]),
    "time": (it.TimeType(), [0, 1, 86_399_999_999]),
    "ts": (it.TimestampType(), [micros(datetime(1, 1, 1)), -1, 0, micros(MOMENT)]),
    "text": (it.StringType(), ["", "a", "ab", "abc" * 7, "abc" * 7 + "d", "é", "\uffff", "😀", "😀" * 20]),
    "bytes": (it.BinaryType(), [b"", b"a", b"\xff", b"\x00\xff" * 12]),
    "fixed": (it.FixedType(2), [b"\x00\x00", b"ab", b"\xff\xff"]),
    "price": (it.DecimalType(9, 2), [Decimal("-1.00"), Decimal("0.00"), Decimal("9999999.99")]),
    "id": (it.UUIDType(), [uuid.UUID(int=number).bytes for number in (0, 5, 2**128 - 1)]),
}
TYPES = Schema(
    *(it.NestedField(at, name, kind, required=False) for at, (name, (kind, _)) in enumerate(KINDS.items(), 1))
)
COMPARISONS: dict[str, type[ex.LiteralPredicate]] = {
    "<": ex.LessThan, "<=": ex.LessThanOrEqual, ">": ex.GreaterThan, ">=": ex.GreaterThanOrEqual, "=": ex.EqualTo,
    "!=": ex.NotEqualTo,
}  # fmt: skip
Model = Callable[[dict[str, Any]], bool | None]


def spark(value: Any) -> Any:
    """A value that sorts as Spark sorts it: NaN is equal to NaN, and above all numbers."""
    return (math.isnan(value), 0.0 if math.isnan(value) else value) if isinstance(value, float) else value


def unknown_if_null(name: str, holds: Callable[[Any], bool]) -> Model:
    return lambda row: None if row[name] is None else holds(row[name])


def leaf(chance: random.Random) -> tuple[BooleanExpression, Model]:
    name = chance.choice(list(KINDS))
    _, values = KINDS[name]
    sign = chance.choice([*COMPARISONS, "in", "not in", "null", "not null", "like", "not like", "nan", "not nan"])
    ref = ex.Reference(name)
    # PyIceberg takes an infinite literal of a float column for one outside the column's range.
    numbers = [value for value in values if not isinstance(value, float) or math.isfinite(value)]
    if sign in COMPARISONS:
        value = chance.choice(numbers)
        compare: Callable[[Any, Any], bool] = {
            "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
            "=": lambda a, b: a == b, "!=": lambda a, b: a != b,
        }[sign]  # fmt: skip
        return COMPARISONS[sign](ref, value), unknown_if_null(name, lambda found: compare(spark(found), spark(value)))
    if sign in ("in", "not in"):
        among = chance.choices(numbers, k=chance.randint(2, 3))
        kind = ex.In if sign == "in" else ex.NotIn
        return kind(ref, among), unknown_if_null(name, lambda found: (found in among) is (sign == "in"))
    if sign in ("like", "not like"):
        start = chance.choice(KINDS["text"][1])[: chance.randint(0, 5)]
        like = ex.StartsWith if sign == "like" else ex.NotStartsWith
        return like("text", start), unknown_if_null("text", lambda found: found.startswith(start) is (sign == "like"))
    if sign in ("nan", "not nan"):
        name = chance.choice(["float", "double"])
        if sign == "nan":
            return ex.IsNaN(name), unknown_if_null(name, math.isnan)
        return ex.NotNaN(name), unknown_if_null(name, lambda found: not math.isnan(found))
    if sign == "null":
        return ex.IsNull(name), lambda row: row[name] is None
    return ex.NotNull(name), lambda row: row[name] is not None


def tree(chance: random.Random, depth: int = 3) -> tuple[BooleanExpression, Model]:
    if depth == 0 or chance.random() < 0.3:
        return leaf(chance)
    (left, left_model), (right, right_model) = tree(chance, depth - 1), tree(chance, depth - 1)
    word = chance.choice(["and", "or", "not"])
    if word == "not":
        return Not(left), lambda row: None if (found := left_model(row)) is None else not found
    decisive = word == "or"

    def model(row: dict[str, Any]) -> bool | None:
        sides = (left_model(row), right_model(row))
        return decisive if decisive in sides else (None if None in sides else not decisive)

    return (Or if decisive else And)(left, right), model


def bounded(chance: random.Random, rows: Sequence[dict[str, Any]], number: int) -> DataFile:
    """A file of these rows: bounds may be cut, may be missing, and do not know of NaN; so may counts."""
    lower, upper, values, nulls, nans = {}, {}, {}, {}, {}
    for field in TYPES.fields:
        there = [row[field.name] for row in rows if row[field.name] is not None]
        plain = [value for value in there if not (isinstance(value, float) and math.isnan(value))]
        kind, odd = field.field_type, chance.random()
        assert isinstance(kind, it.PrimitiveType)
        readable = isinstance(kind, it.BinaryType | it.FixedType | it.UUIDType | it.DecimalType)
        if plain and chance.random() < 0.9:
            lower[field.field_id] = cut(kind, min(plain), False) if odd > 0.05 or readable else b"\xff\x01\xff"
        if plain and chance.random() < 0.9:
            upper[field.field_id] = cut(kind, max(plain), True) if odd < 0.95 or readable else b"\x00\xff"
        if len(plain) < len(there) and chance.random() < 0.3:
            lower[field.field_id] = to_bytes(kind, math.nan)
        if chance.random() < 0.9:
            values[field.field_id] = len(rows)
        if chance.random() < 0.9:
            nulls[field.field_id] = len(rows) - len(there)
        if isinstance(kind, it.FloatType | it.DoubleType) and chance.random() < 0.9:
            nans[field.field_id] = len(there) - len(plain)
    return DataFile.from_args(
        content=DataFileContent.DATA, file_path=f"file:///{number}.parquet", file_format=FileFormat.PARQUET,
        partition=Record(), record_count=len(rows), file_size_in_bytes=1, column_sizes={}, value_counts=values,
        null_value_counts=nulls, nan_value_counts=nans, lower_bounds=lower, upper_bounds=upper,
    )  # fmt: skip


def cut(kind: it.PrimitiveType, value: Any, up: bool) -> bytes:
    if isinstance(value, str) and len(value) > 16:
        value = value[:16] + ("\U0010ffff" if up else "")
    elif isinstance(kind, it.BinaryType) and len(value) > 16:
        value = value[:16] + (b"\xff" * 9 if up else b"")
    return to_bytes(kind, value)


@pytest.mark.parametrize("seed", range(8))
def test_every_type_and_comparison(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    contents = [
        [
            {name: None if chance.random() < nulls else chance.choice(values) for name, (_, values) in KINDS.items()}
            for _ in range(count)
        ]
        for nulls in (0.0, 0.4, 1.0)
        for count in (1, 2, 4)
        for _ in range(5)
    ]
    columns = manifest_columns(tmp_path, [bounded(chance, rows, number) for number, rows in enumerate(contents)])
    left_out = complete = 0
    for _ in range(150):
        unbound, model = tree(chance)
        bound = visitors.bind(TYPES, visitors.rewrite_not(unbound), case_sensitive=True)
        verdict = file_test.test(bound, file_test.file_spans(columns))
        may = np.broadcast_to(verdict.may, len(contents))
        for at, rows in enumerate(contents):
            assert may[at] or not any(model(row) is True for row in rows), (unbound, rows)
        left_out, complete = left_out + int((~may).sum()), complete + verdict.complete
    assert left_out > 500
    assert 50 < complete < 150, "what it does not understand is left to others, and it understands most"


def manifest_columns(folder: Path, files: Sequence[DataFile]) -> FileColumns:
    from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus, write_manifest

    io = MetadataFiles(Storage()).io
    location = f"file://{folder}/{uuid.uuid4()}.avro"
    with write_manifest(2, PartitionSpec(), TYPES, io.new_output(location), SNAPSHOT, "deflate") as writer:
        for file in files:
            writer.add_entry(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED, snapshot_id=SNAPSHOT, sequence_number=None,
                    file_sequence_number=None, data_file=file,
                )
            )  # fmt: skip
    manifest = writer.to_manifest_file()
    manifest.sequence_number = 3
    return columns_of(io.storage.read(location), manifest)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("float", "double")])
def test_bounds_rule_out_as_pyiceberg_would(tmp_path: Path, name: str) -> None:
    """One column, files of one and two values, and every comparison with every value: nothing is given away."""
    chance, (kind, values) = random.Random(name), KINDS[name]
    assert isinstance(kind, it.PrimitiveType)
    field_id = TYPES.find_field(name).field_id
    files = [
        replace_bounds(bounded(chance, [], number), field_id, to_bytes(kind, low), to_bytes(kind, high))
        for number, (low, high) in enumerate((low, high) for low in values for high in values if low <= high)
    ]
    columns = manifest_columns(tmp_path, files)
    for compare in COMPARISONS.values():
        for value in values:
            predicate = compare(ex.Reference(name), value)
            bound = visitors.bind(TYPES, predicate, case_sensitive=True)
            verdict = file_test.test(bound, file_test.file_spans(columns))
            theirs = visitors._InclusiveMetricsEvaluator(TYPES, predicate)
            expected = [theirs.eval(file) for file in files]
            ours = np.broadcast_to(verdict.may, len(files)).tolist()
            assert verdict.complete
            if compare is ex.NotEqualTo:
                assert sum(ours) == len(files) - 1, "all values of one file are the literal"
            else:
                assert ours == expected, predicate


def replace_bounds(file: DataFile, field_id: int, low: bytes, high: bytes) -> DataFile:
    return DataFile.from_args(
        content=DataFileContent.DATA, file_path=file.file_path, file_format=FileFormat.PARQUET, partition=Record(),
        record_count=2, file_size_in_bytes=1, column_sizes={}, value_counts={field_id: 2},
        null_value_counts={field_id: 0}, nan_value_counts={}, lower_bounds={field_id: low},
        upper_bounds={field_id: high},
    )  # fmt: skip


def test_what_is_not_understood_is_tested_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Listed(Staged(tmp_path, CHECKED), tmp_path)
    listed.add([one for number in range(5) for one in listed.table.stage([{"id": number, "n": number % 2}])])
    head, schema = listed.head(), listed.table.schema
    where = Where.parse("id > 1 and n = 1", schema)
    expected = [file.path for file in select_files(listed.files, head, schema, where).files]
    assert len(expected) == 1
    whole, asked = file_test.test, list[Any]()

    def without_equality(tree: BooleanExpression, spans: file_test.Spans) -> file_test.Verdict:
        if isinstance(tree, ex.BoundEqualTo):
            asked.append(tree)
            return file_test.Verdict(np.ones(1, np.bool_), False)
        return whole(tree, spans)

    monkeypatch.setattr(file_test, "test", without_equality)
    assert [file.path for file in select_files(listed.files, head, schema, where).files] == expected
    assert asked


# ── by sequence ──


def test_files_of_a_range_of_sequences_are_those_of_the_plan(tmp_path: Path) -> None:
    listed = Listed(Staged(tmp_path, "id long"), tmp_path)
    chance, made = random.Random(5), Files(listed.table.schema)
    live = []
    for sequence in range(1, 7):
        live.append(made.fresh(sequence, [{"id": sequence}]))
        rows = [{"id": number, SEQ_COLUMN: chance.randint(1, sequence)} for number in range(3)]
        live.append(made.settled(sequence, rows))
        live.append(made.settled(sequence, [{"id": 1, SEQ_COLUMN: None}, {"id": 2, SEQ_COLUMN: sequence}]))
    entries = [entry_of(file.data_file, file.sequence or 0) for file in live]
    location = f"file://{tmp_path}/m.avro"
    listed.manifests.append(write_merged(listed.files.io, location, listed.metadata, 0, SNAPSHOT, entries))
    head, schema = listed.head(), listed.table.schema
    fewer = 0
    for since in range(7):
        for until in range(since + 1, 8):
            every = live_files(listed.files, head, schema, since)
            found = select_newer(listed.files, head, schema, since, until)
            expected = [file.path for file in plan_changes(schema, every, [], since, until).files]
            assert [file.path for file in found] == expected
            assert [file.path for file in plan_changes(schema, found, [], since, until).files] == expected
            assert [(file.sequence, file.fresh, file.settled, file.seq_bounds()) for file in found] == [
                (file.sequence, file.fresh, file.settled, file.seq_bounds()) for file in every if file.path in expected
            ]
            fewer += len(found) < len(every)
    assert fewer > 10


def entry_of(file: DataFile, sequence: int) -> Any:
    from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus

    return ManifestEntry.from_args(
        status=ManifestEntryStatus.EXISTING, snapshot_id=SNAPSHOT, sequence_number=sequence,
        file_sequence_number=sequence, data_file=file,
    )  # fmt: skip


def test_a_planned_file_is_like_any_other() -> None:
    """Its fields by position, its copies, and what it has no field for."""
    columns = FileColumns(
        1, 3, "file:///t/", pa.array(["a.parquet"]), it.StructType(), (), np.ones(1, np.int8), np.ones(1, np.int8),
        np.ones(1, np.int8), {}, np.zeros(1, np.bool_), {101: "PARQUET"}, {},
    )  # fmt: skip
    file = PlannedDataFile(columns, 0)
    assert (file[1], file.file_path, len(file), file.spec_id) == ("file:///t/a.parquet", file[1], 16, 3)
    assert file == PlannedDataFile(columns, 0)
    assert not hasattr(file, "first_row_id")
