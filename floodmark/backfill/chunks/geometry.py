"""The geometry of a history: a range of whole numbers or of time, cut into chunks of one size. Pure arithmetic.

Chunk k covers [origin + k * size, origin + (k + 1) * size), cut to [first, last); k may be negative. So every value of
the range is in exactly one chunk, and a chunk's ends never depend on the time of the call. A history without `last` is
open: it grows with its tip. Inside, a time is a whole number too: microseconds since 1970, UTC. A time without a zone
is UTC, a date is its midnight.

Chunks start at multiples of the size, counted from 0 or from 1970-01-01T00:00Z; chunks of whole weeks from 1970-01-05,
so that they start on Mondays. `align` is another origin. Months and years have no fixed length and are refused.

A plan is the wanted chunks minus the done ones, per table, from records alone.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import SupportsIndex, TypeAlias

from floodmark import clock
from floodmark.errors import Corrupt, Invalid
from floodmark.json_form import Json

NUMBER, TIME = "number", "time"
# A range with more chunks than this has a mistake in its size.
CHUNKS_MAX = 10_000_000

# A value of a range as callers get it: a whole number, or a time (UTC).
RangeValue: TypeAlias = int | datetime
# As callers pass it: also a date, or the text of a number or a time. A size: a number, a span of time or its text.
GivenValue: TypeAlias = SupportsIndex | date | str
GivenSize: TypeAlias = SupportsIndex | timedelta | str

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_WEEK = timedelta(weeks=1) // _MICROSECOND
_MONDAY = timedelta(days=4) // _MICROSECOND
_LIMITS = {
    NUMBER: (-(2**63), 2**63 - 1),
    TIME: (
        (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND,
        (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND,
    ),
}
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_NO_FIXED_LENGTH = re.compile(r"[0-9]+ *(mo|mon|months?|q|quarters?|y|yr|years?|M)", re.IGNORECASE)
_SIZE_ADVICE = "Write it like 15m, 1h, 1d or 1w."
_FIELDS = ("unit", "size", "origin", "first", "last")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of the history: `start` is in it, `end` is not."""

    number: int
    start: RangeValue
    end: RangeValue

    @property
    def name(self) -> str:
        """Its ends, like 1000..2000 or 2024-01-01..2024-01-02: no two chunks of a history share them."""
        return "..".join(range_text(self.start, self.end))


