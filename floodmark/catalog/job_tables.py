"""The catalog's tables of long work: jobs, and the chunks of history that they have loaded."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, MetaData, String, Table, Text


def _whole(name: str, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def make_jobs(metadata: MetaData) -> Table:
    """Long work: what it is, how far it is, and by `owner_process` and `owner_run` the lease of the run at work."""
    return Table(
        "fm_jobs",
        metadata,
        Column("id", String(26), primary_key=True),
        Column("name", String(300), nullable=False, unique=True),
        Column("kind", String(16), nullable=False),
        # A JSON list.
        Column("table_names", Text, nullable=False),
        # JSON: `pinned` is what it was made with for good, `settings` what the newest start said.
        Column("spec", Text, nullable=False),
        # pending, running, done, failed, cancelled
        Column("state", String(16), nullable=False),
        # For people, at most once a second; what is done is told by rows_done, by fm_chunks and by the tables.
        _whole("processed"),
        _whole("total", nullable=True),
        Column("unit", String(16), nullable=False),
        _whole("resumed_from"),
        # Exact: riders of the publishes.
        _whole("rows_done"),
        _whole("unfilled"),
        _whole("publishes"),
        # Why it failed, as JSON.
        Column("error", Text),
        Column("actor", Text, nullable=False),
        _whole("created_ms"),
        _whole("started_ms", nullable=True),
        _whole("updated_ms"),
        _whole("ended_ms", nullable=True),
        _whole("acknowledged_ms", nullable=True),
        _whole("cancel_ms", nullable=True),
        Column("owner_process", String(26)),
        Column("owner_run", String(26)),
    )


def make_chunks(metadata: MetaData) -> Table:
    """A chunk of history that a table has: once (I5). state: done, pruned."""
    return Table(
        "fm_chunks",
        metadata,
        Column("job", String(26), primary_key=True),
        Column("chunk", BigInteger, primary_key=True, autoincrement=False),
        Column("table_name", String(255), primary_key=True),
        Column("table_id", String(36), nullable=False),
        Column("state", String(16), nullable=False),
        _whole("rows_total"),
        _whole("version"),
        Column("operation", String(26), nullable=False),
        _whole("done_ms"),
    )
