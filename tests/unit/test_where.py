"""Conditions without Spark: which are plain, what they match, and which files they rule out."""

from __future__ import annotations

import pickle
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from floodmark.commit.live_files import LiveFile, seq_field_id
from floodmark.commit.manifests import data_file
from floodmark.commit.metadata import new_metadata
from floodmark.errors import Invalid
from floodmark.model import FileRecord
from floodmark.rows import project
from floodmark.rows.project import kept_groups, read_file, read_numbered, read_schema
from floodmark.rows.schema import table_schema, user_fields
from floodmark.rows.sql.where import Where
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage
from floodmark.write.shape import plan_table

COLUMNS = (
    "id int, n long, s string, ok boolean, day date, x double, ts timestamp, d decimal(10,2), b binary, "
    "st struct<flag:boolean,n:int>, m map<string,int>, date date, user string, Mixed int"
)
SCHEMA = table_schema(COLUMNS)

PLAIN = [
    "id = 5",
    "id == -5",
    "ID != 5",
    "mixed <> 5",
    "n < 9223372036854775807",
    "n >= -9223372036854775808",
    "id = 007",
    "5 < id",
    "id in (1, 2, 3)",
    "id not in (1)",
    "s = 'a'",
    "s = ''",
    "s > 'é 😀'",
    "s in ('a', 'and', ' or ')",
    "s like 'abc%'",
    "s not like 'abc%'",
    "s like '%'",
    "s like 'abc'",
    "ok = true",
    "ok != FALSE",
    "ok in (true, false)",
    "day = '2024-02-29'",
    "day between '2024-01-01' and '2024-12-31'",
    "date < '2024-01-01'",
    "day = date '2024-01-01'",
    "DATE'2024-01-01' > day",
    "date = date '2024-01-01'",
    "day in (date '2024-01-01', '2024-01-02')",
    "not day between DATE '2024-01-01' and '2024-12-31'",
    "x is null",
    "ts is not null",
    "b IS NULL",
    "not id = 5",
    "not (id = 5 or s = 'a') and ok = true",
    "(((id = 5)))",
    "\n id\t=\r5 ",
    "true",
    "FALSE",
]
NOT_PLAIN = [
    "id = 5.0",
    "id = 5L",
    "id = 5or s = 'a'",
    "id = 1e1",
    "id = +5",
    "id = - 5",
    "id = 2147483648",
    "n = 9223372036854775808",
    "id <=> 5",
    "id = '5'",
    "id = null",
    "id in (1, null)",
    "id in (1, 2.0)",
    "id = n",
    "1 = 1",
    "id + 1 = 5",
    "id = 5 -- comment",
    "id = 5 /* comment */",
    "id = 5;",
    "x = 5",
    "x > 5.0",
    "x is nan",
    "d = 1",
    "d = 1.25",
    "ts > '2024-01-01'",
    "b = 'a'",
    "s = 5",
    "s = 'it''s'",
    "s = 'a' 'b'",
    r"s = 'a\'b'",
    r"s = 'a\nb'",
    's = "a"',
    "s = r'a'",
    "s = '${x}'",
    "`s` = 'a'",
    '"s" = 1',
    "s like '%abc'",
    "s like 'a_c%'",
    "s like 'a%c%'",
    r"s like 'a\%%'",
    "id like '5%'",
    "day like '2024%'",
    "ok",
    "not ok",
    "ok > false",
    "ok is true",
    "true and id = 5",
    "ok = 'true'",
    "day = '2024-2-9'",
    "day = '2023-02-29'",
    "day = '2024-01-01T00:00:00'",
    "day = 19000",
    "day = date '2024-1-9'",
    "day = date '2024-01-01T00:00:00'",
    "day = timestamp '2024-01-01 00:00:00'",
    "day = timestamp_ntz '2024-01-01 00:00:00'",
    "day like date '2024-01-01'",
    "s = date '2024-01-01'",
    "s in ('a', date '2024-01-01')",
    "id = date '2024-01-01'",
    "st.flag = true",
    "st is null",
    "m is null",
    "m.a = 1",
    "upper(s) = 'A'",
    "user = 'a'",
    "current_date = '2024-01-01'",
    "true = true",
    "null is null",
    "id in (select 1)",
    "id = (5)",
    "(id, n) = (1, 2)",
    "1=1) or (1=1",
    "!(id = 5)",
    "id not between 1 and 2",
    "(" * 60 + "id = 5" + ")" * 60,
]


