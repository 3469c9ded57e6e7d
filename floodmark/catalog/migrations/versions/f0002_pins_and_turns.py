"""Format 2: pins (reasons why a version must not be expired) and turns (fairness for builders that lost races)."""

import sqlalchemy as sa
from alembic import op

revision = "f0002"
down_revision = "f0001"


def upgrade() -> None:
    op.create_table(
        "fm_pins",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("taken_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fm_turns",
        sa.Column("table_id", sa.String(36), primary_key=True),
        sa.Column("operation", sa.String(26), nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
    )
    op.execute("UPDATE fm_lake SET format = 2 WHERE id = 1")