@dataclass(frozen=True)
class Geometry:
    """A history and how it is cut; `size`, `origin`, `first` and `last` are inner values."""

    unit: str
    size: int
    origin: int
    first: int
    last: int | None

    def __post_init__(self) -> None:
        if self.unit not in _LIMITS:
            raise Invalid("the range of a history must be of numbers or of times", unit=repr(self.unit))
        lowest, highest = _LIMITS[self.unit]
        for name in _FIELDS[1:]:
            value = getattr(self, name)
            if value is None and name == "last":
                continue
            if type(value) is not int or not lowest <= value <= highest:
                raise Invalid("this value is out of range", name=name, value=repr(value))
        if self.size <= 0:
            raise Invalid("the size of a chunk must be above zero", size=self.size)
        if self.last is not None and self.first >= self.last:
            raise Invalid(
                "the range is empty: its end is not after its start",
                first=value_text(self.shown(self.first)),
                last=value_text(self.shown(self.last)),
                advice="The first value is in the range, the last is not.",
            )
        if self.last is not None:
            self._check_count(range(self.number_of_inner(self.first), self.below(self.last)))

    @classmethod
    def of(
        cls, first: GivenValue, last: GivenValue | None, size: GivenSize, align: GivenValue | None = None
    ) -> Geometry:
        """From a caller's values: whole numbers, or times (datetime, date, ISO text) and a size like 1h; `last` or
        None.
        """
        unit = _unit_of(first)
        span = _size(unit, size)
        default = _MONDAY if unit == TIME and span % _WEEK == 0 else 0
        return cls(
            unit,
            span,
            default if align is None else _inner(unit, align),
            _inner(unit, first),
            None if last is None else _inner(unit, last),
        )

    # ── values ──

    def value(self, given: GivenValue) -> int:
        """The inner value of a number, a time or their text. `Invalid` if it is not of this history's kind."""
        return _inner(self.unit, given)

    def shown(self, inner: int) -> RangeValue:
        """The user's form of an inner value."""
        return inner if self.unit == NUMBER else _EPOCH + inner * _MICROSECOND

    def shown_within(self, inner: int) -> RangeValue:
        """The same for a value that may be beyond 64 bits or the years 1 to 9999: the nearest value within."""
        lowest, highest = _LIMITS[self.unit]
        return self.shown(min(max(inner, lowest), highest))

    # ── chunks ──

    def number_of_inner(self, inner: int) -> int:
        """The number of the chunk that holds an inner value, also outside of the range."""
        return (inner - self.origin) // self.size

    def chunk(self, number: int) -> Chunk:
        start, end = self.ends(number)
        return Chunk(number, self.shown(start), self.shown(end))

    def ends(self, number: int) -> tuple[int, int]:
        """Where a chunk starts and ends, as inner values."""
        if not self.has(number):
            first, last = self.number_of_inner(self.first), self.number_of_inner(self._end - 1)
            raise Invalid("this chunk does not exist", chunk=number, first=first, last=last)
        low = self.origin + number * self.size
        return max(low, self.first), min(low + self.size, self._end)

    def below(self, inner: int) -> int:
        """Exactly the chunks with a smaller number end at or before this inner value."""
        if self.last is not None and inner >= self.last:
            return self.number_of_inner(self.last - 1) + 1
        return self.number_of_inner(inner)

    def wanted(self, tip: GivenValue | None) -> range:
        """The numbers of the chunks that are complete when the source has reached `tip`, exclusive.

        Without a tip the source counts as having all of the range; of an open range, no chunk is known to be complete.
        """
        first = self.number_of_inner(self.first)
        complete = self.last if tip is None else self.value(tip)
        found = range(first, first if complete is None else max(first, self.below(complete)))
        self._check_count(found)
        return found

    def covering(self, first: GivenValue, last: GivenValue) -> range:
        """The numbers of the chunks that overlap [first, last)."""
        low, high = max(self.value(first), self.first), min(self.value(last), self._end)
        start = self.number_of_inner(low)
        return range(start, self.number_of_inner(high - 1) + 1 if low < high else start)

    def has(self, number: int) -> bool:
        """Whether a chunk of this number exists."""
        return self.number_of_inner(self.first) <= number <= self.number_of_inner(self._end - 1)

    @property
    def _end(self) -> int:
        return _LIMITS[self.unit][1] if self.last is None else self.last

    def _check_count(self, numbers: range) -> None:
        if numbers.stop - numbers.start > CHUNKS_MAX:
            raise Invalid(
                "this range has too many chunks",
                chunks=numbers.stop - numbers.start,
                most=CHUNKS_MAX,
                advice="Choose larger chunks.",
            )

    # ── stored form ──

    def as_dict(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_dict(cls, values: Json) -> Geometry:
        """The inverse of `as_dict`. `Corrupt` for anything else."""
        problem: Invalid | None = None
        match values:
            case {
                "unit": str(unit),
                "size": int(size),
                "origin": int(origin),
                "first": int(first),
                "last": int() | None as last,
                **others,
            } if not others:
                try:
                    return cls(unit, size, origin, first, last)
                except Invalid as error:
                    problem = error
        raise Corrupt(
            "the stored geometry of a history is invalid", found=repr(values)[:200], cause=problem and str(problem)
        ) from problem

    def differences(self, other: Geometry) -> list[str]:
        """How this geometry differs from the other one, in words; empty if they are the same."""
        if self.unit != other.unit:
            return [f"a range of {_UNIT_WORDS[self.unit]}, was of {_UNIT_WORDS[other.unit]}"]
        compared = [("chunk size", self._size_text(), other._size_text())]
        for name, word in (("origin", "alignment"), ("first", "first"), ("last", "last")):
            compared.append((word, self._value_text(getattr(self, name)), other._value_text(getattr(other, name))))
        return [f"{word} {mine}, was {theirs}" for word, mine, theirs in compared if mine != theirs]

    def _size_text(self) -> str:
        if self.unit == NUMBER:
            return str(self.size)
        return f"{self.size}us" if self.size % 1_000_000 else f"{self.size // 1_000_000}s"

    def _value_text(self, inner: int | None) -> str:
        return "open" if inner is None else value_text(self.shown(inner))


_UNIT_WORDS = {NUMBER: "numbers", TIME: "time"}


# ── plans ──


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk to load, and for which tables."""

    chunk: Chunk
    tables: tuple[str, ...]


def plan_chunks(
    wanted: range,
    floor: int | None,
    done: Mapping[str, Collection[int]],
    tables: Sequence[str],
    newest_first: bool,
    geometry: Geometry,
    *,
    limit: int | None = None,
) -> list[PlannedChunk]:
    """The chunks that are wanted and not done, at most `limit`, without those that end at or before the inner value
    `floor`.
    """
    found: list[PlannedChunk] = []
    numbers = _above(wanted, floor, geometry)
    for number, missing in _missing(reversed(numbers) if newest_first else iter(numbers), done, tables):
        if limit is not None and len(found) >= limit:
            break
        found.append(PlannedChunk(geometry.chunk(number), missing))
    return found


def gaps(
    wanted: range,
    floor: int | None,
    done: Mapping[str, Collection[int]],
    tables: Sequence[str],
    geometry: Geometry,
) -> list[tuple[RangeValue, RangeValue]]:
    """The ranges that are wanted and not done for every table, neighbours joined: for display."""
    found: list[list[int]] = []
    for number, _ in _missing(iter(_above(wanted, floor, geometry)), done, tables):
        if found and found[-1][1] == number:
            found[-1][1] = number + 1
        else:
            found.append([number, number + 1])
    return [(geometry.shown(geometry.ends(low)[0]), geometry.shown(geometry.ends(high - 1)[1])) for low, high in found]


def _above(wanted: range, floor: int | None, geometry: Geometry) -> range:
    if floor is None:
        return wanted
    return range(min(max(wanted.start, geometry.below(floor)), wanted.stop), wanted.stop)


def _missing(
    numbers: Iterator[int], done: Mapping[str, Collection[int]], tables: Sequence[str]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    known = [(table, frozenset(done.get(table, ()))) for table in tables]
    for number in numbers:
        missing = tuple(table for table, numbers_done in known if number not in numbers_done)
        if missing:
            yield number, missing


# ── texts ──


def value_text(value: RangeValue) -> str:
    """A value as a person writes it: a number, or 2024-01-01T10:00:00Z."""
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else str(value)


def range_text(start: RangeValue, end: RangeValue) -> tuple[str, str]:
    """Both ends as texts; times are dates if both are midnights."""
    texts = value_text(start), value_text(end)
    midnight = "T00:00:00Z"
    if all(text.endswith(midnight) for text in texts):
        return texts[0].removesuffix(midnight), texts[1].removesuffix(midnight)
    return texts


def _unit_of(first: GivenValue) -> str:
    if isinstance(first, str):
        return NUMBER if _WHOLE.fullmatch(first.strip()) else TIME
    return TIME if isinstance(first, date) else NUMBER


def _inner(unit: str, given: GivenValue) -> int:
    return _whole(given) if unit == NUMBER else _moment(given)


def _whole(given: GivenValue) -> int:
    number = None
    if isinstance(given, str) and _WHOLE.fullmatch(given.strip()):
        number = int(given)
    elif not isinstance(given, bool | str | date):
        try:
            number = operator.index(given)
        except TypeError:
            number = None
    if number is None:
        raise Invalid(
            "not a whole number",
            value=repr(given),
            advice="A range of numbers has whole numbers throughout; write times like 2024-01-01.",
        )
    lowest, highest = _LIMITS[NUMBER]
    if not lowest <= number <= highest:
        raise Invalid("this number does not fit 64 bits", value=number)
    return number


def _moment(given: GivenValue) -> int:
    moment: GivenValue | None = given
    if isinstance(given, str):
        try:
            moment = datetime.fromisoformat(given.strip())
        except ValueError:
            moment = None
    elif isinstance(given, date) and not isinstance(given, datetime):
        moment = datetime(given.year, given.month, given.day)
    if not isinstance(moment, datetime):
        raise Invalid(
            "invalid timestamp", value=repr(given), advice="Write it like 2024-01-01 or 2024-01-01T10:00:00Z."
        )
    aware = moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)
    inner = (aware - _EPOCH) // _MICROSECOND
    lowest, highest = _LIMITS[TIME]
    if not lowest <= inner <= highest:
        raise Invalid("this time is outside of the years 1 to 9999", value=repr(given))
    return int(inner)


def _size(unit: str, size: GivenSize) -> int:
    if unit == NUMBER:
        if isinstance(size, timedelta) or (isinstance(size, str) and not _WHOLE.fullmatch(size.strip())):
            raise Invalid(
                "the size of chunks must be a whole number in a range of numbers",
                size=repr(size),
                advice="For a range of time write its ends like 2024-01-01.",
            )
        return _whole(size)
    return span_us(size)


def span_us(size: GivenSize) -> int:
    """Microseconds of a span of time: a text like 15m, 1h, 1d, 1w, or a timedelta."""
    if isinstance(size, timedelta):
        return size // _MICROSECOND
    if isinstance(size, str):
        try:
            return clock.parse_duration_ms(size) * 1000
        except (Invalid, ValueError) as error:
            if _NO_FIXED_LENGTH.fullmatch(size.strip()):
                raise Invalid(
                    "months, quarters and years have no fixed length", size=size, advice="Use days or weeks, like 30d."
                ) from error
    raise Invalid("invalid duration", size=repr(size), advice=_SIZE_ADVICE)