@pytest.mark.parametrize("text", PLAIN)
def test_what_spark_and_arrow_read_alike_is_plain(text: str) -> None:
    assert Where.parse(text, SCHEMA).plain


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_what_is_not_certain_is_left_to_spark(text: str) -> None:
    where = Where.parse(text, SCHEMA)
    assert not where.plain
    with pytest.raises(ValueError, match="only Spark"):
        where.mask(pa.record_batch({"id": [1]}))


@pytest.mark.parametrize("text", ["", " \n", None, True])
def test_no_condition_is_invalid(text: Any) -> None:
    with pytest.raises(Invalid, match="no condition"):
        Where.parse(text, SCHEMA)


def test_a_column_that_is_certainly_not_there_is_invalid_with_the_nearest_name() -> None:
    with pytest.raises(Invalid, match="no such column") as refused:
        Where.parse("id = 5 and contry = 'XX'", table_schema("id long, country string"))
    assert refused.value.facts == {"column": "contry"}
    assert refused.value.advice == "Did you mean country?"
    with pytest.raises(Invalid):
        Where.parse("_seq = 5", SCHEMA)


def test_names_that_only_spark_can_resolve_are_left_to_it() -> None:
    # A function without parentheses, the field of a struct, and two columns that differ in case only.
    for text in ("current_user = 'a'", "s.nope = 1", "nope(s) = 1"):
        assert not Where.parse(text, SCHEMA).plain
    twice = Schema(NestedField(1, "a", LongType()), NestedField(2, "A", LongType()))
    assert not Where.parse("a = 1", twice).plain


def test_a_condition_names_the_columns_that_it_reads() -> None:
    fields = Where.parse("s = 'a' or (ID = 5 and not S = 'b')", SCHEMA).fields
    assert [(field.name, field.field_id) for field in fields] == [("id", 1), ("s", 3)]
    # Rows are counted by a column, so there is one even if no value of it matters.
    assert [field.name for field in Where.parse("true", SCHEMA).fields] == ["id"]


def test_a_condition_travels_as_two_texts() -> None:
    where = Where.parse("id = 5", SCHEMA)
    assert where.mask(pa.record_batch({"id": pa.array([5], pa.int32())})).to_pylist() == [True]
    sent = pickle.dumps(where)
    assert len(sent) < len(where.schema_json) + 300
    assert pickle.loads(sent) == where


# ── which rows match, against a model of SQL's logic ──

DAYS = [date(1969, 12, 31), date(1970, 1, 1), date(2024, 1, 31), date(2024, 2, 1), date(2024, 12, 31)]
VALUES: dict[str, list[Any]] = {
    "id": [-(2**31), -7, 0, 1, 2, 9, 10, 2**31 - 1],
    "n": [-(2**63), -1, 0, 5, 2**40, 2**63 - 1],
    "s": ["", "a", "ab", "abc", "b", "é", "😀", "\uffff", "prefix of sixteen and more", "prefix of sixteen and less"],
    "ok": [True, False],
    "day": DAYS,
}
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: bool(a == b),
    "==": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
    "<>": lambda a, b: bool(a != b),
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
}
Model = Callable[[dict[str, Any]], bool | None]


def literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f"'{value}'"


def literal_of(chance: random.Random, value: Any) -> str:
    """Of a day sometimes with its type, which means the same."""
    return f"{chance.choice(['date ', 'DATE', ''])}{literal(value)}" if isinstance(value, date) else literal(value)


def known(column: str, test: Callable[[Any], bool]) -> Model:
    return lambda row: None if row[column] is None else test(row[column])


def both(left: Model, right: Model, decisive: bool) -> Model:
    """AND is decided by a false, OR by a true; else a null makes it null."""

    def model(row: dict[str, Any]) -> bool | None:
        sides = (left(row), right(row))
        return decisive if decisive in sides else (None if None in sides else not decisive)

    return model


def negated(child: Model) -> Model:
    return lambda row: None if (found := child(row)) is None else not found


