"""Lookups as texts: what a command or a URL asks for, and the answer as JSON.

Keys and values come as text and are read as the types of their columns: times in ISO 8601, bytes in base64. A key that
is not in the table is a part of the answer, never an error: the caller decides what it means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from floodmark import clock
from floodmark.errors import Invalid, NotFound
from floodmark.index.lookup import LookupExplanation
from floodmark.index.matching import Text
from floodmark.index.writing import key_columns
from floodmark.json_form import JsonObject, Reported
from floodmark.lake import Lake
from floodmark.model import MAIN, Row, Value
from floodmark.rows.json.ndjson import json_value


@dataclass(frozen=True)
class Moment:
    """The state to read: a version, a time, or the head of a branch."""

    version: int | None = None
    at: str | None = None
    branch: str = MAIN


@dataclass(frozen=True)
class FoundRows(Reported):
    """Rows of a table at a version, in order. `not_found`: keys without a row; `next`: the cursor of the next page."""

    table: str
    version: int
    rows: tuple[JsonObject, ...]
    not_found: tuple[tuple[str, ...], ...] = ()
    next: str | None = None


def find_keys(lake: Lake, table: str, keys: Sequence[Sequence[str]], moment: Moment) -> FoundRows:
    """The rows of these keys, each given as its values in the table's order; all of one version."""
    version = _version(lake, moment)
    found = [lake.get(table, _key(key), version=version, branch=moment.branch) for key in keys]
    missing = [tuple(key) for key, row in zip(keys, found, strict=True) if row is None]
    return FoundRows(table, version, tuple(_shown(row) for row in found if row is not None), tuple(missing))


def explain_key(lake: Lake, table: str, key: Sequence[str], moment: Moment) -> LookupExplanation:
    version = _version(lake, moment)
    return lake.get(table, _key(key), version=version, branch=moment.branch, explain=True)


def find_values(
    lake: Lake,
    table: str,
    values: Mapping[str, Sequence[str | None]],
    moment: Moment,
    *,
    limit: int | None = None,
    order: Sequence[str] | None = None,
    after: str | None = None,
    columns: Sequence[str] | None = None,
) -> FoundRows:
    """A page of the rows whose columns have one of their values; None is null."""
    page = lake.lookup(
        table,
        as_values(values),
        limit=limit,
        order=order,
        after=after,
        columns=columns,
        version=moment.version,
        at=moment.at,
        branch=moment.branch,
    )
    return FoundRows(table, page.version, tuple(map(_shown, page.rows)), (), page.next)


def as_values(values: Mapping[str, Sequence[str | None]]) -> dict[str, Value]:
    return {name: [None if one is None else Text(one) for one in some] for name, some in values.items()}


def no_row(lake: Lake, found: FoundRows, moment: Moment) -> NotFound:
    """What to say of the first key that was not found: it, and what was looked at."""
    key = found.not_found[0]
    used = explain_key(lake, found.table, key, Moment(found.version, branch=moment.branch))
    return NotFound(
        "there is no row with this key",
        table=found.table,
        key=", ".join(key),
        version=found.version,
        index=used.index or "none",
        files=used.files,
        files_scanned=used.files_scanned,
    )


def cut_keys(lake: Lake, table: str, values: Sequence[str], moment: Moment) -> list[Sequence[str]]:
    """The values of several keys, one after the other, as keys."""
    schema = lake.schema(table, branch=moment.branch)
    key = [field.name for field in key_columns(schema)]
    count = max(1, len(key))
    if len(values) % count:
        raise Invalid(
            "these are not the values of whole keys",
            table=table,
            key=", ".join(key),
            given=len(values),
            advice="Give a value for each column of the key, in the table's order.",
        )
    return [values[at : at + count] for at in range(0, len(values), count)]


def _key(key: Sequence[str]) -> Value:
    return tuple(Text(value) for value in key)


def _shown(row: Row) -> JsonObject:
    return JsonObject({name: json_value(value) for name, value in row.items()})


def _version(lake: Lake, moment: Moment) -> int:
    if moment.version is not None and moment.at is not None:
        raise Invalid("give a version or a time, not both")
    at_ms = None if moment.at is None else clock.parse_time_ms(moment.at)
    return lake.catalog.history.resolve(version=moment.version, at_ms=at_ms, branch=moment.branch)
