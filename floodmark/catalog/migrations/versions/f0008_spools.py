"""Format 8: rows over HTTP: how far each spool is fed, rows that were put aside, and the daemon that runs the tasks."""

import sqlalchemy as sa
from alembic import op

revision = "f0008"
down_revision = "f0007"


def _whole(name: str, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "fm_spools",
        sa.Column("table_id", sa.String(36), primary_key=True),
        sa.Column("table_name", sa.String(255), nullable=False),
        sa.Column("spool_id", sa.String(26), nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        _whole("position"),
        _whole("version", nullable=True),
        *(_whole(name) for name in ("rows_fed", "quarantined", "registered_ms", "updated_ms")),
    )
    op.create_table(
        "fm_spool_quarantine",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("table_id", sa.String(36), nullable=False),
        sa.Column("table_name", sa.String(255), nullable=False),
        sa.Column("spool_id", sa.String(26), nullable=False),
        *(_whole(name) for name in ("record", "rows_held")),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("location", sa.Text, nullable=False),
        _whole("at_ms"),
        sa.Column("state", sa.String(16), nullable=False),
        _whole("version", nullable=True),
    )
    op.create_index("ix_fm_spool_quarantine_table_id", "fm_spool_quarantine", ["table_id"])
    op.create_table(
        "fm_daemon",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("process", sa.String(26), nullable=False),
        sa.Column("run", sa.String(26), nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("address", sa.Text),
        *(_whole(name) for name in ("started_ms", "updated_ms")),
        sa.Column("tasks", sa.Text, nullable=False),
    )
    op.execute("UPDATE fm_lake SET format = 8 WHERE id = 1")