def random_leaf(chance: random.Random) -> tuple[str, Model]:
    column = chance.choice(list(VALUES))
    values = VALUES[column]
    value = chance.choice(values)
    kind = chance.choice(["compare", "compare", "compare", "flipped", "in", "null", "like", "between"])
    if kind == "null":
        absent = chance.random() < 0.5
        return f"{column} is {'' if absent else 'not '}null", lambda row: (row[column] is None) is absent
    if kind == "in" or (kind == "like" and column != "s") or (kind == "between" and column == "ok"):
        among = chance.choices(values, k=chance.randint(1, 3))
        word = chance.choice(["in", "not in"])
        text = f"{column} {word} ({', '.join(literal_of(chance, one) for one in among)})"
        return text, known(column, lambda found: (found in among) is (word == "in"))
    if kind == "like":
        start = value[: chance.randint(0, len(value))]
        word = chance.choice(["like", "NOT LIKE"])
        return f"s {word} '{start}%'", known("s", lambda found: found.startswith(start) is (word == "like"))
    if kind == "between":
        high = chance.choice(values)
        return (
            f"{column} between {literal_of(chance, value)} and {literal_of(chance, high)}",
            known(column, lambda found: value <= found <= high),
        )
    sign = chance.choice(list(ORDERS) if column != "ok" else ["=", "!="])
    if kind == "flipped":
        return f"{literal_of(chance, value)} {sign} {column}", known(column, lambda found: ORDERS[sign](value, found))
    return f"{column} {sign} {literal_of(chance, value)}", known(column, lambda found: ORDERS[sign](found, value))


def random_condition(chance: random.Random, depth: int = 3) -> tuple[str, Model]:
    """A text and what it means. Parentheses stand only where the precedence of SQL needs them."""
    text, model, _ = _random(chance, depth)
    return text, model


def _random(chance: random.Random, depth: int) -> tuple[str, Model, int]:
    if depth == 0 or chance.random() < 0.3:
        return *random_leaf(chance), 3
    word = chance.choice(["not", "and", "or"])
    strength = {"or": 0, "and": 1, "not": 2}[word]
    children = [_random(chance, depth - 1) for _ in range(1 if word == "not" else 2)]
    texts = [text if own >= strength else f"({text})" for text, _, own in children]
    if word == "not":
        return f"NOT {texts[0]}", negated(children[0][1]), strength
    return f"{texts[0]} {word} {texts[1]}", both(children[0][1], children[1][1], word == "or"), strength


