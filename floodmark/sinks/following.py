"""Whether a sink and the tables that it follows still match; where they do not, an operator must choose.

Apart from the run of a sink: `status` asks this too, and must not wait for what moves rows.
"""

from __future__ import annotations

from floodmark.catalog.sink_state import Followed, Sink
from floodmark.catalog.units import choices
from floodmark.errors import Corrupt, NotFound
from floodmark.model import BEGINNING
from floodmark.sinks.record import REFUSED, TableRun


def is_current(sink: Sink) -> bool:
    return all(one.current and one.incarnation == sink.lake for one in sink.tables) and not sink.lost


def lost_tables(sink: Sink) -> list[TableRun]:
    return [TableRun(table, REFUSED, error=_lost_mark(sink.name, table)) for table in sink.lost]


def _lost_mark(sink: str, table: str) -> Corrupt:
    return Corrupt("the sink's mark is lost", sink=sink, table=table, advice=choices(sink, table))


def check_followed(sink: Sink, followed: Followed) -> None:
    """Refuse to go on where marks and table do not match: an operator must choose."""
    facts = {"sink": sink.name, "table": followed.table}
    advice = choices(sink.name, followed.table)
    if sink.branch is None:
        raise NotFound("the branch that the sink follows was deleted", **facts, advice="Remove the sink.")
    if followed.head_id is None:
        raise NotFound("the table of the sink is not there", **facts, advice="Make it again, or remove the sink.")
    if followed.head_id != followed.table_id:
        raise Corrupt("the table was dropped and made again: the sink's mark is of the old one", **facts, advice=advice)
    if followed.incarnation != sink.lake:
        raise Corrupt(
            "the catalog was restored from a backup: the sink may have sent rows that it does not know of",
            **facts,
            mark=followed.mark,
            advice=advice,
        )
    if followed.mark is None or followed.epoch is None:
        raise _lost_mark(sink.name, followed.table)
    if followed.head_sequence is None or not BEGINNING <= followed.mark <= followed.head_sequence:
        raise Corrupt(
            "the sink's mark is not a sequence of the table",
            **facts,
            mark=followed.mark,
            newest=followed.head_sequence,
            advice=advice,
        )
