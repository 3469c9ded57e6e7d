"""The catalog's tables of rows that are on their way in: how far each spool is fed, what was put aside, who runs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, Text


def _whole(name: str, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def make_spools(metadata: MetaData) -> Table:
    """One row per table that took rows over HTTP. It changes in the publish of the rows, and by no other step."""
    return Table(
        "fm_spools",
        metadata,
        Column("table_id", String(36), primary_key=True),
        Column("table_name", String(255), nullable=False),
        # Which spool the position is of: another one at its place is refused.
        Column("spool_id", String(26), nullable=False),
        # Where it lies. A spool is on the local disk of one machine.
        Column("host", Text, nullable=False),
        Column("folder", Text, nullable=False),
        # The records below are in the table, or in quarantine.
        _whole("position"),
        # The version of the last feed; None before the first.
        _whole("version", nullable=True),
        # Rows that came in by feeds, ever; and rows that are in quarantine now.
        _whole("rows_fed"),
        _whole("quarantined"),
        _whole("registered_ms"),
        _whole("updated_ms"),
    )


def make_spool_quarantine(metadata: MetaData) -> Table:
    """Rows that were taken, and then did not fit their table: an object of JSON lines for each group that had some."""
    return Table(
        "fm_spool_quarantine",
        metadata,
        Column("id", String(26), primary_key=True),
        Column("table_id", String(36), nullable=False, index=True),
        Column("table_name", String(255), nullable=False),
        Column("spool_id", String(26), nullable=False),
        # The first record that rows of it are of.
        _whole("record"),
        _whole("rows_held"),
        # JSON: the first error, as every error is told.
        Column("reason", Text, nullable=False),
        Column("location", Text, nullable=False),
        _whole("at_ms"),
        # held, retried, dropped
        Column("state", String(16), nullable=False),
        # The version that a retry brought them in with.
        _whole("version", nullable=True),
    )


def make_daemon(metadata: MetaData) -> Table:
    """At most one row: the process that runs the lake's tasks, and how they are. A lease as that of any process."""
    return Table(
        "fm_daemon",
        metadata,
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("process", String(26), nullable=False),
        Column("run", String(26), nullable=False),
        Column("host", Text, nullable=False),
        Column("pid", Integer, nullable=False),
        Column("address", Text),
        _whole("started_ms"),
        _whole("updated_ms"),
        # A JSON list: every task, as the daemon tells it.
        Column("tasks", Text, nullable=False),
    )