def random_rows(chance: random.Random, count: int, nulls: float = 0.3) -> list[dict[str, Any]]:
    return [
        {column: None if chance.random() < nulls else chance.choice(values) for column, values in VALUES.items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_rows_match_by_the_logic_of_sql_with_nulls(seed: int) -> None:
    chance = random.Random(seed)
    fields = [field for field in user_fields(SCHEMA) if field.name in VALUES]
    rows = random_rows(chance, 40)
    batch = pa.RecordBatch.from_pylist(rows, schema=read_schema(fields))
    for _ in range(25):
        text, model = random_condition(chance)
        where = Where.parse(text, SCHEMA)
        assert where.plain, text
        mask = where.mask(batch.select([field.name for field in where.fields]))
        assert mask.null_count == 0
        assert mask.to_pylist() == [model(row) is True for row in rows], text


def test_everything_matches_every_row() -> None:
    batch = pa.record_batch({"any": [1, None, 3]})
    everything = Where.everything()
    assert everything.plain
    assert everything.mask(batch).to_pylist() == [True] * 3
    assert Where.parse("false", SCHEMA).mask(batch).to_pylist() == [False] * 3


# ── which files are ruled out ──


class Staged:
    """A table in a folder: rows are staged as real files, with the statistics that the writer gave them."""

    def __init__(self, folder: Path, columns: str, partition: Sequence[str] = (), key: Sequence[str] = ()) -> None:
        shape = plan_table("t", columns, key=key, partition=partition)
        self.metadata = new_metadata(
            f"file://{folder}", str(uuid.uuid4()), shape.schema, shape.spec, shape.sort, dict(shape.properties)
        )
        self.schema = self.metadata.schema()
        self.storage = Storage({})
        spec_json = self.metadata.spec().model_dump_json()
        self._target = StageTarget(f"file://{folder}", self.schema.model_dump_json(), spec_json)

    def stage(self, rows: Any) -> list[FileRecord]:
        return stage_in_process(self._target, rows, self.storage)

    def live(self, record: FileRecord) -> LiveFile:
        return LiveFile(data_file(record, self.metadata, self.metadata.default_spec_id), 1, seq_field_id(self.schema))

    def rows(self, record: FileRecord) -> list[dict[str, Any]]:
        batches = read_file(self.storage, record.path, user_fields(self.schema))
        return [row for batch in batches for row in batch.to_pylist()]


CHECKED = "id int, n long, s string, ok boolean, day date"
PARTITIONS: list[tuple[str, ...]] = [
    (),
    ("s",),
    ("id", "ok"),
    ("day",),
    ("day(day)",),
    ("month(day)",),
    ("year(day)",),
    ("bucket(3, id)", "bucket(2, s)"),
    ("bucket(3, day)", "n"),
    ("truncate(2, s)",),
    ("truncate(10, id)", "truncate(3, n)"),
    ("void(id)",),
]


def damaged(record: FileRecord) -> Iterator[FileRecord]:
    """The same file with statistics that other writers may leave out."""
    yield record
    yield replace(record, null_counts={})
    yield replace(record, value_counts={}, null_counts={})
    yield replace(record, lower_bounds={})
    yield replace(record, upper_bounds={}, null_counts={})
    yield replace(record, value_counts={}, null_counts={}, lower_bounds={}, upper_bounds={})
    yield replace(record, lower_bounds={1: "AAA=", 3: "/w=="}, upper_bounds={5: "AAA="})


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: "+".join(partition) or "none")
def test_a_file_is_ruled_out_only_if_no_row_of_it_matches(tmp_path: Path, partition: tuple[str, ...]) -> None:
    chance = random.Random(repr(partition))
    table = Staged(tmp_path, CHECKED, partition)
    records = [
        record
        for nulls in (0.0, 0.0, 0.3, 1.0)
        for count in (1, 2, 5)
        for record in table.stage(random_rows(chance, count, nulls))
    ]
    files = [(table.rows(record), [table.live(one) for one in damaged(record)]) for record in records]
    ruled_out = whole = 0
    for _ in range(60):
        text, model = random_condition(chance)
        where = Where.parse(text, table.schema)
        for rows, versions in files:
            matching = sum(model(row) is True for row in rows)
            for file in versions:
                may, must = where.may_match(file, table.metadata), where.must_match(file, table.metadata)
                assert may or matching == 0, (text, rows)
                assert not must or matching == len(rows), (text, rows)
                ruled_out += not may
                whole += must
    # The check would be blind if nothing were ever proven.
    assert ruled_out > 100
    assert whole > 20


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("statistics", [True, ["id", "s"], False], ids=["all", "some", "none"])
def test_a_row_group_is_ruled_out_only_if_no_row_of_it_matches(tmp_path: Path, seed: int, statistics: Any) -> None:
    chance = random.Random(seed)
    fields = [field for field in user_fields(table_schema(CHECKED)) if field.name in VALUES]
    # The file lacks a column of the table: it reads as null.
    lacking = chance.choice([None, *fields])
    held = [field for field in fields if field is not lacking]
    rows = [row for nulls in (0.0, 0.3, 1.0) for row in random_rows(chance, 12, nulls)]
    rows = [{**row, **({} if lacking is None else {lacking.name: None})} for row in rows]
    table = pa.Table.from_pylist(rows, schema=read_schema(held))
    ids = {field.name: {b"PARQUET:field_id": str(field.field_id).encode()} for field in held}
    table = table.cast(pa.schema([one.with_metadata(ids[one.name]) for one in table.schema]))
    pq.write_table(table, tmp_path / "groups.parquet", row_group_size=2, write_statistics=statistics)
    location, storage, schema = f"file://{tmp_path}/groups.parquet", Storage({}), table_schema(CHECKED)
    left_out = 0
    for _ in range(40):
        text, model = random_condition(chance)
        where = Where.parse(text, schema)
        found = list(read_numbered(storage, location, fields, tests=[where.group_test]))
        opened = {start + offset for start, batch in found for offset in range(len(batch))}
        assert {at for at, row in enumerate(rows) if model(row) is True} <= opened, text
        for start, batch in found:
            assert batch.to_pylist() == rows[start : start + len(batch)]
        kept = kept_groups(storage, location, fields, [where.group_test])
        assert (kept.kept, kept.all) == (len(opened) // 2, len(rows) // 2)
        left_out += len(rows) - len(opened)
    assert (left_out > 0) is bool(statistics) or lacking is not None


def test_statistics_of_another_unit_or_order_prove_nothing(tmp_path: Path) -> None:
    columns = {"ts": pa.array([1_000, 2_000], pa.timestamp("ms")), "n": pa.array([1, 2**63 + 5], pa.uint64())}
    pq.write_table(pa.table(columns), tmp_path / "other.parquet")
    table = table_schema("ts timestamp_ntz, n long")
    with pq.ParquetFile(tmp_path / "other.parquet") as parquet:
        names = {field.field_id: field.name for field in user_fields(table)}
        for text in ("ts < timestamp_ntz '1970-01-01 00:00:00.001'", "n > 9223372036854775806", "n < 0"):
            assert Where.parse(text, table).group_test(parquet.metadata, names) == [True]
        # A column that the file does not have is null, and null is no match.
        assert Where.parse("n > 5", table).group_test(parquet.metadata, {}) == [False]


def one_file(folder: Path, rows: list[dict[str, Any]], partition: Sequence[str] = ()) -> tuple[Staged, LiveFile]:
    table = Staged(folder, CHECKED, partition)
    (record,) = table.stage(rows)
    return table, table.live(record)


def test_statistics_prove_what_they_can(tmp_path: Path) -> None:
    long = "the same beginning of all"
    table, file = one_file(tmp_path, [{"id": number, "n": 5, "s": f"{long} {number}"} for number in range(10, 20)])

    def answers(text: str) -> tuple[bool, bool]:
        where = Where.parse(text, table.schema)
        return where.may_match(file, table.metadata), where.must_match(file, table.metadata)

    never, some, always = (False, False), (True, False), (True, True)
    assert answers("id = 9") == never
    assert answers("id = 15") == some
    assert answers("id >= 10 and id < 20") == always
    assert answers("not id > 19") == always
    assert answers("n = 5") == always
    assert answers("n in (5, 6)") == always
    assert answers("n != 5") == some  # bounds need not be values
    assert answers("n != 6") == always
    assert answers("s > 'a'") == always
    assert answers("s < 'the'") == never
    assert answers(f"s = '{long} 15'") == some
    assert answers("s = 'the same beginning of none'") == some  # beyond what bounds keep
    assert answers("s like 'some%'") == never
    assert answers("ok is null") == always
    assert answers("ok = true") == never
    assert answers("day != '2024-01-01'") == some  # nulls: PyIceberg would say that all match
    assert answers("day not in ('2024-01-01')") == some
    assert answers("id is not null") == always


def test_counts_that_are_not_of_all_rows_prove_nothing(tmp_path: Path) -> None:
    table = Staged(tmp_path, CHECKED)
    (record,) = table.stage([{"ok": None}, {"ok": True}])
    ok = table.schema.find_field("ok").field_id
    where = Where.parse("ok is null", table.schema)
    for values, nulls in ((1, 1), (3, 3), (2, 1)):
        file = table.live(replace(record, value_counts={ok: values}, null_counts={ok: nulls}))
        assert where.may_match(file, table.metadata)
        assert not where.must_match(file, table.metadata)


def bucket(count: int, number: int) -> int | None:
    return BucketTransform(count).transform(IntegerType())(number)


@pytest.mark.parametrize(
    ("partition", "text"),
    [
        (("bucket(16, id)",), "id = {other}"),
        (("s",), "s = 'a text that is longer than bounds are: x'"),
        (("truncate(23, s)",), "s like 'a text that is longer y%'"),
    ],
)
def test_partitions_prove_what_statistics_cannot(tmp_path: Path, partition: tuple[str, ...], text: str) -> None:
    row = {"s": "a text that is longer than bounds are: z"}
    table = Staged(tmp_path, CHECKED, partition)
    low, high = table.stage([{"id": 1, **row}])[0], table.stage([{"id": 100, **row}])[0]
    # A file that says it has everything between: only its partition speaks against the number in the middle.
    wide = replace(low, upper_bounds={**low.upper_bounds, 1: high.upper_bounds[1]})
    other = next(number for number in range(2, 100) if bucket(16, number) != bucket(16, 1))
    where = Where.parse(text.format(other=other), table.schema)
    assert not where.may_match(table.live(wide), table.metadata)
    unpartitioned = Staged(tmp_path, CHECKED)
    assert where.may_match(unpartitioned.live(replace(wide, partition=())), unpartitioned.metadata)


def test_a_number_that_truncation_carried_to_the_other_end_is_found(tmp_path: Path) -> None:
    table, file = one_file(tmp_path, [{"id": 1, "n": -(2**63)}], ("truncate(10, n)",))
    assert file.data_file.partition[0] > 0
    assert Where.parse("n < 0", table.schema).may_match(file, table.metadata)
    assert Where.parse(f"n = {-(2**63)}", table.schema).may_match(file, table.metadata)
    assert not Where.parse("n > 0", table.schema).may_match(file, table.metadata)


@pytest.mark.parametrize("text", ["day < '0001-01-01'", "day > '9999-12-31'", "day >= '0001-01-01'"])
def test_days_at_the_end_of_the_calendar_are_compared(tmp_path: Path, text: str) -> None:
    table, file = one_file(tmp_path, [{"day": date(1, 1, 1)}, {"day": date(1, 1, 1)}], ("year(day)",))
    where = Where.parse(text, table.schema)
    (batch,) = read_file(table.storage, file.path, where.fields)
    matching = where.mask(batch).true_count
    assert matching == (2 if ">=" in text else 0)
    assert where.may_match(file, table.metadata) is (matching > 0)


def evolved(schema: Schema, change: Callable[[NestedField], NestedField | None], *added: NestedField) -> Schema:
    return Schema(*(found for field in schema.fields if (found := change(field)) is not None), *added)


def test_a_column_that_the_file_does_not_have_reads_as_null(tmp_path: Path) -> None:
    table, file = one_file(tmp_path, [{"id": 1}, {"id": 2}])
    for required in (False, True):
        added = NestedField(99, "added", StringType(), required=required)
        schema = evolved(table.schema, lambda field: field, added)
        where = Where.parse("added is null", schema)
        assert where.may_match(file, table.metadata)
        (batch,) = read_file(table.storage, file.path, where.fields)
        assert where.mask(batch).to_pylist() == [True, True]
        for text in ("added = 'a'", "added != 'a'", "not added = 'a'", "added not like 'a%'", "added is not null"):
            where = Where.parse(text, schema)
            assert where.may_match(file, table.metadata)  # the file does not say that it lacks the column
            assert not where.must_match(file, table.metadata)
            assert where.mask(batch).to_pylist() == [False, False]


def test_bounds_of_a_column_that_was_widened_or_renamed_still_count(tmp_path: Path) -> None:
    table, file = one_file(tmp_path, [{"id": 5}, {"id": 7}])

    def widen(field: NestedField) -> NestedField:
        return NestedField(1, "number", LongType(), required=False) if field.name == "id" else field

    schema = evolved(table.schema, widen)
    assert not Where.parse("number = 4", schema).may_match(file, table.metadata)
    assert not Where.parse(f"number > {2**40}", schema).may_match(file, table.metadata)
    assert Where.parse("number > 4", schema).must_match(file, table.metadata)
    assert Where.parse("number = 6", schema).may_match(file, table.metadata)


def test_a_file_is_judged_by_the_partitions_that_it_was_written_with(tmp_path: Path) -> None:
    table, file = one_file(tmp_path, [{"id": 5, "s": "x" * 30}, {"id": 7, "s": "x" * 30}], ("s",))
    source = table.schema.find_field("id").field_id
    newer = PartitionSpec(PartitionField(source, 1001, IdentityTransform(), "id"), spec_id=1)
    metadata: TableMetadata = table.metadata.model_copy(
        update={"partition_specs": [*table.metadata.partition_specs, newer], "default_spec_id": 1}
    )
    assert Where.parse("id = 5", table.schema).may_match(file, metadata)
    assert not Where.parse(f"s = '{'x' * 29}y'", table.schema).may_match(file, metadata)
    # The column that the partition came from was dropped since.
    without = evolved(table.schema, lambda field: None if field.name == "s" else field)
    assert Where.parse("id = 5", without).may_match(file, metadata)
    assert not Where.parse("id = 8", without).may_match(file, metadata)


def test_everything_takes_every_file_whole(tmp_path: Path) -> None:
    table, file = one_file(tmp_path, [{}], ("bucket(4, id)",))
    everything = Where.everything()
    assert everything.may_match(file, table.metadata)
    assert everything.must_match(file, table.metadata)
    assert not Where.parse("false", table.schema).may_match(file, table.metadata)


CONJUNCTS = [
    ("id = 5 and upper(s) = 'X'", False),
    ("upper(s) = 'X' AND id = 5", False),
    ("(id = 5 or id = 6) and abs(n) > 1", False),
    ("x between 1 and 2 and id = 5", False),
    ("not x between 1 and 2 and not id > 5", False),
    ("s = 'it''s' and id = 5", False),
    ('s = " and " and id = 5', False),
    ("`st`.n > 1 and id < 10", False),
    ("m['and'] = 1 and id = 5", False),
    ("x > 1.5 and id = 15", True),
    ("id = 5 or upper(s) = 'X'", True),
    ("upper(s) = 'X' and id = 15 or id = 5", True),
    ("not (id = 5 and upper(s) = 'X')", True),
    ("if(true, id = 5 and ok, true)", True),
    ("case when ok then true and id = 5 end", True),
    ("case when ok and id = 5 and x > 1 then false else true end", True),
    ("s = upper('x and id = 5')", True),
    (r"s = '\' and id = 5 and s <> \'' ", True),
    (r"s = r'\' and id = 5 and s <> 'x'", True),
    ("upper(s) = 'X' -- and id = 5", True),
    ("upper(s) = 'X' /* and id = 5 and */", True),
    ("x between 5 and id = 5", True),
    ("x between 5 and 6 or x between 7 and 8 and id = 5", True),
    ("exists(array(id), i -> i > 1 and id = 5)", True),
    ("m.and -5 = id", True),
    ("'${x}' and id = 5", True),
    ("and(id = 5, upper(s) = 'X')", True),
    ("and and id = 5", True),
    ("(id = 5", True),
    ("id = 5) and (id = 5", True),
]


@pytest.mark.parametrize(("text", "may"), CONJUNCTS)
def test_of_what_only_spark_understands_the_certain_conjuncts_rule_out(tmp_path: Path, text: str, may: bool) -> None:
    table = Staged(tmp_path, COLUMNS)
    (record,) = table.stage([{"id": 15}, {"id": 20}])
    where = Where.parse(text, table.schema)
    assert not where.plain
    assert where.may_match(table.live(record), table.metadata) is may
    assert not where.must_match(table.live(record), table.metadata)


def test_with_columns_named_like_operators_nothing_is_certain(tmp_path: Path) -> None:
    table = Staged(tmp_path, "id int, x double, st struct<`and`:boolean>")
    (record,) = table.stage([{"id": 15}])
    assert Where.parse("x > 1.5 and id = 5", table.schema).may_match(table.live(record), table.metadata)


def test_row_groups_are_read_in_runs_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = pa.field("id", pa.int64(), metadata={b"PARQUET:field_id": b"1"})
    rows = pa.table({"id": pa.array(range(10_000))}, schema=pa.schema([field]))
    pq.write_table(rows, tmp_path / "groups.parquet", row_group_size=100, use_dictionary=False)
    size_bytes = pq.ParquetFile(tmp_path / "groups.parquet").metadata.row_group(0).total_byte_size
    monkeypatch.setattr(project, "RUN_BYTES", 5 * size_bytes)
    read: list[list[int]] = []
    whole = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *args, **options: (read.append(options["row_groups"]), whole(*args, **options))[1],
    )
    fields = user_fields(table_schema("id long"))
    found = list(read_numbered(Storage({}), f"file://{tmp_path}/groups.parquet", fields))
    assert [start for start, _ in found] == [number * 500 for number in range(20)]
    assert [one for batch in found for one in batch[1].column(0).to_pylist()] == list(range(10_000))
    assert {len(run) for run in read} == {5}
