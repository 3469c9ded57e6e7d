"""The done chunks of a job, per output table: from the catalog, and then from what the run itself adds.

A chunk counts for the current incarnation of a table, and only while its rows exist: a pruned chunk is below the floor,
or is wanted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from floodmark.catalog.history import no_table
from floodmark.commit.catalog import Catalog


@dataclass(frozen=True)
class DoneChunks:
    """`done`: per table the numbers of its chunks. The run that holds the job adds what it loads and removes what it
    prunes; no other process publishes chunks of the job without its publish being refused.
    """

    table_ids: Mapping[str, str]
    done: Mapping[str, set[int]]

    @classmethod
    def read(cls, catalog: Catalog, job: str | None, tables: Sequence[str], chunk: int | None = None) -> DoneChunks:
        """`job`: its id; None for one that was never started. `chunk`: only that one. NotFound if a table
        is missing.
        """
        known = _table_ids(catalog, tables)
        found: dict[str, set[int]] = {table: set() for table in tables}
        within = None if chunk is None else range(chunk, chunk + 1)
        for table, table_id, number in () if job is None else catalog.chunks.done(job, within):
            if known.get(table) == table_id:
                found[table].add(number)
        return cls(known, found)

    def is_current(self, catalog: Catalog) -> bool:
        """Whether its tables are the current ones: a table that was created again has no done chunks."""
        return _table_ids(catalog, list(self.table_ids)) == self.table_ids

    def complete(self, numbers: range) -> int:
        """How many of these chunks are done for every table."""
        first, *others = self.done.values()
        return sum(1 for number in first if number in numbers and all(number in other for other in others))

    @property
    def newest(self) -> int | None:
        """The highest chunk that any table has."""
        return max((max(numbers) for numbers in self.done.values() if numbers), default=None)

    def missing(self, number: int) -> tuple[str, ...]:
        return tuple(table for table, done in self.done.items() if number not in done)

    def loaded_below(self, table: str, number: int) -> list[int]:
        return sorted(one for one in self.done[table] if one < number)

    def add(self, number: int, tables: Iterable[str]) -> None:
        for table in tables:
            self.done[table].add(number)

    def take(self, table: str, numbers: Iterable[int]) -> None:
        self.done[table].difference_update(numbers)


def joined(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges, neighbours joined, the upper ends exclusive."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def _table_ids(catalog: Catalog, tables: Sequence[str]) -> dict[str, str]:
    known = {head.table: head.table_id for head in catalog.history.heads()}
    for table in tables:
        if table not in known:
            raise no_table(table, list(known))
    return {table: known[table] for table in tables}
