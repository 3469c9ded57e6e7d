"""Format 3: deletions files of keyed tables, and positions of sources that count."""

import sqlalchemy as sa
from alembic import op

revision = "f0003"
down_revision = "f0002"


def upgrade() -> None:
    op.create_table(
        "fm_deletions",
        sa.Column("table_id", sa.String(36), primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True),
        sa.Column("location", sa.String(1000), primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("rows_total", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
    )
    op.add_column("fm_sources", sa.Column("position", sa.BigInteger))
    op.execute("UPDATE fm_lake SET format = 3 WHERE id = 1")
