"""What a table refuses, as text: the errors of its checks, with examples and advice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from floodmark.errors import Invalid
from floodmark.rows.schema import nearest

if TYPE_CHECKING:
    from floodmark.rows.reading.references import Missing


@dataclass(frozen=True)
class Offence:
    """Values of a column that another table's rows refuse: those of added rows, or keys of rows that `go`."""

    table: str
    column: str
    other: str
    values: pa.Array
    go: bool = False


class Offends(Invalid):
    """Rows that other tables' rows do not allow; `offences` lists them, for a caller that can go on without them."""

    def __init__(self, message: str, offences: Sequence[Offence], *, advice: str, **facts: str | int) -> None:
        super().__init__(message, advice=advice, **facts)
        self.offences = tuple(offences)

    @property
    def kind(self) -> str:
        return Invalid.__name__  # the kind that callers expect


def no_key(table: str) -> Invalid:
    return Invalid(
        "rows can only be merged into, or deleted by key from, a table with a key",
        table=table,
        advice="Append them, or create a table with a key (load --create --key).",
    )


def keys_twice(table: str, twice: Sequence[str]) -> Invalid:
    return Invalid(
        "the rows have a key more than once",
        table=table,
        examples="; ".join(twice),
        advice='Send each key once, or merge with on_duplicate="last" and order=COLUMN (load --last-by).',
    )


def new_rows_lack(table: str, columns: Sequence[str], examples: str) -> Invalid:
    return Invalid(
        "new rows of a partial merge lack required columns",
        table=table,
        columns=", ".join(columns),
        examples=examples,
        advice="Send these columns for new rows, or leave out the rows that the table does not have.",
    )


def keys_exist(table: str, rows: int, examples: str) -> Invalid:
    return Invalid(
        "rows with these keys exist already",
        table=table,
        rows=rows,
        examples=examples,
        advice="Merge them to replace the existing rows, or leave them out.",
    )


def rows_outside(table: str, rows: int, where: str) -> Invalid:
    return Invalid(
        "new rows do not match the condition of the rows that they replace",
        table=table,
        rows=rows,
        where=where,
        advice="Leave them out, or widen the condition: a second run would not replace them.",
    )


def no_assignment(table: str) -> Invalid:
    return Invalid("an update without a new value", table=table, advice="Name at least one column and its expression.")


def no_column(table: str, column: str, columns: Sequence[str]) -> Invalid:
    return Invalid("the table has no such column", table=table, column=column, advice=nearest(column, columns))


def no_expression(table: str, column: str, given: str) -> Invalid:
    return Invalid(
        "a new value is an expression in Spark SQL",
        table=table,
        column=column,
        given=repr(given)[:80],
        advice="Write text in quotes: 'NL'; null, 7, price * 2 and upper(name) are expressions too.",
    )


def assigned_twice(table: str, columns: Sequence[str]) -> Invalid:
    return Invalid("a column has two new values", table=table, columns=", ".join(columns), advice="Name it once.")


def key_assigned(table: str, column: str) -> Invalid:
    return Invalid(
        "an update cannot change the key of a row",
        table=table,
        column=column,
        advice="Delete the row and append it with its new key, in one transaction.",
    )


def referred_to(table: str, referrer: str) -> Invalid:
    return Invalid(
        "rows cannot be deleted by age from a table that another one refers to",
        table=table,
        referrer=referrer,
        advice="Delete them by a condition, which is checked; or drop the reference.",
    )


def keys_missing(offence: Offence, parent: str, found: Missing) -> Offends:
    return _offends(
        "rows refer to keys that do not exist",
        offence,
        found,
        column=offence.column,
        parent=parent,
        advice="Write the rows that they refer to first, or in the same transaction; null refers to nothing.",
    )


def still_referred_to(offence: Offence, column: str, found: Missing) -> Offends:
    return _offends(
        "rows refer to keys that would be deleted",
        offence,
        found,
        referrer=offence.other,
        column=column,
        advice="Delete the rows that refer to them first, or in the same transaction.",
    )


def _offends(message: str, offence: Offence, found: Missing, *, advice: str, **facts: str) -> Offends:
    examples = "; ".join(found.examples)
    return Offends(
        message, [offence], advice=advice, table=offence.table, **facts, values=found.count, examples=examples
    )
