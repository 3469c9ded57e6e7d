"""Conditions on timestamps: which files they rule out, whatever time zone the session has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from floodmark.commit.live_files import LiveFile
from floodmark.model import FileRecord
from floodmark.rows.sql.where import Where
from tests.unit.test_where import ORDERS, Staged

COLUMNS = "id int, at timestamp, local timestamp_ntz, country string"
TIMES = (2, 3)
MICROSECOND, HOUR, DAY = timedelta(microseconds=1), timedelta(hours=1), timedelta(days=1)


def micros(text: str) -> int:
    moment = datetime.fromisoformat(text)
    since = moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return since // MICROSECOND


def rows_of(values: list[int | None], country: str = "x") -> pa.Table:
    """Rows with the same time in both columns."""
    return pa.table(
        {
            "id": pa.array(range(len(values)), pa.int32()),
            "at": pa.array(values, pa.timestamp("us", tz="UTC")),
            "local": pa.array(values, pa.timestamp("us")),
            "country": pa.array([country] * len(values)),
        }
    )


def without_bounds(record: FileRecord) -> FileRecord:
    """The same file, which does not say between what times it is: only its partition may."""
    lower, upper = (
        {field: bound for field, bound in bounds.items() if field not in TIMES}
        for bounds in (record.lower_bounds, record.upper_bounds)
    )
    return replace(record, lower_bounds=lower, upper_bounds=upper)


# ── what a condition means in a session ──


@dataclass(frozen=True)
class Session:
    """A time zone, and whether bare text and a timestamp are compared as text, by a setting for old queries."""

    offset: timedelta
    as_text: bool = False


SESSIONS = [Session(hours * HOUR, as_text) for hours in (-18, *range(-12, 15), 18) for as_text in (False, True)]
Meaning = Callable[[int, Session], bool]


@dataclass(frozen=True)
class Moment:
    """A literal: the words and numbers of it, without its zone, and the zone if it names one."""

    word: str
    text: str
    zone: str = ""
    offset: timedelta | None = None

    def __str__(self) -> str:
        return f"{self.word} '{self.text}{self.zone}'".strip()

    def bound(self, column: str, session: Session) -> int:
        """The literal as a value of the column: micros in UTC for `at`, on the clock for `local`."""
        clock = micros(self.text)
        if column == "local":
            if self.offset is None or self.word != "timestamp":
                return clock  # Spark ignores the zone in bare text
            return clock + (session.offset - self.offset) // MICROSECOND
        return clock - (session.offset if self.offset is None else self.offset) // MICROSECOND


def written(value: int, session: Session) -> str:
    """A timestamp as Spark writes it."""
    moment = datetime(1970, 1, 1) + value * MICROSECOND + session.offset
    return moment.isoformat(" ").rstrip("0") if moment.microsecond else moment.isoformat(" ")


def compared(column: str, sign: str, moment: Moment) -> Meaning:
    def meaning(value: int, session: Session) -> bool:
        if session.as_text and not moment.word and column == "at":
            return ORDERS[sign](written(value, session), moment.text + moment.zone)
        return ORDERS[sign](value, moment.bound(column, session))

    return meaning


def random_moment(chance: random.Random, around: str) -> Moment:
    at = datetime.fromisoformat(around) + chance.randint(-30, 30) * HOUR
    if chance.random() < 0.3:
        return Moment(chance.choice(["", "timestamp", "date", "timestamp_ntz"]), str(at.date()))
    if chance.random() < 0.3:
        at += chance.choice([1, 500_000, 999_999]) * MICROSECOND
    text = at.isoformat(chance.choice(" T"))
    word = chance.choice(["", "timestamp", "timestamp_ntz"])
    if word == "timestamp_ntz" or chance.random() < 0.5:
        return Moment(word, text)
    hours = chance.choice([-18, -12, -5, 0, 3, 14, 18])
    zone = "Z" if hours == 0 and chance.random() < 0.5 else f"{'-' if hours < 0 else '+'}{abs(hours):02}:00"
    return Moment(word, text, zone, hours * HOUR)


def random_comparison(chance: random.Random, column: str, around: str) -> tuple[str, Meaning]:
    moment = random_moment(chance, around)
    kind = chance.choice(["compare", "compare", "flipped", "between"])
    if kind == "between":
        high = random_moment(chance, around)
        above, below = compared(column, ">=", moment), compared(column, "<=", high)
        return (
            f"{column} BETWEEN {moment} and {high}",
            lambda value, session: above(value, session) and below(value, session),
        )
    sign = chance.choice(["=", "==", "<", "<=", ">", ">="])
    if kind == "flipped":
        flipped = sign.translate(str.maketrans("<>", "><"))
        return f"{moment} {flipped} {column}", compared(column, sign, moment)
    return f"{column.upper()} {sign} {moment}", compared(column, sign, moment)


def random_condition(chance: random.Random, column: str, around: str) -> tuple[str, Meaning]:
    """All rows have an `id` of 0 or more and the country x; `hash` is what nobody but Spark understands."""
    text, left = random_comparison(chance, column, around)
    form = chance.randint(0, 6)
    if form < 3:
        return [text, f"({text}) and country = 'x'", f"hash(id) is not null and {text}"][form], left
    if form == 3:
        return f"country = 'y' or ({text})", left
    other, right = random_comparison(chance, column, around)
    if form == 4:
        return f"{text} and {other}", lambda value, session: left(value, session) and right(value, session)
    if form == 5:
        return f"({text} or {other})", lambda value, session: left(value, session) or right(value, session)
    return f"not {text} and id >= 0", lambda value, session: not left(value, session)


@pytest.mark.parametrize("column", ["at", "local"])
@pytest.mark.parametrize("partition", ["", "{}", "hour({})", "day({})", "month({})", "year({})", "bucket(4, {})"])
def test_a_file_is_ruled_out_only_if_no_row_of_it_matches_in_any_zone(
    tmp_path: Path, partition: str, column: str
) -> None:
    chance = random.Random(partition + column)
    table = Staged(tmp_path, COLUMNS, (partition.format(column),) if partition else ())
    ruled_out = 0
    for around in ("2024-01-01", "1970-01-01", "1969-07-01", "0004-03-01"):
        files: list[tuple[list[int], list[LiveFile]]] = []
        for _ in range(10):
            start = micros(around) + chance.randint(-100, 100) * HOUR // MICROSECOND
            steps = [0, *(chance.choice([-1, 1, 3_599_999_999]) for _ in range(chance.randint(0, 2)))]
            for record in table.stage(rows_of([start + step for step in steps])):
                values = [row[column] for row in table.rows(record)]
                held = [micros(value.isoformat()) for value in values]
                files.append((held, [table.live(one) for one in (record, without_bounds(record))]))
        for _ in range(30):
            text, meaning = random_condition(chance, column, around)
            where = Where.parse(text, table.schema)
            assert not where.plain
            for held, versions in files:
                lost = [file for file in versions if not where.may_match(file, table.metadata)]
                if lost:
                    assert not any(meaning(value, session) for value in held for session in SESSIONS), (text, held)
                assert not any(where.must_match(file, table.metadata) for file in versions)
                ruled_out += len(lost)
    # The check would be blind if nothing were ever proven.
    assert ruled_out > 100


# ── what is ruled out ──

NEW_YEAR = [f"2023-12-{day}" for day in range(25, 32)] + [f"2024-01-0{day}" for day in range(1, 8)]


NewYear = tuple[str, list[tuple[Staged, dict[str, LiveFile]]]]


def surviving(table: Staged, files: dict[str, LiveFile], text: str) -> list[str]:
    where = Where.parse(text, table.schema)
    return [name for name, file in files.items() if where.may_match(file, table.metadata)]


DAYS = [
    ("{} < '2024-01-01'", "2023-12-25", "2024-01-01"),
    ("{} <= '2024-01-01'", "2023-12-25", "2024-01-02"),
    ("{} > '2024-01-01'", "2023-12-31", "2024-01-07"),
    ("{} >= timestamp '2024-01-01 10:00:00'", "2023-12-31", "2024-01-07"),
    ("{} < TIMESTAMP'2024-01-01T00:00:00Z'", "2023-12-25", "2024-01-01"),
    ("{} < timestamp_ntz '2024-01-01 00:00:00'", "2023-12-25", "2024-01-01"),
    ("DATE '2024-01-01' > {}", "2023-12-25", "2024-01-01"),
    ("{} = '2024-01-01'", "2023-12-31", "2024-01-02"),
    ("{} = timestamp '2024-01-01T12:00:00.5+12:00'", "2023-12-31", "2024-01-02"),
    ("{} between '2024-01-01' and '2024-01-03 00:00:00'", "2023-12-31", "2024-01-04"),
    ("{0} >= '2023-12-30' and {0} < date '2024-01-01'", "2023-12-29", "2024-01-01"),
    ("country = 'x' and {} < '2024-01-01'", "2023-12-25", "2024-01-01"),
    ("hash(id) % 2 = 0 and ({0} >= '2023-12-30' and {0} < '2024-01-01')", "2023-12-29", "2024-01-01"),
    ("({} < '2024-01-01' and hash(id) % 2 = 0)", "2023-12-25", "2024-01-07"),  # not worth the pains
    ("{0} < '2023-12-28' or {0} = date '2023-12-30'", "2023-12-25", "2023-12-31"),
    ("{} < '2024-01-01' or hash(id) % 2 = 0", "2023-12-25", "2024-01-07"),
    # Text that a setting would have compared as text: the zone and the T in it may be of no use.
    ("{} < '2024-01-01T00:00:00Z'", "2023-12-25", "2024-01-03"),
    ("{} > '2024-01-01T00:00:00'", "2023-12-29", "2024-01-07"),
]


@pytest.fixture(scope="module", params=["at", "local"])
def new_year(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewYear:
    """Files of a day each: partitioned by day and without statistics, and the other way round."""
    folder, column = tmp_path_factory.mktemp("days"), str(request.param)
    by_day, unpartitioned = Staged(folder, COLUMNS, (f"day({column})",)), Staged(folder, COLUMNS)
    partitions, statistics = {}, {}
    for day in NEW_YEAR:
        rows = rows_of([micros(day), micros(day) + (DAY - MICROSECOND) // MICROSECOND])
        (record,) = by_day.stage(rows)
        partitions[day] = by_day.live(without_bounds(record))
        statistics[day] = unpartitioned.live(replace(record, partition=()))
    return column, [(by_day, partitions), (unpartitioned, statistics)]


@pytest.mark.parametrize(("text", "first", "last"), DAYS, ids=[text for text, _, _ in DAYS])
def test_days_that_no_zone_reaches_are_ruled_out(new_year: NewYear, text: str, first: str, last: str) -> None:
    column, tables = new_year
    expected = NEW_YEAR[NEW_YEAR.index(first) : NEW_YEAR.index(last) + 1]
    for table, files in tables:
        assert surviving(table, files, text.format(column)) == expected


def test_a_bound_is_widened_by_one_day_to_the_microsecond(tmp_path: Path) -> None:
    table = Staged(tmp_path, COLUMNS)

    def kept(text: str, moment: str, step: int) -> bool:
        (record,) = table.stage(rows_of([micros(moment) + step]))
        return Where.parse(text, table.schema).may_match(table.live(record), table.metadata)

    for sign, moment, at, beyond in (
        ("<", "2024-01-02", False, 1),
        ("<=", "2024-01-02", True, 1),
        (">", "2023-12-31", False, -1),
        (">=", "2023-12-31", True, -1),
        ("=", "2024-01-02", True, 1),
        ("=", "2023-12-31", True, -1),
    ):
        text = f"at {sign} '2024-01-01'"
        assert kept(text, moment, 0) is at
        assert kept(text, moment, -beyond)
        assert not kept(text, moment, beyond)


@pytest.mark.parametrize(
    ("partition", "survivors"),
    [
        ("year(at)", ["2023-06-15", "2023-12-20"]),
        ("month(at)", ["2023-12-20"]),
        ("day(at)", ["2023-12-20"]),
        ("hour(at)", ["2023-12-20"]),
        ("at", ["2023-12-20"]),
        ("bucket(4, at)", ["2022-01-01", "2023-06-15", "2023-12-20", "2024-02-01", "2025-01-01"]),
    ],
)
def test_partitions_of_every_kind_rule_out(tmp_path: Path, partition: str, survivors: list[str]) -> None:
    table = Staged(tmp_path, COLUMNS, (partition,))
    files = {}
    for day in ("2022-01-01", "2023-06-15", "2023-12-20", "2024-02-01", "2025-01-01"):
        (record,) = table.stage(rows_of([micros(day)]))
        files[day] = table.live(without_bounds(record))
    assert surviving(table, files, "at between '2023-12-10' and timestamp '2023-12-28 00:00:00'") == survivors


def test_a_country_and_a_time_rule_out_together(tmp_path: Path) -> None:
    table = Staged(tmp_path, COLUMNS, ("country", "day(at)"))
    files = {}
    for country in ("x", "y"):
        for day in ("2023-06-15", "2024-06-15"):
            (record,) = table.stage(rows_of([micros(day)], country))
            files[f"{country} {day}"] = table.live(without_bounds(record))
    assert surviving(table, files, "country = 'x' and at < '2024-01-01'") == ["x 2023-06-15"]
    assert surviving(table, files, "upper(country) = 'X' and at < '2024-01-01'") == ["x 2023-06-15", "y 2023-06-15"]
    either = "(country = 'x' and at < '2024-01-01') or (country = 'y' and at > '2024-01-01')"
    assert surviving(table, files, either) == ["x 2023-06-15", "y 2024-06-15"]


def test_rows_without_a_time_match_no_comparison(tmp_path: Path) -> None:
    for partition in ((), ("day(at)",), ("month(at)",)):
        table = Staged(tmp_path, COLUMNS, partition)
        (record,) = table.stage(rows_of([None, None]))
        where = Where.parse("at < '2024-01-01'", table.schema)
        assert not where.may_match(table.live(record), table.metadata)


# ── what proves nothing ──

UNCERTAIN = [
    "at < '2024-1-1'",
    "at < '2024-01'",
    "at < '2024'",
    "at < '2024-02-30'",
    "at < '2024-01-01 10:00'",
    "at < '2024-01-01 10'",
    "at < '2024-01-01  10:00:00'",
    "at < ' 2024-01-01'",
    "at < '2024-01-01 24:00:01'",
    "at < '2024-01-01T10:00:00z'",
    "at < '2024-01-01T10:00:00 Z'",
    "at < '2024-01-01T10:00:00+01'",
    "at < '2024-01-01T10:00:00+0100'",
    "at < '2024-01-01T10:00:00+18:01'",
    "at < '2024-01-01T10:00:00 Europe/Berlin'",
    "at < '2024-01-01T10:00:00.1234567'",
    "at < '2024-01-01Z'",
    "at < '2024-01-01+01:00'",
    "at < '10000-01-01'",
    "at < '0000-01-01'",
    "at < '-2024-01-01'",
    "at < 'now'",
    "at < '２０２４-01-01'",
    "at < 20240101",
    "at < date '2024-01-01 10:00:00'",
    "at < date '2024-01-01T23:59:59-18:00'",
    "at < timestamp_ntz '2024-01-01T00:00:00+18:00'",
    "at < timestamp_ltz '2024-01-01'",
    "at < interval '2024-01-01'",
    "at < timestamp '2024-01-01' '10:00:00'",
    "at < timestamp ('2024-01-01')",
    "at < to_timestamp('2024-01-01')",
    "at < timestamp 'date 2024-01-01'",
    'at < "2024-01-01"',
    "`at` < '2024-01-01'",
    "at != '2024-01-01'",
    "at <=> '2024-01-01'",
    "not at >= '2024-01-01'",
    "not (at >= '2024-01-01')",
    "at not between '2024-01-01' and '9999-01-01'",
    "at in ('2023-01-01', '2024-01-01')",
    "at < local",
    "at + interval 1 day < '2024-01-01'",
    "date(at) < '2024-01-01'",
    "country < timestamp '2024-01-01'",
    "country < date '2024-01-01'",
    "country in (date '2024-01-01')",
    "id < timestamp '2024-01-01'",
]


@pytest.mark.parametrize("text", UNCERTAIN)
def test_what_is_not_of_the_strict_form_rules_nothing_out(tmp_path: Path, text: str) -> None:
    table = Staged(tmp_path, COLUMNS, ("day(at)",))
    (record,) = table.stage(rows_of([micros("2025-06-15")]))
    where = Where.parse(text, table.schema)
    assert not where.plain
    assert where.may_match(table.live(record), table.metadata)
    assert not where.must_match(table.live(record), table.metadata)


def test_a_typed_literal_does_not_make_a_condition_plain(tmp_path: Path) -> None:
    table = Staged(tmp_path, "country string, day date")
    (record,) = table.stage([{"country": "date 2024-01-01", "day": date(2025, 1, 1)}])
    for text in (
        "day < timestamp '2024-01-01'",
        "day in (timestamp_ntz '2024-01-01')",
        "country = date '2024-01-01'",
        "country >= timestamp '9999-01-01'",
    ):
        where = Where.parse(text, table.schema)
        assert not where.plain
        assert where.may_match(table.live(record), table.metadata)


def test_a_column_may_be_named_like_the_word_before_a_literal(tmp_path: Path) -> None:
    table = Staged(tmp_path, "timestamp timestamp, date timestamp_ntz", ())
    moment = micros("2025-06-15")
    rows = pa.table(
        {
            "timestamp": pa.array([moment], pa.timestamp("us", tz="UTC")),
            "date": pa.array([moment], pa.timestamp("us")),
        }
    )
    (record,) = table.stage(rows)
    for column in ("timestamp", "date"):
        for literal in ("'2024-01-01'", "timestamp '2024-01-01'", "date'2024-01-01'"):
            before, after = (Where.parse(f"{column} {sign} {literal}", table.schema) for sign in "<>")
            assert not before.may_match(table.live(record), table.metadata)
            assert after.may_match(table.live(record), table.metadata)


# ── the ends of the calendar ──

FIRST, LAST = "0001-01-01", "9999-12-31T23:59:59.999999"
FAR_PAST, FAR_FUTURE = -(2**63), 2**63 - 1


def ends() -> Iterator[int]:
    yield from (FAR_PAST, micros(FIRST) - 1, micros(FIRST), micros(FIRST) + 1)
    yield from (micros(LAST) - 1, micros(LAST), micros(LAST) + 1, FAR_FUTURE)


@pytest.mark.parametrize("column", ["at", "local"])
@pytest.mark.parametrize("partition", ["", "{}", "hour({})", "day({})", "month({})", "year({})"])
def test_times_at_the_ends_of_the_calendar_and_beyond_are_found(tmp_path: Path, partition: str, column: str) -> None:
    table = Staged(tmp_path, COLUMNS, (partition.format(column),) if partition else ())
    records = [(value, table.stage(rows_of([value]))[0]) for value in ends()]
    for literal in ("0001-01-01", "0001-01-02", "2024-01-01", "9999-12-30", "9999-12-31"):
        for sign in ("<", "<=", "=", ">=", ">"):
            where = Where.parse(f"{column} {sign} '{literal}'", table.schema)
            meaning = compared(column, sign, Moment("", literal))
            for value, record in records:
                matching = any(meaning(value, session) for session in SESSIONS if not session.as_text)
                for file in (table.live(record), table.live(without_bounds(record))):
                    assert where.may_match(file, table.metadata) or not matching, (where.text, value)
    known = Where.parse(f"{column} is not null", table.schema)
    assert all(known.may_match(table.live(record), table.metadata) for _, record in records)


def test_beyond_the_calendar_statistics_still_rule_out(tmp_path: Path) -> None:
    table = Staged(tmp_path, COLUMNS, ("hour(at)",))
    past, *_, future = (table.live(table.stage(rows_of([value]))[0]) for value in ends())
    later = Where.parse("at > '2024-01-01'", table.schema)
    earlier = Where.parse("at < '2024-01-01'", table.schema)
    assert [later.may_match(file, table.metadata) for file in (past, future)] == [False, True]
    assert [earlier.may_match(file, table.metadata) for file in (past, future)] == [True, False]


@pytest.mark.parametrize("partition", ["year(at)", "month(at)", "day(at)", "hour(at)"])
def test_a_bound_at_the_end_of_the_calendar_does_not_spoil_the_other(tmp_path: Path, partition: str) -> None:
    table = Staged(tmp_path, COLUMNS, (partition,))
    files = {
        day: table.live(without_bounds(table.stage(rows_of([micros(day)]))[0])) for day in ("2020-06-15", "2024-06-15")
    }
    assert surviving(table, files, "at between '0001-01-01' and '2022-01-01'") == ["2020-06-15"]
    assert surviving(table, files, "at between '2022-01-01' and timestamp '9999-12-31 23:59:59'") == ["2024-06-15"]


def test_a_time_in_a_day_that_the_clocks_left_out_is_found(tmp_path: Path) -> None:
    # In Apia there was no 2011-12-30. Spark takes a time of that day for the same time of the next, so that a column
    # without a zone is a whole day off, to either side.
    table = Staged(tmp_path, COLUMNS, ("day(local)",))
    for text, local in (
        ("local >= timestamp '2011-12-31 00:00:00'", "2011-12-30 00:00:00"),
        ("local > timestamp '2011-12-31 00:00:00'", "2011-12-30 00:00:00.000001"),
        ("local = timestamp '2011-12-30 10:00:00'", "2011-12-31 10:00:00"),
        ("local <= timestamp '2011-12-30 23:59:59'", "2011-12-31 23:59:59"),
    ):
        (record,) = table.stage(rows_of([micros(local)]))
        assert Where.parse(text, table.schema).may_match(table.live(record), table.metadata)
