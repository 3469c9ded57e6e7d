"""Are the rows that were acknowledged in the table, once, and nothing else?

Appended: a request is in with all of its rows, each once, or not at all; the acknowledged ones are in. Keyed: of every
key the row is that of the last record that has it; the order of arrival is that of the records that the answers named.
A request that nobody knows about may be in or not: it is judged only by whether it is whole and comes at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from floodmark.lake import Lake
from tests.load.clients import APPENDED, Load, Sent, keyed_rows

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Tally:
    """Rows, by what is wrong with them; `odd` has a few examples in words."""

    acknowledged: int
    in_table: int
    lost: int = 0
    doubled: int = 0
    # Of a request that is in by halves, that was refused or never sent, or with other content than was sent.
    strange: int = 0
    # Requests that nobody knows about, and that are in.
    unknown_in: int = 0
    odd: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.strange or self.odd)


def tally(lake: Lake, load: Load, sent: Sequence[Sent]) -> Tally:
    return judge(rows_of(lake, load.table), load, sent)


def judge(rows: pa.Table, load: Load, sent: Sequence[Sent]) -> Tally:
    """What is wrong with the rows of a table after a load; `sent` has every request of it."""
    odd = [f"request {one.number} was refused: {one.told}" for one in sent if one.state == "refused"]
    for one in sent:
        if one.told_again and (one.told_again, one.record_again) != ("already_taken", one.record):
            odd.append(f"request {one.number}, sent again: {one.told_again} {one.record_again}, not {one.record}")
    records = Counter(one.record for one in sent if one.state == "acknowledged")
    odd += [f"record {record} was told to {times} requests" for record, times in records.items() if times > 1]
    return (_appended if load.kind == APPENDED else _keyed)(rows, load, sent, odd)


def rows_of(lake: Lake, table: str) -> pa.Table:
    """What is really there, read from its files without Spark."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    state = lake.catalog.history.tables_at(lake.catalog.history.resolve())
    parts = []
    for path in lake.catalog.files.data_files(state[table]):
        with lake.catalog.storage.open_input(path) as file:
            parts.append(pq.read_table(file))
    return pa.concat_tables(parts, promote_options="default") if parts else pa.table({"id": [], "request": []})


def _appended(rows: pa.Table, load: Load, sent: Sequence[Sent], odd: list[str]) -> Tally:
    import pyarrow.compute as pc

    size = load.rows
    grouped = rows.group_by("request").aggregate(
        [("id", "count"), ("id", "count_distinct"), ("id", "min"), ("id", "max")]
    )
    found = {one["request"]: one for one in grouped.to_pylist()}
    lost = doubled = strange = unknown_in = 0
    for one in sent:
        here = found.pop(one.number, None)
        distinct = here["id_count_distinct"] if here else 0
        whole = here is not None and (here["id_min"], here["id_max"], distinct) == (
            one.number * size,
            (one.number + 1) * size - 1,
            size,
        )
        doubled += here["id_count"] - distinct if here else 0
        if one.state == "acknowledged":
            lost += 0 if whole else size - min(size, distinct) or size
        elif here is not None:
            unknown_in += one.state == "forsaken"
            strange += 0 if whole and one.state == "forsaken" else distinct
    strange += sum(one["id_count"] for one in found.values())
    if rows.num_rows:
        # Nothing of a row's content went to another row.
        wrong = pc.not_equal(rows["n"].cast("int64"), pc.subtract(rows["id"], _times_97(rows["id"])))
        strange += pc.sum(wrong).as_py() or 0
    acknowledged = size * sum(one.state == "acknowledged" for one in sent)
    return Tally(acknowledged, rows.num_rows, lost, doubled, strange, unknown_in, tuple(odd[:10]))


def _times_97(ids: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow.compute as pc

    return pc.multiply(pc.divide(ids, 97), 97)


def _keyed(rows: pa.Table, load: Load, sent: Sequence[Sent], odd: list[str]) -> Tally:
    winners = _winners(load, sorted((one for one in sent if one.state == "acknowledged"), key=lambda one: one.record))
    unknown: dict[int, set[int | None]] = {}
    for one in (one for one in sent if one.state == "forsaken"):
        for key, said in _said(load, one.number).items():
            unknown.setdefault(key, set()).add(said)
    found: dict[int, list[int]] = {}
    for row in rows.select(["id", "request", "place"]).to_pylist() if rows.num_rows else []:
        found.setdefault(row["id"], []).append(_mark(row["request"], row["place"]))
    lost = strange = 0
    for key in winners.keys() | found.keys():
        here: int | None = found.get(key, [None])[0]
        if here == winners.get(key) or here in unknown.get(key, ()):
            continue
        lost, strange = lost + (here is None), strange + (here is not None)
        odd.append(f"key {key}: {here}, last acknowledged {winners.get(key)}")
    doubled = sum(len(marks) - 1 for marks in found.values())
    acknowledged = load.rows * sum(one.state == "acknowledged" for one in sent)
    return Tally(acknowledged, rows.num_rows, lost, doubled, strange, 0, tuple(odd[:10]))


def _mark(request: int, place: int) -> int:
    """Which line of which request, as one number."""
    return request * 1_000_000 + place


def _said(load: Load, number: int) -> dict[int, int | None]:
    """What one request says of each of its keys: its last line counts; None deletes."""
    lines = enumerate(keyed_rows(load.rows, number))
    return {key: None if deletes else _mark(number, place) for place, (key, deletes) in lines}


def _winners(load: Load, in_order: Iterable[Sent]) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for one in in_order:
        found.update(_said(load, one.number))
    return found
