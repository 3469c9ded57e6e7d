"""One group of a spool's records becomes one publish, with the position that it moves (SpoolRider).

1. read and fold the records; find rows that do not fit by themselves
2. write those into an object of the quarantine                        feed.quarantined
3. receive the rest, in this process: begin, stage, seal, publish      append.* or merge.*
If other tables refuse rows (a reference), the error has the values: those rows are taken out, and the rest is received.
A group that is refused all the same is halved by records, in order, so that the position only ever moves over settled
records; in a single record the rows are tried without a publish until the bad ones are known.

Crash before the publish: the records are in the spool, the position has not moved, recovery undoes or finishes the dead
operation. After it: the position is above these records. Nothing is decided by what this process remembers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from floodmark.catalog.spools import SpoolRider
from floodmark.commit.catalog import Catalog
from floodmark.engine import Engine
from floodmark.errors import Invalid, Unavailable
from floodmark.failpoints import hit
from floodmark.ingest.feed_group import BadRow, Memory, RecordReader, SpooledRows, actor_of, head_of, lines_of
from floodmark.ingest.judge import Judges
from floodmark.ingest.quarantine import clean, put_aside
from floodmark.ingest.receive import receive, try_receive
from floodmark.model import Head
from floodmark.spool.segments import Record
from floodmark.write.refusals import Offends

# A record whose rows are mostly bad must not delay the others: after so many tries the rest of it is set aside.
TRIES_MAX = 100
# Removing rows may show others to be wrong.
ROUNDS_MAX = 20
# How long rows wait for earlier rows of another table that they refer to, before they are set aside.
HOLD_S_MAX, HOLD_LOOK_S = 30.0, 0.02


@dataclass(frozen=True)
class Fed:
    """Records [since, until) are settled, as of `version`: how many rows of which record were put aside."""

    since: int
    until: int
    version: int
    rows: int
    bad: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Landed:
    """What became of a record: a version that it is in, and how many of its rows are in the table and in quarantine.

    For a record that an earlier process fed `rows` is 0: their number is not kept.
    """

    version: int | None
    rows: int
    quarantined: int


def landed_before(catalog: Catalog, table_id: str, record: int) -> Landed:
    """Of a record that an earlier process fed: in by the newest version, at the latest."""
    row = catalog.spools.get(table_id)
    bad = [
        one.bad.get(record, 0)
        for one in catalog.spools.quarantine(table_id, state=None)
        if row is not None and one.spool_id == row.spool_id
    ]
    return Landed(None if row is None else row.version, 0, sum(bad))


class Feeder:
    """Feeds one table from one spool."""

    def __init__(
        self,
        engine: Engine,
        table_id: str,
        spool_id: str,
        memory: Memory | None = None,
        await_older: Callable[[Collection[str], int], bool] = lambda tables, received_ms: False,
    ) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._table_id = table_id
        self._spool_id = spool_id
        self._memory = memory or Memory()
        # Waits for rows of these tables that came before that time; returns whether there were any.
        self._await_older = await_older
        self._judges = Judges(engine.catalog)
        # Objects were written that perhaps nothing refers to.
        self._objects = False

    def feed(self, records: Sequence[Record], fed: Callable[[Fed], None]) -> None:
        """Publish records, in order; calls `fed` after each publish. After an error only what `fed` got is in."""
        head = head_of(self._catalog, self._table_id)
        group = self._group_of(head)
        try:
            fed(self._feed_together(head.table, group, records))
        except Invalid:
            # Errors that rows of other tables cause, or a change of the table just now.
            if len(records) == 1:
                fed(self._feed_apart(records[0]))
                return
            half = len(records) // 2
            self.feed(records[:half], fed)
            self.feed(records[half:], fed)

    def _feed_together(self, table: str, group: RecordReader, records: Sequence[Record]) -> Fed:
        """One publish of all that fits. Others may refer to rows that are removed, or removed rows may have hidden
        older ones of their key: so the rest is checked again, so many times."""
        rows, bad = self._sorted(group, records)
        for _ in range(ROUNDS_MAX):
            try:
                return self._publish(table, records, rows, bad)
            except Offends as error:
                others = {offence.other for offence in error.offences}
                if self._await_older(others, max(record.received_ms for record in records)):
                    continue
                rows, bad = _without(group, records, rows, bad, error)
        return self._publish(table, records, rows, bad)

    # ── what fits ──

    def _sorted(self, group: RecordReader, records: Sequence[Record]) -> tuple[SpooledRows, list[BadRow]]:
        evolve, rows_max = records[0].evolve, sum(record.rows for record in records)
        seen = self._memory.find(self._spool_id, records)
        if seen is not None and all(map(group.is_judged_by, {one.judge for one in seen})):
            return group.join([one.table for one in seen]), []
        try:
            return group.read([record.text for record in records], rows_max, evolve=evolve), []
        except Invalid:
            good, bad = _sifted(group, records)
        return group.read(good, rows_max, evolve=evolve), bad

    def _feed_apart(self, record: Record) -> Fed:
        """A record that was refused as a whole: its rows are tried until it is known which fit together."""
        head = head_of(self._catalog, self._table_id)
        group = self._group_of(head)
        lines, bad = group.sift(record)
        trial = _Trial(self._engine, head.table, self._table_id, group, record)
        trial.check([])  # refused without any row: nothing is wrong with the rows
        trial.sift(lines)
        rows = trial.read(trial.good)
        return self._publish(head.table, [record], rows, sorted([*bad, *trial.bad], key=lambda one: one.line))

    # ── one publish ──

    def _publish(self, table: str, records: Sequence[Record], rows: SpooledRows, bad: Sequence[BadRow]) -> Fed:
        since, until = records[0].number, records[-1].number + 1
        self._objects |= bool(bad)
        held = put_aside(self._catalog, self._table_id, self._spool_id, bad)
        rider = SpoolRider(self._table_id, self._spool_id, since, until, rows.count, held)
        commit = receive(
            self._engine,
            actor_of(records, self._engine.actor),
            table,
            rows.data,
            rider=rider,
            table_id=self._table_id,
            evolve=records[0].evolve,
            from_json=rows.from_json,
            message=f"fed records {since}..{until - 1}",
        )
        # Crash here: the catalog's position is above these records; the spool still has them.
        hit("feed.fed")
        return Fed(since, until, commit.version, rows.count, Counter(one.record for one in bad))

    def clean(self) -> None:
        """After a publish: delete objects of earlier tries, which nothing can refer to any more."""
        if self._objects:
            clean(self._catalog, self._table_id)
            self._objects = False

    def _group_of(self, head: Head) -> RecordReader:
        """The reader of the records of the table that has this name now."""
        return RecordReader(self._judges.of(head.table)[1])


def _sifted(group: RecordReader, records: Sequence[Record]) -> tuple[list[bytes], list[BadRow]]:
    """The texts of the lines that fit, record by record, and the rows that do not."""
    texts: list[bytes] = []
    bad: list[BadRow] = []
    for record in records:
        try:
            group.read([record.text], record.rows, evolve=record.evolve)
            texts.append(record.text)
        except Invalid:
            good, wrong = group.sift(record)
            texts += [line.encode() for _, line in good]
            bad += wrong
    return texts, bad


def _without(
    group: RecordReader, records: Sequence[Record], rows: SpooledRows, bad: Sequence[BadRow], error: Offends
) -> tuple[SpooledRows, list[BadRow]]:
    """The rest without the rows that other tables refuse. Raises the error if none of the rows is one of them."""
    wrong, out = group.offending(rows, error.offences), {(one.record, one.line) for one in bad}
    lines = [
        (record, number, line)
        for record in records
        for number, line in lines_of(record.text)
        if (record.number, number) not in out
    ]
    if not wrong or len(lines) != rows.count:
        raise error
    found, reason = list(bad), error.as_dict()
    for place, (column, value) in wrong.items():
        record, number, line = lines[place]
        facts = {**reason["facts"], "column": column, "values": "1", "examples": f"{column}={value}"}
        found.append(BadRow(record.number, number, line, record.evolve, {**reason, "facts": facts}))
    left = [line.encode() for place, (_, _, line) in enumerate(lines) if place not in wrong]
    found.sort(key=lambda one: (one.record, one.line))
    return group.read(left, len(left), evolve=records[0].evolve), found


class _Trial:
    """Which rows of one record can be published together. `good` are tried as a whole after each that is added."""

    def __init__(self, engine: Engine, table: str, table_id: str, group: RecordReader, record: Record) -> None:
        self._engine = engine
        self._table = table
        self._table_id = table_id
        self._group = group
        self._record = record
        self._tries = 0
        self.good: list[tuple[int, str]] = []
        self.bad: list[BadRow] = []

    def read(self, lines: Sequence[tuple[int, str]]) -> SpooledRows:
        texts = [line.encode() for _, line in lines]
        return self._group.read(texts, len(texts), evolve=self._record.evolve)

    def check(self, lines: Sequence[tuple[int, str]]) -> None:
        rows = self.read(lines)
        try_receive(
            self._engine,
            actor_of([self._record], self._engine.actor),
            self._table,
            rows.data,
            table_id=self._table_id,
            evolve=self._record.evolve,
            from_json=rows.from_json,
        )

    def sift(self, lines: Sequence[tuple[int, str]]) -> None:
        if not lines:
            return
        self._tries += 1
        try:
            self.check([*self.good, *lines])
        except Invalid as error:
            if len(lines) == 1 or self._tries > TRIES_MAX:
                evolve = self._record.evolve
                self.bad += [BadRow(self._record.number, at, line, evolve, error.as_dict()) for at, line in lines]
                return
            half = len(lines) // 2
            self.sift(lines[:half])
            self.sift(lines[half:])
        else:
            self.good += lines


def await_others(they_wait: Callable[[], bool], stopped: Callable[[], bool]) -> bool:
    """Wait a while until earlier rows of other tables are fed. Returns whether there were any, and they are fed now."""
    end, waited = time.monotonic() + HOLD_S_MAX, False
    while they_wait():
        if stopped():
            raise Unavailable("earlier rows of other tables are not fed yet", advice="They come first.")
        if time.monotonic() > end:
            return False
        waited = True
        time.sleep(HOLD_LOOK_S)
    return waited
