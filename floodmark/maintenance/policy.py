"""What a table keeps, and which of its files retention removes. Pure: texts, schemas and records in, answers out.

A policy is one of three, a whole number and a unit:
    an age    90d    also m (minutes), h, w, y (365 days): keeps rows whose time in a column is not before now minus it
    a count   1000000 rows    keeps the newest rows, by sequence; a commit's rows stay or are removed together
    a size    10 GB    also B, KB, MB, TB, and KiB, MiB, GiB, TiB: removes the oldest files while so much stays
Times without a zone count as UTC. A date is past when its whole day is (UTC). A row without a time stays.

A file is removed or kept unopened only if its statistics or its partition prove it; otherwise it must be read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum

from pyiceberg.conversions import from_bytes
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import DayTransform, HourTransform, IdentityTransform, MonthTransform, YearTransform
from pyiceberg.types import DateType, NestedField, PrimitiveType

from floodmark import clock
from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.live_files import LiveFile
from floodmark.errors import Invalid
from floodmark.model import BEGINNING
from floodmark.rows.primitives import TIMES
from floodmark.rows.schema import require_name, user_fields

SEQUENCE_MAX = 2**63 - 1
# In how many steps the sequences of files are counted in one reading, to find the newest rows.
EDGES_MAX = 256

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_AGES_MS = {"m": 60_000, "h": _HOUR_MS, "d": _DAY_MS, "w": 7 * _DAY_MS, "y": 365 * _DAY_MS}
_AGE_MS_MAX = 1000 * _AGES_MS["y"]
_SIZES = {"B": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_SIZES |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_RETENTION = re.compile(rf"([0-9]{{1,18}}) *({'|'.join((*_AGES_MS, 'rows?', *_SIZES))})")
_ADVICE = "Write an age (90d, also m, h, w, y), a count (1000000 rows) or a size (10 GB, 512 MiB)."
_TIME_TRANSFORMS = (IdentityTransform, YearTransform, MonthTransform, DayTransform, HourTransform)
_EPOCH = date(1970, 1, 1).toordinal()
# More hours than exist up to the year 9999, fewer than would overflow.
_HOURS_MAX = 10**9


# ── policies ──


@dataclass(frozen=True)
class Rule:
    """A policy that fits its table: its normalized text, and exactly one of age, rows or bytes."""

    text: str
    column: NestedField | None = None
    age_ms: int | None = None
    rows: int | None = None
    size_bytes: int | None = None

    def before(self, now_ms: int) -> int:
        """The first time that an age keeps, in the column's unit: days or microseconds."""
        moment_ms = now_ms - (self.age_ms or 0)
        return moment_ms // _DAY_MS if _is_date(self.column) else moment_ms * 1000

    def before_text(self, now_ms: int) -> str:
        before = self.before(now_ms)
        return clock.format_time(before * _DAY_MS)[:10] if _is_date(self.column) else clock.format_time(before // 1000)


def check_policy(retention: str, column: str | None, schema: Schema, spec: PartitionSpec) -> Policy:
    """The policy in its stored form: the normalized text, and the column by name. `Invalid` if it is not a policy."""
    rule = read_rule(Policy(retention, column), schema, spec)
    return Policy(rule.text, rule.column.name if rule.column is not None else None)


def read_rule(policy: Policy, schema: Schema, spec: PartitionSpec) -> Rule:
    text = policy.retention
    found = _RETENTION.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None or int(found[1]) == 0:
        raise Invalid("invalid retention policy", retention=repr(text), advice=_ADVICE)
    number, unit = int(found[1]), found[2]
    if unit in _AGES_MS:
        age_ms = number * _AGES_MS[unit]
        if age_ms > _AGE_MS_MAX:
            raise Invalid("this age is longer than a thousand years", retention=text, advice="Leave the policy out.")
        return Rule(f"{number}{unit}", _time_column(policy.column, schema, spec), age_ms=age_ms)
    if policy.column is not None:
        raise Invalid("only an age uses a column", retention=text, column=policy.column, advice="Leave it out.")
    if unit in _SIZES:
        return Rule(f"{number} {unit}", size_bytes=number * _SIZES[unit])
    return Rule(f"{number} rows", rows=number)


def _time_column(name: str | None, schema: Schema, spec: PartitionSpec) -> NestedField:
    """The named column, or the table's only time column, or the one that the table is partitioned by."""
    columns = {column.name: column for column in user_fields(schema)}
    times = [column for column in columns.values() if _is_time(column)]
    if name is not None:
        column = columns[require_name(name, columns, "retention")]
        if not _is_time(column):
            raise Invalid(
                "an age needs a timestamp or a date",
                column=name,
                type=column.field_type,
                advice=f"The table's times are: {', '.join(one.name for one in times) or 'none'}.",
            )
        return column
    sources = {part.source_id for part in spec.fields if isinstance(part.transform, _TIME_TRANSFORMS)}
    chosen = times if len(times) == 1 else [column for column in times if column.field_id in sources]
    if len(chosen) != 1:
        raise Invalid(
            "an age needs a time column, and the table has several" if times else "an age needs a time column",
            columns=", ".join(column.name for column in times) or None,
            advice="Name the column to use." if times else "Keep a count (1000000 rows) or a size (10 GB) instead.",
        )
    return chosen[0]


def _is_time(column: NestedField) -> bool:
    return isinstance(column.field_type, TIMES)


def _is_date(column: NestedField | None) -> bool:
    return column is not None and isinstance(column.field_type, DateType)


# ── files ──


class Share(Enum):
    """Of how many of a file's rows something is proven; SOME: the number is unknown."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


def span(file: LiveFile) -> tuple[int, int]:
    """Bounds of the sequences of the file's rows."""
    bounds = file.seq_bounds()
    if bounds is not None:
        return bounds
    return BEGINNING + 1, SEQUENCE_MAX if file.sequence is None else file.sequence


def share_up_to(file: LiveFile, sequence: int) -> Share:
    """How many rows have no sequence above this one."""
    first, last = span(file)
    if last <= sequence:
        return Share.ALL
    return Share.NONE if first > sequence else Share.SOME


def share_before(file: LiveFile, column: NestedField, before: int, metadata: TableMetadata) -> Share:
    """How many rows have a time before this one (days, or microseconds), as far as statistics and partition prove."""
    values = (file.data_file.value_counts or {}).get(column.field_id)
    nulls = (file.data_file.null_value_counts or {}).get(column.field_id)
    if nulls == file.rows:
        return Share.NONE
    all_have_one = values == file.rows and nulls == 0
    lows = _bound(column, (file.data_file.lower_bounds or {}).get(column.field_id))
    highs = _bound(column, (file.data_file.upper_bounds or {}).get(column.field_id))
    for first, last in _partition_spans(file, column, metadata):
        all_have_one = True
        highs.append(last)
        # Old writers counted times before 1970 into the partition after theirs, never into an earlier one.
        lows += [first] if first > 0 else []
    if lows and max(lows) >= before:
        return Share.NONE
    return Share.ALL if all_have_one and highs and min(highs) < before else Share.SOME


def _bound(column: NestedField, raw: bytes | None) -> list[int]:
    if raw is None or not isinstance(column.field_type, PrimitiveType):
        return []
    try:
        return [int(from_bytes(column.field_type, raw))]
    except (ValueError, TypeError, struct.error):
        return []


def _partition_spans(file: LiveFile, column: NestedField, metadata: TableMetadata) -> Iterator[tuple[int, int]]:
    """The first and the last time that rows of the file's partition can have; empty if it does not determine them."""
    spec = metadata.specs().get(file.spec_id)
    values = file.data_file.partition
    for place, part in enumerate(spec.fields if spec is not None else ()):
        value = values[place] if part.source_id == column.field_id and place < len(values) else None
        found = _partition_span(part, value, column) if isinstance(value, int) else None
        if found is not None:
            yield found


def _partition_span(part: PartitionField, value: int, column: NestedField) -> tuple[int, int] | None:
    unit = 1 if _is_date(column) else _DAY_MS * 1000
    match part.transform:
        case IdentityTransform():
            return value, value
        case HourTransform() if not _is_date(column) and abs(value) < _HOURS_MAX:
            return value * _HOUR_MS * 1000, (value + 1) * _HOUR_MS * 1000 - 1
        case DayTransform():
            return value * unit, (value + 1) * unit - 1
        case MonthTransform() | YearTransform():
            months = 12 if isinstance(part.transform, YearTransform) else 1
            try:
                return _first_day(value * months) * unit, _first_day((value + 1) * months) * unit - 1
            except (ValueError, OverflowError):
                return None
    return None


def _first_day(month: int) -> int:
    """The first day of a month; both are counted from 1970."""
    return date(1970 + month // 12, month % 12 + 1, 1).toordinal() - _EPOCH


def oldest_files(files: Sequence[LiveFile], bytes_kept: int) -> list[LiveFile]:
    """The files to remove, oldest first by their newest row, while the rest has so many bytes. Of unknown age: none."""
    rest = sum(file.size_bytes for file in files)
    known = [file for file in files if file.seq_bounds() is not None]
    found = []
    for file in sorted(known, key=lambda file: (span(file)[1], file.path)):
        rest -= file.size_bytes
        if rest < bytes_kept:
            break
        found.append(file)
    return found


# How many of the rows in these files have a sequence above each of some ascending ones.
CountAbove = Callable[[Sequence[LiveFile], Sequence[int]], Sequence[int]]


def newest_rows_cut(files: Sequence[LiveFile], rows_kept: int, count_above: CountAbove) -> int | None:
    """The highest sequence with at least so many rows above it; None if the table has no more rows than that.

    Most files are entirely on one side of it. Only files whose sequences reach into the undecided range are counted.
    """
    if sum(file.rows for file in files) <= rows_kept:
        return None
    spans = [(file, *span(file)) for file in files]
    low = _nth_newest([(first, file.rows) for file, first, _ in spans], rows_kept)
    high = _nth_newest([(last, file.rows) for file, _, last in spans], rows_kept)
    # The sequence of the oldest row that stays is in [low, high].
    while low < high:
        edges = _edges(low, high - 1)
        straddling = [file for file, first, last in spans if first < last and last >= low and first <= high]
        counted = {file.path for file in straddling}
        certain = [(first, file.rows) for file, first, _ in spans if file.path not in counted]
        enough = [
            edge
            for edge, found in zip(edges, count_above(straddling, edges), strict=True)
            if found + sum(rows for first, rows in certain if first > edge) >= rows_kept
        ]
        low = enough[-1] + 1 if enough else low
        high = edges[len(enough)] if len(enough) < len(edges) else high
    return low - 1


def _nth_newest(sequences: Sequence[tuple[int, int]], number: int) -> int:
    """The sequence of the nth row, newest first, of rows given as (sequence, how many)."""
    for sequence, rows in sorted(sequences, reverse=True):
        number -= rows
        if number <= 0:
            return sequence
    return BEGINNING


def _edges(first: int, last: int) -> list[int]:
    steps = min(last - first, EDGES_MAX - 1)
    return [first + (last - first) * step // steps for step in range(steps + 1)] if steps else [first]
