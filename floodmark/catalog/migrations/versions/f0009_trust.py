"""Format 9: what is to be known of rolled-back catalogs, dropped tables, bad chunks, sinks and their destinations."""

import sqlalchemy as sa
from alembic import op

revision = "f0009"
down_revision = "f0008"


def upgrade() -> None:
    _keep_notes_of_sinks()
    op.execute("UPDATE fm_lake SET format = 9 WHERE id = 1")

    # ── units that a rolled-back catalog does not know ──
    op.add_column("fm_sink_tables", sa.Column("epoch_seen", sa.BigInteger))
    op.add_column("fm_senders", sa.Column("unit", sa.String(26)))


# ── sinks: what they learned and lost; rows that a sender gave up ──


def _keep_notes_of_sinks() -> None:
    op.create_table(
        "fm_sink_notes",
        sa.Column("sink", sa.String(26), primary_key=True),
        sa.Column("table_id", sa.String(36), primary_key=True),
        sa.Column("note", sa.String(32), primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.Column("updated_ms", sa.BigInteger, nullable=False),
    )
    op.add_column("fm_senders", sa.Column("skipped", sa.Text))
    op.add_column("fm_units", sa.Column("passed", sa.BigInteger))
